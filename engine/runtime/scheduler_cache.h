// Blocks and snapshots of running sequences: the pools, and the prefix index that keeps what sequences leave behind.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <vector>

#include "engine/prefix/prefix_index.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/pools.h"
#include "engine/spill/spill_store.h"

namespace glm53 {

struct CacheLimits {
  int32_t blocks = 2;                       ///< ids of the pool, the null block included
  int32_t snaps = 0;                        ///< snapshots of the prefix cache; 0 = nothing is ever reused
  int32_t interval = 8192;                  ///< tokens between interval snapshots; 0 = none
  const spill::Directory* spill = nullptr;  ///< of what was evicted; null = what is evicted is lost
  prefix::CacheIdentity identity{};         ///< of what this process computes
  size_t restore_blocks = 0;                ///< most blocks of one restore
};

/// What one sequence holds of the pools.
struct CacheGrant {
  prefix::LeaseId lease = prefix::LeaseId::none;
  std::vector<BlockId> table;
  int32_t position = 0;           ///< tokens restored; 0 = none
  SnapId restore = SnapId::none;  ///< state after them
  BlockId copy = BlockId::null;   ///< to be copied into table[copy_to] before the first step
  size_t copy_to = 0;
  int32_t registered = 0;               ///< finished positions that the index has been told of
  int32_t base = 0;                     ///< deepest snapshot before that, which stays when the one restored is passed
  int32_t exported = 0;                 ///< deepest snapshot that was given to it
  bool restoring = false;               ///< the step that restores and copies has not finished
  std::vector<prefix::Export> exports;  ///< planned, of the prompt
};

/// What a sequence wants.
struct CacheWish {
  std::string_view salt;
  prefix::Prefix prefix;  ///< that may be found; with the request's number when it was preempted
  std::span<const int32_t> boundaries{};
  size_t blocks = 0;  ///< of the table
  size_t spare = 0;   ///< that must be left then
  bool write = true;  ///< snapshots of the prompt are wanted
};

/// Text that comes back from the spill tier: what is there of it, and where the rest goes.
struct CacheRestore {
  CacheGrant grant;
  prefix::NewSnapshot snap;
  std::vector<SpillItem> items;
};

spill::Meta meta_of(spill::Kind kind, const prefix::ChainHash& name, int32_t position, std::span<const int32_t> tokens);

/// Pure bookkeeping, as the index. Ids that a step uses may be given out again while it runs: plans run in order.
class SchedulerCache {
 public:
  explicit SchedulerCache(const CacheLimits& limits);

  /// Whether a table of so many blocks could be had, whatever it shares: evicting what nobody uses.
  bool could_take(size_t blocks) const;
  /// Whether reserve() would succeed for so many blocks, whatever they share, if only these sequences were there.
  bool could_take_beside(std::span<const CacheGrant* const> staying, size_t blocks) const;
  /// Looks the prefix up and takes the rest of the table, evicting what nobody uses. Nothing when there is not enough.
  std::optional<CacheGrant> reserve(const CacheWish& wish, prefix::Time now);
  /// Makes the table at least so many blocks long, evicting what nobody uses; false when there are not enough.
  bool grow(CacheGrant& grant, size_t blocks);
  /// Snapshots for a piece of the prompt: a free one, or one worth less than what it is wanted for. Taken out of
  /// grant.exports.
  std::vector<prefix::NewSnapshot> exports(CacheGrant& grant, int32_t begin, int32_t end, prefix::Time now);
  /// A snapshot for the state after `position` tokens, worth as much as one of the class that saves `saved` tokens.
  SnapId take_snapshot(prefix::SnapClass cls, int32_t saved, prefix::Time now);

  /// A deeper start for the request than the index has, out of the spill tier: blocks and a snapshot are taken for it,
  /// evicting what nobody uses. Nothing when there is none, or no room.
  std::optional<CacheRestore> find_spilled(std::string_view salt, const prefix::Prefix& prompt, prefix::Time now);
  /// The bytes are there, and go into the pools with the next plan (`ok`), or there are none. Registers what is
  /// complete. `prompt` as before.
  void restored(CacheRestore& restore, bool ok, const prefix::Prefix& prompt, prefix::Time now);
  /// The next plan writes the snapshot, although it is registered already: until then nothing is copied out of it.
  void written_later(SnapId id) { loading_.emplace(spill::Kind::snapshot, static_cast<int32_t>(id)); }
  /// What the next plan has to copy away.
  std::vector<SpillItem> take_spills();

  /// The sequence's first step has finished.
  void restored(CacheGrant& grant);
  /// Registers finished positions, and snapshots that were written.
  void insert(CacheGrant& grant, const prefix::Prefix& finished, std::vector<prefix::NewSnapshot> snaps,
              prefix::Time now);
  /// The sequence ends. When it was started and its first step runs still (`running`), drop_restore() follows when that
  /// has finished.
  void release(CacheGrant& grant, bool running);
  /// The first step of a sequence that has been released has finished.
  void drop_restore(prefix::LeaseId lease);
  /// Snapshots of a sequence that ended before they could be registered.
  void drop(std::span<const prefix::NewSnapshot> snaps);
  /// A preempted request that was registered under its number ended.
  void forget(uint64_t request);
  /// Forgets everything that was computed.
  void clear();

  const BlockPool& blocks() const { return blocks_; }
  const SnapPool& snaps() const { return snaps_; }
  const prefix::Index& index() const { return index_; }
  /// Blocks that only the index holds.
  size_t idle_blocks() const { return index_.contents().evictable; }
  /// Throws Error(internal) when the pools, the index and these grants contradict each other. `written`: snapshots in
  /// steps that run.
  void check(std::span<const CacheGrant* const> grants, size_t written) const;

 private:
  bool make_room(size_t blocks);
  void append(CacheGrant& grant, size_t blocks);
  void give(const prefix::Freed& freed);

  const CacheLimits limits_;
  BlockPool blocks_;
  SnapPool snaps_;
  prefix::Index index_;
  std::map<prefix::LeaseId, std::vector<BlockId>> leaving_;  // released, their restores run still
  std::vector<SpillItem> spills_;                            // for the next plan
  std::set<std::pair<spill::Kind, int32_t>> loading_;        // registered, but filled by the next plan only
};

}  // namespace glm53
