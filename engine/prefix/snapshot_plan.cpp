#include "engine/prefix/snapshot_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::prefix {

double class_weight(SnapClass cls, bool passed) {
  switch (passed ? SnapClass::interval : cls) {
    case SnapClass::head:
      return 8;
    case SnapClass::turn:
      return 2;
    case SnapClass::interval:
      return 0.5;
    case SnapClass::output:
    case SnapClass::divergence:
      return 1;
  }
  throw Error(Code::internal, cat("no snapshot class ", static_cast<int>(cls)));
}

double decayed(double uses, Time since_use, Time half_life) {
  return uses * std::exp2(-static_cast<double>(since_use.count()) / static_cast<double>(half_life.count()));
}

double value(SnapClass cls, double uses, Time since_use, int32_t saved, Time half_life, bool passed) {
  return class_weight(cls, passed) * decayed(uses, since_use, half_life) * saved;
}

std::vector<Export> plan_exports(const ExportRequest& r) {
  if (r.prompt < 0 || r.hit < 0 || r.matched < 0 || r.interval < 0 || r.divergence_gap < 0 || r.align < 1)
    throw Error(Code::internal, cat("snapshots of a prompt of ", r.prompt, " tokens, hit ", r.hit, ", matched ",
                                    r.matched, ", interval ", r.interval, ", align ", r.align));
  std::map<int32_t, SnapClass> at;
  const auto want = [&](int64_t position, SnapClass cls) {
    const auto p = static_cast<int32_t>(position / r.align * r.align);
    if (p <= r.hit) return;
    const auto [entry, fresh] = at.try_emplace(p, cls);
    if (!fresh && class_weight(cls) > class_weight(entry->second)) entry->second = cls;
  };
  for (size_t i = 0; i < r.boundaries.size(); ++i) {
    const int32_t b = r.boundaries[i];
    if (b >= 1 && b <= r.prompt) want(b, i == 0 && r.boundaries.size() > 1 ? SnapClass::head : SnapClass::turn);
  }
  if (r.interval > 0)
    for (int64_t p = r.interval; p <= r.prompt; p += r.interval) want(p, SnapClass::interval);
  const int32_t matched = std::min(r.matched, r.prompt);
  if (matched - r.hit > r.divergence_gap) want(matched, SnapClass::divergence);
  std::vector<Export> plan;
  plan.reserve(at.size());
  for (const auto& [position, cls] : at) plan.push_back({position, cls});
  return plan;
}

std::vector<Export> exports_of_piece(std::span<const Export> plan, int32_t begin, int32_t end, size_t most) {
  std::vector<Export> inside;
  for (const Export& e : plan)
    if (e.position > begin && e.position <= end) inside.push_back(e);
  std::sort(inside.begin(), inside.end(), [](const Export& a, const Export& b) {
    const double wa = class_weight(a.cls), wb = class_weight(b.cls);
    return wa != wb ? wa > wb : a.position > b.position;
  });
  if (inside.size() > most) inside.resize(most);
  std::sort(inside.begin(), inside.end(), [](const Export& a, const Export& b) { return a.position < b.position; });
  return inside;
}

bool keep_interval(int32_t position, int32_t newest, int32_t interval) {
  if (interval <= 0 || position >= newest) return true;
  const int32_t k = position / interval;
  const int32_t behind = newest / interval - k;
  if (behind < 2) return true;
  const auto spacing = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(behind)));
  return k % spacing == 0;
}

}  // namespace glm53::prefix
