// A rank's side of the spill tier: between the pools and the store, as the plans of rank 0 say.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "engine/runtime/plan.h"
#include "engine/spill/spill_store.h"
#include "kernels/ops.h"

namespace glm53 {

class SpillTier {
 public:
  /// Caches and ops outlive the tier.
  SpillTier(spill::StoreOptions options, const Caches& caches, Ops& ops);
  SpillTier(const SpillTier&) = delete;
  SpillTier& operator=(const SpillTier&) = delete;

  /// Bytes of a block and of a snapshot of these caches.
  static size_t block_bytes(const Caches& caches);
  static size_t snapshot_bytes(const Caches& caches);

  spill::Store& store() { return store_; }
  const spill::Store& store() const { return store_; }
  /// What the plan says about the spill tier, before anything else of it: copies evicted things away, then puts what
  /// was fetched in its place; the snapshots that were written so. The thread of the step loop. Throws Error(internal)
  /// for a restore that was not fetched, or ids outside the pools.
  std::vector<SnapId> run(const StepPlan& plan);
  /// Fetches the items in the background and keeps their bytes until a plan names the restore. `done` says whether all
  /// are there; it runs on another thread and must not throw.
  void fetch(uint64_t restore, std::vector<SpillItem> items, std::function<void(bool ok)> done);

 private:
  struct Fetched {
    std::vector<SpillItem> items;
    std::vector<spill::Payload> payloads;  // empty when not all are there
  };
  std::vector<Tensor> parts_of(const SpillItem& item) const;
  void spill(const SpillItem& item);
  std::vector<SpillItem> load(uint64_t restore, bool wanted);

  const Caches& caches_;
  Ops& ops_;
  std::mutex mutex_;
  std::map<uint64_t, Fetched> fetched_;  // guarded by mutex_
  spill::Store store_;                   // last: its thread uses the rest
};

}  // namespace glm53
