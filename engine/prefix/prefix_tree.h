// Nodes of the prefix index and how they are compared. Internal to the folder, but for Media and Prefix.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "engine/prefix/chain.h"
#include "engine/prefix/snapshot_plan.h"
#include "kernels/batch.h"

namespace glm53::prefix {

/// Rows [begin, begin + count) of a sequence show content with this digest; their token ids are placeholders.
struct Media {
  int32_t begin = 0, count = 0;
  std::string digest;
};

/// The tokens of a sequence, and how their rows were or will be computed.
struct Prefix {
  std::span<const int32_t> tokens;
  std::span<const Media> media{};  ///< ascending, not overlapping
  int32_t prompt = 0;              ///< positions from here on are generated
  /// 0: only what everybody may use. On preemption and resumption the request's number (not 0): what lies behind the
  /// last block full of prompt is registered for, and found by, nobody else.
  uint64_t request = 0;
};

/// Media inside one block: rows [first, first + count) of it show the content from its row `skip` on.
struct MediaPart {
  int32_t first = 0, count = 0, skip = 0;
  std::string digest;
};
std::vector<MediaPart> media_of_block(std::span<const Media> media, int32_t begin, int32_t count);

/// Tokens of one block, at most 64. Views only.
struct Slice {
  uint64_t origin = 0;  ///< 0, or the only request that may use it
  std::span<const int32_t> tokens;
  std::span<const MediaPart> media;
  int size() const { return static_cast<int>(tokens.size()); }
};

struct Comparison {
  int common = 0;  ///< leading rows that are equal
  std::strong_ordering order = std::strong_ordering::equal;
};
/// Lexicographic by rows; a row is its token, then its media. A prefix comes before what it is a prefix of. So of all
/// slices in this order, the neighbours of a slice have the most rows in common with it. Origins are not looked at.
Comparison compare(const Slice& a, const Slice& b);

struct Snapshot {
  int offset = 0;  ///< tokens of its node that are in the state, 1 … 64
  SnapId id = SnapId::none;
  SnapClass cls = SnapClass::interval;
  double uses = 1;  ///< as of last_use
  Time last_use{};
  bool hit = false;
  bool passed = false;  ///< a turn whose conversation has a later snapshot, since it was used last
  int pins = 0;         ///< restores in flight
};

struct Root;
struct Node;

/// By origin, then by tokens.
struct NodeLess {
  using is_transparent = void;
  bool operator()(const Node* a, const Node* b) const;
  bool operator()(const Node* a, const Slice& b) const;
  bool operator()(const Slice& a, const Node* b) const;
};

enum class Shelf : uint8_t { none, orphan, leaf };

/// One block of one path. Only a leaf has fewer than 64 tokens.
struct Node {
  uint64_t id = 0;
  Root* root = nullptr;
  Node* parent = nullptr;  ///< null for the top of a root
  int32_t depth = -1;      ///< blocks above it
  uint64_t origin = 0;
  int size = 0;
  std::array<int32_t, kBlockTokens> tokens{};
  std::vector<MediaPart> media;
  BlockId block = BlockId::null;
  std::vector<Snapshot> snaps;  ///< by offset
  std::set<Node*, NodeLess> children;
  std::vector<Node*> loose;        ///< children with fewer than 64 tokens or a snapshot inside their block
  std::optional<ChainHash> chain;  ///< name of its prefix, once somebody asked
  bool spilled = false;            ///< a snapshot at or below its end was evicted, and named in Freed::evicted
  int refs = 0;                    ///< leases that use the block, copies and restores in flight
  int busy = 0;                    ///< 1 for refs > 0, and 1 a child that is busy
  uint64_t last_use = 0;
  Shelf shelf = Shelf::none;  ///< where eviction finds it, under last_use

  int32_t begin() const { return depth * kBlockTokens; }
  Slice slice() const { return {origin, {tokens.data(), static_cast<size_t>(size)}, media}; }
  Snapshot* snapshot_at(int offset);
};

/// All paths of one cache salt.
struct Root {
  std::string salt;
  Node top;
  size_t leases = 0;
  bool retired = false;  ///< cleared while in use: nobody finds it any more
};

}  // namespace glm53::prefix
