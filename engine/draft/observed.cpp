#include "engine/draft/observed.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

bool ObservedPiece::advance() {
  const int32_t to = stop();
  row += to - position;
  position = to;
  if (exports.empty()) return false;
  exports.erase(exports.begin());
  return position < end || !exports.empty();
}

std::vector<ObservedPiece> observed_pieces(const Batch& batch) {
  std::vector<ObservedPiece> pieces;
  const auto *begin = batch.row_begin.as<const int32_t>(), *slot = batch.slot.as<const int32_t>();
  for (int32_t s = 0; s < batch.seqs; ++s) {
    if (slot[s] < 0 || begin[s] == begin[s + 1]) continue;
    ObservedPiece p{.slot = SlotId{slot[s]}, .row = begin[s], .window = s < batch.window_seqs, .seq = s};
    p.position = batch.position.as<const int32_t>()[p.row];
    p.end = p.position + begin[s + 1] - begin[s];
    for (int i = 0; i < 2 && !p.window && !batch.export_pos.empty(); ++i) {
      const int32_t at = batch.export_pos.as<const int32_t>()[2 * s + i];
      if (at < 0) continue;
      if (at < p.position || at > p.end)
        throw Error(Code::internal,
                    cat("drafter: sequence ", s, " exports at ", at, " out of ", p.position, " to ", p.end));
      p.exports.emplace_back(at, SnapId{batch.export_snap.as<const int32_t>()[2 * s + i]});
    }
    std::sort(p.exports.begin(), p.exports.end());
    pieces.push_back(std::move(p));
  }
  return pieces;
}

void check_requests(std::span<const DraftRequest> requests, std::span<const Draft> drafts, int max_drafts) {
  if (requests.size() != drafts.size())
    throw Error(Code::internal, cat("drafter: ", drafts.size(), " places for ", requests.size(), " requests"));
  for (const DraftRequest& r : requests)
    if (r.drafts < 0 || r.drafts > max_drafts || r.position < 0 || r.anchor < 0)
      throw Error(Code::internal,
                  cat("drafter: slot ", static_cast<int32_t>(r.slot), " wants ", r.drafts, " drafts behind token ",
                      r.anchor, " at position ", r.position),
                  cat("at most ", max_drafts, " drafts"));
}

float share_of_best(std::span<const float> scores) {
  const float best = *std::max_element(scores.begin(), scores.end());
  float total = 0;
  for (const float s : scores) total += std::exp(s - best);
  return 1.0F / total;
}

}  // namespace glm53
