// What a prefix index promises, kept flat: which snapshots and blocks are registered for which tokens, and what a
// device would hold in them. Fed with what goes in and what comes back; never looks inside.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/prefix/world.h"

namespace glm53::prefix {

/// Names row p's content: all tokens up to it, and which of them were generated.
inline std::vector<uint64_t> contents_of(const Tokens& tokens, int32_t prompt, const std::string& salt) {
  std::vector<uint64_t> rows;
  uint64_t h = std::hash<std::string>{}(salt);
  for (size_t p = 0; p < tokens.size(); ++p) {
    h = (h ^ (static_cast<uint64_t>(tokens[p]) << 1 | (p >= static_cast<size_t>(prompt) ? 1 : 0))) *
        0x9E3779B97F4A7C15u;
    h ^= h >> 29;
    rows.push_back(h);
  }
  return rows;
}

struct Query {
  Tokens tokens;
  int32_t prompt = 0;
  uint64_t request = 0;
  std::string salt;
};

class Oracle {
 public:
  explicit Oracle(const Options& options) : options_(options) {}

  // ---- device
  std::map<BlockId, std::array<uint64_t, kBlockTokens>> block;
  std::map<SnapId, uint64_t> state;

  // ---- lookup
  int32_t best_hit(const Query& q) const {
    int32_t best = 0;
    for (const auto& [id, s] : snaps_) {
      const auto size = static_cast<int32_t>(s.path.size());
      if (size < static_cast<int32_t>(q.tokens.size()) && common(s.salt, s.origin, s.path, q) == size)
        best = std::max(best, size);
    }
    return best;
  }
  /// Least and most rows that may be found.
  std::pair<int32_t, int32_t> best_match(const Query& q) const {
    int32_t least = 0, most = 0;
    for (const auto& [id, b] : blocks_) {
      const int32_t n = common(b.salt, b.origin, b.path, q);
      if (n <= begin_of(b.path)) continue;
      most = std::max(most, n);
      if (!b.doubtful) least = std::max(least, n);
    }
    return {least, most};
  }
  void used(SnapId id, Time now) {
    Snap& s = snaps_.at(id);
    s.uses = uses_at(s, now) + 1;
    s.last_use = now;
    s.perhaps_passed = false;
  }
  /// Of a snapshot that was there when it was hit; it may be gone.
  void passed(SnapId id) {
    if (const auto at = snaps_.find(id); at != snaps_.end()) at->second.perhaps_passed = true;
  }

  // ---- insertion: call before give()
  void inserted(const Query& q, int32_t count, const std::vector<BlockId>& table, const std::vector<NewSnapshot>& snaps,
                Time now) {
    const int32_t end = options_.share_output || q.request != 0 ? count : std::min(count, q.prompt);
    for (const NewSnapshot& s : snaps)
      if (s.position <= end)
        snaps_[s.id] = {
            q.salt, origin(q, (s.position - 1) / 64 * 64), first(q.tokens, s.position), s.cls, 1, now, q.prompt, false,
            false};
    for (int32_t begin = 0; begin < end; begin += kBlockTokens) {
      const int32_t to = std::min(end, begin + kBlockTokens);
      const bool wanted = std::any_of(snaps.begin(), snaps.end(),
                                      [&](const NewSnapshot& s) { return s.position > begin && s.position <= to; });
      const BlockId id = table[static_cast<size_t>(begin / kBlockTokens)];
      const Block fresh{q.salt, origin(q, begin), first(q.tokens, to), false};
      bool covered = false, perhaps = false, own = false, sure = true;
      for (const auto& [other, b] : blocks_) {
        if (other == id) {
          own = true;
          sure = sure && !b.doubtful;
        } else if (b.salt == fresh.salt && b.origin == fresh.origin && begin_of(b.path) == begin &&
                   lcp(b.path, fresh.path) == to) {
          (b.doubtful ? perhaps : covered) = true;
        }
      }
      const bool worth_it = to - begin == kBlockTokens || wanted;
      const auto is_own = [id](const auto& b) { return b.first == id; };
      if (covered) {
        // With somebody's pin on it our shorter one stays, else it goes.
        for (auto& [other, b] : blocks_)
          if (other == id && static_cast<int32_t>(b.path.size()) < to) b.doubtful = true;
      } else if (!own) {
        if (worth_it) blocks_.push_back({id, {fresh.salt, fresh.origin, fresh.path, perhaps}});
      } else {
        const Block& old = std::find_if(blocks_.begin(), blocks_.end(), is_own)->second;
        if (sure && old.origin != fresh.origin) break;
        if (sure && old.path.size() >= fresh.path.size()) continue;
        if (sure) std::erase_if(blocks_, is_own);
        blocks_.push_back({id, {fresh.salt, fresh.origin, fresh.path, perhaps || !sure}});
      }
    }
  }
  /// Two snapshots of one state: what one knew, the other does now. Which other, when there are several, is not said.
  /// `sure`: it was new and not thinned out, so there is another.
  void surplus(SnapId id, bool sure) {
    const auto gone = snaps_.find(id);
    if (gone == snaps_.end()) return;
    const Snap& g = gone->second;
    std::vector<Snap*> same;
    for (auto& [other, s] : snaps_)
      if (other != id && s.salt == g.salt && s.origin == g.origin && s.path == g.path) same.push_back(&s);
    for (Snap* s : same) {
      if (class_weight(g.cls) > class_weight(s->cls)) s->cls = g.cls;
      const Time last = std::max(s->last_use, g.last_use);
      s->uses = std::max(uses_at(*s, last), uses_at(g, last));
      s->last_use = last;
      s->perhaps_passed = s->perhaps_passed || g.perhaps_passed;
      s->vague = s->vague || g.vague || same.size() > 1 || !sure;
    }
  }
  void freed(const Freed& freed) {
    for (const BlockId id : freed.blocks) std::erase_if(blocks_, [id](const auto& b) { return b.first == id; });
    for (const SnapId s : freed.snaps) snaps_.erase(s);
  }
  void cleared() {
    blocks_.clear();
    snaps_.clear();
  }
  bool knows(SnapId id) const { return snaps_.contains(id); }

