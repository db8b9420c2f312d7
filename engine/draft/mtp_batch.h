// Rows of the MTP layer put together into a batch.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/draft/staging.h"
#include "engine/model/model.h"
#include "kernels/batch.h"

namespace glm53 {

/// Consecutive rows of one sequence. Row p is (hidden state of position p, token of position p + 1).
struct MtpRows {
  SlotId slot = SlotId::none;
  bool window = true;
  int32_t base = 0;  ///< where the layer's rows begin to count, a multiple of the block size
  int32_t position = 0;
  std::vector<int32_t> next{};                        ///< tokens behind the rows
  std::span<const BlockId> table{};                   ///< the target's
  std::vector<std::pair<int32_t, SnapId>> exports{};  ///< at most two, of rows in the chunk regime
};

/// Fills batches; the last one is valid until the next.
class MtpBatches {
 public:
  MtpBatches(const ModelLimits& limits, int rows, Ops& ops);
  /// Sequences in order, window ones first. `zero_first`: row 0 has no embedding.
  const Batch& fill(std::span<const MtpRows> sequences, bool zero_first);
  /// Lets the lists be filled anew once the work so far is done.
  void end() { lists_.end(); }

 private:
  enum List : size_t { kToken, kPosition, kRowSeq, kRowBegin, kSlot, kZeros, kTable, kExportPos, kExportSnap, kLists };
  int32_t max_blocks_;
  IntLists<kLists> lists_;
  Batch batch_;
};

}  // namespace glm53
