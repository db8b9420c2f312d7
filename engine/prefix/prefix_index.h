// The prefix index: which blocks and snapshots hold which tokens. How it decides: docs/prefix-cache.md.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/prefix/chain_hash.h"
#include "engine/prefix/prefix_tree.h"
#include "engine/prefix/snapshot_plan.h"

namespace glm53::prefix {

/// One sequence's stay in the index, from lookup (or open) to release.
enum class LeaseId : uint64_t { none = 0 };

struct Options {
  bool share_output = false;  ///< generated rows are for everybody, as if they were a prompt's
  Time half_life = kHalfLife;
  int32_t interval = 8192;  ///< of interval snapshots, for their thinning; 0 = no thinning
  /// Set: what is evicted for want of room gets its name (Freed::evicted), so that it can be kept elsewhere.
  std::optional<CacheIdentity> identity{};
};

/// Something that everybody could have used, evicted for want of room: a whole block, or a snapshot at a block's end.
struct Evicted {
  BlockId block = BlockId::null;  ///< null: it is a snapshot
  SnapId snap = SnapId::none;
  SnapClass cls = SnapClass::interval;
  int32_t position = 0;                        ///< tokens of the prefix
  ChainHash name{};                            ///< of the prefix
  std::array<int32_t, kBlockTokens> tokens{};  ///< its last ones
};

/// Ids that the index gives back; nobody uses them any more.
struct Freed {
  std::vector<BlockId> blocks;
  std::vector<SnapId> snaps;
  std::vector<Evicted> evicted;  ///< of these, what is worth to be kept elsewhere: nobody has written there yet
};

struct Hit {
  LeaseId lease = LeaseId::none;
  int32_t position = 0;           ///< tokens that need not be computed; 0 = none
  int32_t matched = 0;            ///< tokens found, restorable or not
  std::vector<BlockId> shared;    ///< first blocks of the sequence's table: read-only, the lease holds them
  BlockId copy = BlockId::null;   ///< not null when position is inside a block: to be copied to an own block, which
                                  ///< follows the shared ones; rows from position on are somebody else's
  SnapId restore = SnapId::none;  ///< state after `position` tokens
  int32_t base = 0;               ///< next shallower snapshot that is left when the one hit counts as passed
};

/// A snapshot that the caller hands over.
struct NewSnapshot {
  int32_t position = 0;  ///< tokens in the state
  SnapId id = SnapId::none;
  SnapClass cls = SnapClass::interval;
};

/// What of a sequence has been computed. Only rows and exports of finished steps: the index cannot see the device.
struct Insertion {
  Prefix prefix;                     ///< exactly the finished positions; draft rows that are not accepted are none
  std::span<const BlockId> blocks;   ///< the sequence's table, shared blocks first; may be longer than needed
  std::vector<NewSnapshot> snaps{};  ///< each id becomes the index's
};

struct Counters {
  uint64_t lookups = 0, hits = 0;
  uint64_t query_tokens = 0, hit_tokens = 0;
  uint64_t blocks_inserted = 0, snaps_inserted = 0, snaps_surplus = 0;  ///< surplus: known already or not wanted
  uint64_t blocks_evicted = 0, snaps_evicted = 0, snaps_thinned = 0;
  uint64_t walked = 0;  ///< nodes that insertions looked at: a few for each block that is new, however long the path
};

struct Contents {
  size_t blocks = 0;     ///< held by the index
  size_t evictable = 0;  ///< of these, blocks that evict_blocks could give back now
  size_t snaps = 0, pinned_snaps = 0;
  size_t roots = 0, leases = 0;
};

/// Pure bookkeeping over ids that its caller owns: no thread, no clock, no memory of the device. One owner calls
/// everything. Every id that goes in comes out once, in a Freed. All calls throw Error(internal) for arguments that
/// contradict what went before, and have then changed nothing.
class Index {
 public:
  explicit Index(const Options& options = {});
  Index(const Index&) = delete;
  Index& operator=(const Index&) = delete;

  /// The deepest position to start from, at most `max_hit` and at most one less than the number of tokens, and a lease
  /// that holds what it needs. Blocks, the block to copy and the snapshot stay where they are until settle().
  Hit lookup(std::string_view salt, const Prefix& prefix, Time now, int32_t max_hit = INT32_MAX);
  /// The whole blocks at the front of the prefix that everybody may use, and a lease on them, snapshots or not.
  /// `position`: where lookup() would start; there is nothing to restore or settle. Counts as no lookup.
  Hit hold_path(std::string_view salt, const Prefix& prefix);
  /// A lease without a look: for requests that must not read the cache.
  LeaseId open(std::string_view salt);
  /// The step that restored the snapshot and copied the block has finished (or will never run). Gives back what a
  /// release before it had to keep. For a lease without a hit it is not needed, and does nothing.
  Freed settle(LeaseId lease);
  /// The conversation goes on behind the snapshot that the lease hit, and gets a later one: if it is a turn, it is
  /// worth no more than an interval's, and nothing to what lies behind it, until somebody hits it again. Or, with
  /// `passed` false, it does not after all.
  void pass(LeaseId lease, bool passed = true);
  /// Registers finished positions. Whoever comes first keeps its block: for tokens that are known already the
  /// sequence's own block stays the sequence's. A block inside which the prefix ends is registered only for a snapshot
  /// in it. Gives back snapshots nobody needs and blocks that were replaced by fuller ones.
  Freed insert(LeaseId lease, const Insertion& insertion, Time now);
  /// The sequence ends; `blocks` is its whole table. Gives back those that the index does not hold: at once, or, before
  /// settle(), there. The lease ends with it.
  Freed release(LeaseId lease, std::span<const BlockId> blocks);
  /// What a preempted request left behind is not needed any more (it ended). Call after its last release.
  Freed forget(uint64_t request);

