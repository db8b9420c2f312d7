// Pools of ids and sequences that use a prefix index, as a scheduler would.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/prefix/prefix_index.h"
#include "engine/runtime/pools.h"

namespace glm53::prefix {

using Tokens = std::vector<int32_t>;

/// `count` tokens, different for every `seed` from the first on.
inline Tokens text(int32_t seed, int32_t count) {
  Tokens t;
  for (int32_t i = 0; i < count; ++i) t.push_back(seed * 10000 + i);
  return t;
}
inline Tokens operator+(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
inline Tokens first(const Tokens& t, int32_t count) {
  return {t.begin(), t.begin() + count};
}

inline size_t blocks_of(size_t tokens) {
  return (tokens + kBlockTokens - 1) / kBlockTokens;
}

struct World {
  explicit World(const Options& options = {}, int32_t blocks = 1000, int32_t snap_count = 100)
      : index(options), pool(1, blocks), snaps(0, snap_count) {}

  struct Seq {
    Hit hit;
    std::vector<BlockId> table;
    Tokens tokens;
    std::vector<Media> media;
    int32_t prompt = 0;
  };

  Prefix prefix(const Seq& s, int32_t count, uint64_t request = 0) const {
    return {std::span(s.tokens).first(static_cast<size_t>(count)), s.media, s.prompt, request};
  }
  void give(const Freed& freed) {
    for (const BlockId b : freed.blocks) pool.give(b);
    for (const SnapId s : freed.snaps) snaps.give(s);
  }
  /// A request arrives: hit and own blocks for all its tokens.
  Seq start(const Tokens& tokens, const std::string& salt = "", const std::vector<Media>& media = {}) {
    return resume(tokens, static_cast<int32_t>(tokens.size()), 0, salt, media);
  }
  Seq resume(const Tokens& tokens, int32_t prompt, uint64_t request, const std::string& salt = "",
             const std::vector<Media>& media = {}) {
    Seq s;
    s.tokens = tokens;
    s.media = media;
    s.prompt = prompt;
    s.hit = index.lookup(salt, prefix(s, static_cast<int32_t>(tokens.size()), request), now);
    s.table = s.hit.shared;
    while (s.table.size() < blocks_of(tokens.size())) s.table.push_back(pool.take().value());
    return s;
  }
  /// More tokens, generated or given.
  void append(Seq& s, const Tokens& more) {
    s.tokens = s.tokens + more;
    while (s.table.size() < blocks_of(s.tokens.size())) s.table.push_back(pool.take().value());
  }
  /// Registers the first `count` positions, with snapshots at the given ones.
  void insert(Seq& s, int32_t count, const std::vector<std::pair<int32_t, SnapClass>>& at = {}, uint64_t request = 0) {
    std::vector<NewSnapshot> taken;
    for (const auto& [position, cls] : at) taken.push_back({position, snaps.take().value(), cls});
    give(index.insert(s.hit.lease, {prefix(s, count, request), s.table, std::move(taken)}, now));
  }
  void settle(Seq& s) { give(index.settle(s.hit.lease)); }
  void release(Seq& s) { give(index.release(s.hit.lease, s.table)); }
  /// A whole life: everything registered, snapshots at `at`.
  void run(const Tokens& tokens, const std::vector<std::pair<int32_t, SnapClass>>& at, const std::string& salt = "",
           const std::vector<Media>& media = {}) {
    Seq s = start(tokens, salt, media);
    settle(s);
    insert(s, static_cast<int32_t>(tokens.size()), at);
    release(s);
  }
  /// What a request would hit, without leaving a trace but in use and counters.
  Hit probe(const Tokens& tokens, const std::string& salt = "", const std::vector<Media>& media = {}) {
    Hit hit = index.lookup(salt, {tokens, media, static_cast<int32_t>(tokens.size()), 0}, now);
    give(index.settle(hit.lease));
    give(index.release(hit.lease, hit.shared));
    return hit;
  }
  /// No id is lost: what is out is in the index or in `in_use`.
  void check(size_t in_use = 0) const {
    index.check();
    pool.check(index.contents().blocks + in_use, "block");
    snaps.check(index.contents().snaps, "snapshot");
  }

  Index index;
  BlockPool pool;
  SnapPool snaps;
  Time now{1000};
};

}  // namespace glm53::prefix