  // ---- eviction
  /// Least and most a snapshot may be worth: snapshots inside siblings are on its path as tokens, but not as blocks,
  /// and those that were passed count for less.
  std::pair<double, double> worth(SnapId id, Time now) const {
    const Snap& s = snaps_.at(id);
    if (s.vague) return {0, std::numeric_limits<double>::infinity()};
    int32_t all = 0, on_grid = 0;
    for (const auto& [other, o] : snaps_) {
      const auto size = static_cast<int32_t>(o.path.size());
      if (o.salt != s.salt || o.path.size() >= s.path.size() || lcp(o.path, s.path) != size) continue;
      all = std::max(all, size);
      const uint64_t on_path = size <= s.prompt ? 0 : s.origin;
      if (size % kBlockTokens == 0 && o.origin == on_path && !o.perhaps_passed) on_grid = std::max(on_grid, size);
    }
    const auto of = [&](int32_t below, bool passed) {
      return value(s.cls, s.uses, now - s.last_use, static_cast<int32_t>(s.path.size()) - below, options_.half_life,
                   passed);
    };
    return {of(all, s.perhaps_passed && s.cls == SnapClass::turn), of(on_grid, false)};
  }
  std::vector<SnapId> snapshots() const {
    std::vector<SnapId> ids;
    for (const auto& [id, s] : snaps_) ids.push_back(id);
    return ids;
  }

 private:
  struct Snap {
    std::string salt;
    uint64_t origin;
    Tokens path;
    SnapClass cls;
    double uses;
    Time last_use;
    int32_t prompt;  // of the sequence it was taken from
    bool perhaps_passed = false;
    bool vague = false;  // what is known of its use may be another's of the same state
  };
  struct Block {
    std::string salt;
    uint64_t origin;
    Tokens path;
    bool doubtful;
  };

  double uses_at(const Snap& s, Time now) const {
    return s.uses * std::exp2(-static_cast<double>((now - s.last_use).count()) /
                              static_cast<double>(options_.half_life.count()));
  }
  static int32_t begin_of(const Tokens& path) { return (static_cast<int32_t>(path.size()) - 1) / 64 * 64; }
  static int32_t lcp(const Tokens& a, const Tokens& b) {
    return static_cast<int32_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  }
  uint64_t origin(const Query& q, int32_t begin) const {
    return options_.share_output || begin + kBlockTokens <= q.prompt ? 0 : q.request;
  }
  int32_t common(const std::string& salt, uint64_t origin, const Tokens& path, const Query& q) const {
    if (salt != q.salt || (origin != 0 && origin != q.request)) return 0;
    const int32_t n = lcp(path, q.tokens);
    return origin == 0 && !options_.share_output ? std::min(n, q.prompt) : n;
  }

  Options options_;
  std::map<SnapId, Snap> snaps_;
  std::vector<std::pair<BlockId, Block>> blocks_;  // several of one id: one of them, or none
};

}  // namespace glm53::prefix