  /// Gives back at least `want` blocks where that many are evictable, with the snapshots in them: first blocks without
  /// a snapshot at or below them, then leaves; each least recently used first.
  Freed evict_blocks(size_t want);
  /// Gives back `want` snapshots where that many are not pinned, least valuable first.
  Freed evict_snapshots(size_t want, Time now);
  /// Value of the next victim of evict_snapshots(); nullopt when all are pinned or there is none.
  std::optional<double> lowest_value(Time now) const;
  /// Forgets everything. What running sequences use comes back when they release it; nobody else finds it any more.
  Freed clear();

  /// Registered blocks that would not be evictable if only these leases were there.
  size_t held_by(std::span<const LeaseId> leases) const;
  /// Whether the block is registered.
  bool holds(BlockId block) const { return by_block_.contains(block); }
  const Counters& counters() const { return counters_; }
  Contents contents() const;
  /// Throws Error(internal) when the structures contradict each other. Walks everything.
  void check() const;

 private:
  struct Lease {
    Root* root = nullptr;
    std::vector<Node*> held;     // each has one ref; by depth
    std::vector<uint64_t> path;  // ids of the full nodes that spell its tokens, from the top; last ones may be gone
    std::vector<uint64_t> thin;  // of these, ids of nodes that may have interval snapshots
    Node* tail = nullptr;        // of these, the one that the sequence may still extend
    Node* copied = nullptr;      // has one ref until settled
    Node* restored = nullptr;    // as above, and its snapshot at `position` a pin
    int32_t position = 0;        // of the hit
    uint64_t hit_node = 0;       // id of its node, which may be gone, as may its snapshot
    SnapId hit_snap = SnapId::none;
    bool released = false;       // before it was settled
    std::vector<BlockId> owned;  // to give back when settled
    bool settled() const { return restored == nullptr; }
  };
  struct Match {
    int32_t matched = 0, position = 0;
    Node* node = nullptr;  // holds the snapshot at `position`
  };

  Lease& lease_of(LeaseId id);
  const Lease& lease_of(LeaseId id) const;
  Root& root_of(std::string_view salt);
  Lease& open(std::string_view salt, LeaseId& id);
  void close(LeaseId id, std::span<const BlockId> blocks, Freed& freed);
  void require_held(const Lease& lease, std::span<const BlockId> blocks) const;

  int32_t visible(const Prefix& prefix) const;
  uint64_t origin_of(const Prefix& prefix, int32_t begin) const;
  Match match(Root& root, const Prefix& prefix, int32_t max_hit) const;
  static void consider(Node& node, int32_t common, int32_t max_hit, Match& best);

  static bool holds(const Lease& lease, const Node& node);
  size_t known_blocks(Lease& lease, const Insertion& in, int32_t end);
  void require_valid(const Lease& lease, const Insertion& in, size_t first_block) const;
  Node* place(Lease& lease, Node& parent, const Slice& slice, BlockId block, bool wanted, Freed& freed);
  Node& create(Node& parent, const Slice& slice, BlockId block);
  void hold(Lease& lease, Node& node);
  void drop_hold(Lease& lease, Node& node);
  void extend(Node& node, const Slice& slice);
  void absorb(Node& from, Node& into, Freed& freed);
  void absorb_prefixes_of(Node& node, Freed& freed);
  void add_snapshot(Lease& lease, Node& node, const NewSnapshot& snap, Time now, Freed& freed);
  void attach(Node& node, const Snapshot& snapshot, Freed& freed);
  double uses_at(const Snapshot& snapshot, Time now) const;
  void thin(Lease& lease, int32_t newest, Freed& freed);

  void ref(Node& node);
  void unref(Node& node);
  void refile(Node& node);
  void touch(Node& node);
  static void list_as_loose(Node& node);
  void erase_snapshot(Node& node, SnapId id);
  void remove(Node& node);
  void evict(Node& node, Freed& freed);
  const ChainHash& chain_of(Node& node) const;
  bool nameable(const Node& node) const;
  void name_snapshot(Node& node, const Snapshot& snapshot, Freed& freed) const;
  void name_block(Node& node, Freed& freed) const;
  void prune(Node* node, Freed& freed);
  void drop_if_unused(Root& root);
  static int32_t shallower(const Node& node, int offset, bool passed_too);
  std::pair<SnapId, double> victim(Time now) const;

  void check_node(const Node& node) const;
  void check_leases() const;

  const Options options_;
  std::map<uint64_t, Node> nodes_;  // by id
  std::unordered_map<BlockId, Node*> by_block_;
  std::map<SnapId, Node*> snaps_;
  std::unordered_map<uint64_t, std::set<uint64_t>> private_;  // request -> ids of its nodes
  std::set<std::pair<uint64_t, uint64_t>> orphans_, leaves_;  // (last use, id) of what can be evicted
  std::map<std::string, std::unique_ptr<Root>, std::less<>> roots_;
  std::vector<std::unique_ptr<Root>> retired_;
  std::map<LeaseId, Lease> leases_;
  size_t busy_ = 0;  // nodes that are
  uint64_t next_node_ = 1, next_lease_ = 1, tick_ = 0;
  Counters counters_;
};

}  // namespace glm53::prefix
