#include "kernels/cpu/batch_rows.h"

#include <algorithm>
#include <string>

#include "common/error.h"
#include "kernels/cpu/check.h"

namespace glm53::cpu {
namespace {

[[noreturn]] void fail(std::string_view op, int64_t seq, const std::string& what) {
  throw Error(Code::internal, std::string(op) + ": sequence " + std::to_string(seq) + " of the batch " + what);
}

void check_list(std::string_view op, std::string_view name, const Tensor& t, int64_t least) {
  expect(op, name, t, Dtype::i32, {-1});
  if (t.dim(0) < least) {
    throw Error(Code::internal, std::string(op) + ": " + std::string(name) + " has " + std::to_string(t.dim(0)) +
                                    " entries, expected at least " + std::to_string(least));
  }
}

// Slots that every live pool has.
int64_t slot_count(const Caches& caches) {
  int64_t least = -1;
  for (const Tensor* t : {&caches.state, &caches.conv, &caches.records, &caches.ring}) {
    if (!t->empty() && (least < 0 || t->dim(0) < least)) least = t->dim(0);
  }
  return std::max<int64_t>(least, 0);
}

}  // namespace

BatchRows::BatchRows(const Batch& batch, const Caches& caches, int64_t capacity, std::string_view op) : batch_(batch) {
  check(caches, capacity, op);
}

SeqRows BatchRows::at(int64_t seq) const {
  SeqRows s;
  const auto* begin = batch_.row_begin.as<const int32_t>();
  s.seq = seq;
  s.slot = slot(seq);
  s.begin = begin[seq];
  s.end = begin[seq + 1];
  s.position = s.begin < s.end ? position(s.begin) : 0;
  s.window = seq < batch_.window_seqs;
  s.replay = batch_.replay.as<const int32_t>()[seq];
  if (!s.window && !batch_.export_pos.empty()) {
    for (size_t i = 0; i < 2; ++i) {
      const int64_t at = 2 * seq + static_cast<int64_t>(i);
      s.export_pos[i] = batch_.export_pos.as<const int32_t>()[at];
      s.export_snap[i] = batch_.export_snap.as<const int32_t>()[at];
    }
  }
  return s;
}

void BatchRows::check(const Caches& caches, int64_t capacity, std::string_view op) const {
  const Batch& b = batch_;
  expect_that(0 <= b.window_rows && b.window_rows <= b.rows && b.rows <= capacity, op,
              "batch.rows exceeds the rows of the tensors, or window_rows exceeds rows");
  expect_that(0 <= b.window_seqs && b.window_seqs <= b.seqs, op, "batch.window_seqs exceeds seqs");
  check_list(op, "batch.position", b.position, b.rows);
  check_list(op, "batch.row_seq", b.row_seq, b.rows);
  check_list(op, "batch.slot", b.slot, b.seqs);
  check_list(op, "batch.replay", b.replay, b.seqs);
  check_list(op, "batch.row_begin", b.row_begin, b.seqs + 1);
  if (!b.export_pos.empty()) {
    expect(op, "batch.export_pos", b.export_pos, Dtype::i32, {-1, 2});
    expect(op, "batch.export_snap", b.export_snap, Dtype::i32, {-1, 2});
    expect_that(std::min(b.export_pos.dim(0), b.export_snap.dim(0)) >= b.seqs && b.export_pos.contiguous() &&
                    b.export_snap.contiguous(),
                op, "batch.export_pos or export_snap is shorter than seqs");
  }
  const auto* begin = b.row_begin.as<const int32_t>();
  expect_that(begin[0] == 0 && begin[b.seqs] == b.rows && begin[b.window_seqs] == b.window_rows, op,
              "batch.row_begin does not start at 0, end at rows, or split at window_rows");
  const CacheGeometry& g = caches.geometry;
  const int64_t slots = slot_count(caches);
  for (int64_t seq = 0; seq < b.seqs; ++seq) {
    if (begin[seq] > begin[seq + 1]) fail(op, seq, "has a negative number of rows");
    const SeqRows s = at(seq);
    if (s.slot < -1 || s.slot >= slots) fail(op, seq, "has slot " + std::to_string(s.slot));
    for (int64_t row = s.begin; row < s.end; ++row) {
      if (seq_of(row) != seq) fail(op, seq, "does not own row " + std::to_string(row) + " in row_seq");
      if (s.slot >= 0 && (s.position < 0 || position(row) != s.position + (row - s.begin))) {
        fail(op, seq, "has position " + std::to_string(position(row)) + " in row " + std::to_string(row));
      }
    }
    if (s.slot < 0) continue;
    if (s.window && (s.rows() > g.max_window || s.replay < 0 || s.replay > g.max_window)) {
      fail(op, seq,
           "has " + std::to_string(s.rows()) + " window rows and replay " + std::to_string(s.replay) + ", most is " +
               std::to_string(g.max_window));
    }
    if (!s.window && s.replay != 0) fail(op, seq, "has records to replay in the chunk regime");
    for (const int32_t p : s.export_pos) {
      if (p >= 0 && (p < s.position || p > s.position + s.rows())) {
        fail(op, seq, "exports state after " + std::to_string(p) + " tokens, which is outside its piece");
      }
    }
  }
}

void zero_rows(const Tensor& t, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) std::fill_n(t.as<float>() + row * t.stride[0], t.dim(1), 0.0F);
}

}  // namespace glm53::cpu
