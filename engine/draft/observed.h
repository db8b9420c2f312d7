// What drafters read out of batches and requests, and say about drafts.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "engine/draft/drafter.h"
#include "kernels/batch.h"

namespace glm53 {

/// Rows of one sequence of a pass: from `position` on, in rows from `row` on.
struct ObservedPiece {
  SlotId slot = SlotId::none;
  int32_t row = 0, position = 0, end = 0;  ///< end: behind the last position
  bool window = false;
  int32_t seq = 0;                                    ///< index in the batch
  std::vector<std::pair<int32_t, SnapId>> exports{};  ///< ascending, each in [position, end]

  /// Where to stop next: at the first export, else at the end.
  int32_t stop() const { return exports.empty() ? end : exports.front().first; }
  /// Goes on behind stop(); false when nothing is left.
  bool advance();
};

/// Sequences of a batch that have a slot and rows. Throws Error(internal) for exports outside their piece.
std::vector<ObservedPiece> observed_pieces(const Batch& batch);

/// Throws Error(internal) naming the request that asks for too much or stands nowhere, or when places are missing.
void check_requests(std::span<const DraftRequest> requests, std::span<const Draft> drafts, int max_drafts);

/// Softmax share of the largest of some scores; −inf counts nothing.
float share_of_best(std::span<const float> scores);

}  // namespace glm53
