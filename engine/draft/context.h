// Which positions of a drafter's context hold something, by slot and snapshot. Host side only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/batch.h"

namespace glm53 {

/// Positions [begin, end).
struct ContextRange {
  int32_t begin = 0, end = 0;
  bool operator==(const ContextRange&) const = default;
};

/// One gapless range a slot, in a ring of `ring` positions. Positions behind what is committed may be in it (rows of a
/// verification that were rejected): readable() cuts them off, and the next pass overwrites them.
class DraftContext {
 public:
  DraftContext(int slots, int snaps, int ring)
      : slots_(static_cast<size_t>(slots)), snaps_(static_cast<size_t>(snaps)), ring_(ring) {}

  /// The sequence of this slot goes on at `position`, without anything before it.
  void begin_at(SlotId slot, int32_t position) { of(slot) = {position, position}; }
  /// Rows of positions start … start+n−1 are there now.
  void extend(SlotId slot, int32_t start, int32_t n) {
    ContextRange& r = of(slot);
    if (start > r.end || start < r.begin) r.begin = start;
    r.end = start + n;
    r.begin = std::max(r.begin, r.end - ring_);
  }
  /// What a block whose anchor has this position may read.
  ContextRange readable(SlotId slot, int32_t position) const {
    const ContextRange& r = slots_.at(index(slot, slots_.size(), "slot"));
    const int32_t end = std::min(r.end, position);
    return {std::min(r.begin, end), end};
  }

  void save(SlotId slot, int32_t position, SnapId snap) {
    const ContextRange& r = of(slot);
    at(snap) = position < r.begin || position > r.end ? Saved{} : Saved{true, {r.begin, position}};
  }
  /// Whether the snapshot holds the context before `position`; then the slot has it too. Else as begin_at().
  bool restore(SnapId snap, SlotId slot, int32_t position) {
    const Saved& s = at(snap);
    const bool there = s.valid && s.range.end == position;
    of(slot) = there ? s.range : ContextRange{position, position};
    return there;
  }
  void forget(SnapId snap) { at(snap) = {}; }

 private:
  struct Saved {
    bool valid = false;
    ContextRange range{};
  };
  template <class Id>
  static size_t index(Id id, size_t size, std::string_view what) {
    const auto i = static_cast<size_t>(static_cast<int32_t>(id));
    if (i >= size) throw Error(Code::internal, cat("drafter: ", what, " ", static_cast<int32_t>(id), " of ", size));
    return i;
  }
  ContextRange& of(SlotId slot) { return slots_[index(slot, slots_.size(), "slot")]; }
  Saved& at(SnapId snap) { return snaps_[index(snap, snaps_.size(), "snapshot")]; }

  std::vector<ContextRange> slots_;
  std::vector<Saved> snaps_;
  int32_t ring_;
};

}  // namespace glm53
