// Free lists of the ids that name cache memory. The scheduler owns ids; executors own bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/batch.h"

namespace glm53 {

/// Ids of one pool, from `first` on. Gives out the lowest ids first, so that runs are repeatable.
template <class Id>
class IdPool {
 public:
  /// `count` ids. Throws Error(internal) when there are none.
  IdPool(int32_t first, int32_t count) : first_(first), used_(static_cast<size_t>(count > 0 ? count : 0), false) {
    if (count < 0) throw Error(Code::internal, cat("a pool of ", count, " ids"));
    for (int32_t i = count - 1; i >= 0; --i) free_.push_back(first + i);
  }

  size_t total() const { return used_.size(); }
  size_t available() const { return free_.size(); }
  size_t used() const { return total() - available(); }

  std::optional<Id> take() {
    if (free_.empty()) return std::nullopt;
    const int32_t id = free_.back();
    free_.pop_back();
    used_[place(id)] = true;
    return Id{id};
  }
  /// All or nothing.
  std::optional<std::vector<Id>> take(size_t n) {
    if (free_.size() < n) return std::nullopt;
    std::vector<Id> ids;
    ids.reserve(n);
    for (size_t i = 0; i < n; ++i) ids.push_back(*take());
    return ids;
  }
  /// Throws Error(internal) for an id that is not given out.
  void give(Id id) {
    const auto value = static_cast<int32_t>(id);
    if (!used_.at(place(value))) throw Error(Code::internal, cat("id ", value, " was given back twice"));
    used_[place(value)] = false;
    free_.push_back(value);
  }
  /// Throws Error(internal) when the lists contradict each other or `expected_used` ids are not given out.
  void check(size_t expected_used, std::string_view what) const {
    size_t marked = 0;
    for (const bool u : used_) marked += u ? 1 : 0;
    if (marked != used() || marked != expected_used)
      throw Error(Code::internal, cat(what, " pool: ", marked, " ids marked, ", used(), " not free, ", expected_used,
                                      " expected in use"));
  }

 private:
  size_t place(int32_t id) const {
    if (id < first_ || static_cast<size_t>(id - first_) >= used_.size())
      throw Error(Code::internal, cat("id ", id, " is not of this pool"));
    return static_cast<size_t>(id - first_);
  }

  int32_t first_;
  std::vector<bool> used_;
  std::vector<int32_t> free_;  // a stack
};

/// Block 0 is never given out.
using BlockPool = IdPool<BlockId>;
using SlotPool = IdPool<SlotId>;
using SnapPool = IdPool<SnapId>;

}  // namespace glm53
