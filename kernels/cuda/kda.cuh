// What the kernels of Kimi delta attention share.
#pragma once

#include "kernels/cuda/device.cuh"

namespace glm53::cuda {

constexpr int kColumns = 32;     // value columns of a block
constexpr int kMaxKernel = 8;    // taps of the convolution
constexpr int kFlushPairs = 64;  // slots of one flush launch: they travel as kernel arguments

struct KdaView {
  float *state, *records, *snap_state;
  int64_t layers, layer, heads, max_window, record_width, snaps;
  int32_t dim;
  Plain a_log, dt_bias;
  float lower;
};
struct KdaRows {
  Matrix q, k, v, gate, beta, out;
};
struct Pairs {
  int32_t slot[kFlushPairs], replay[kFlushPairs];
};

__device__ inline float* state_of(const KdaView& c, float* pool, int64_t id, int64_t head) {
  return pool + ((id * c.layers + c.layer) * c.heads + head) * c.dim * c.dim;
}
__device__ inline float* record_of(const KdaView& c, int64_t slot, int64_t row) {
  return c.records + ((slot * c.layers + c.layer) * c.max_window + row) * c.record_width;
}

/// Raw inputs of one row of one head, whatever dtype they have.
struct RawRow {
  const void *k, *v, *gate, *q;
  bool bf16;
  int64_t k_at, v_at, gate_at, q_at;
  float beta;
};

/// A replay record of a head as a row.
__device__ inline RawRow record_row(const KdaView& c, int64_t slot, int64_t head, int i) {
  const float* record = record_of(c, slot, i);
  const int64_t at_head = head * 3 * c.dim;
  return {record,
          record,
          record,
          nullptr,
          false,
          at_head,
          at_head + c.dim,
          at_head + 2 * c.dim,
          0,
          record[c.heads * 3 * c.dim + head]};
}
__device__ inline RawRow raw_row(const KdaRows& in, int64_t r, int64_t column, int64_t head) {
  return {in.k.data,
          in.v.data,
          in.gate.data,
          in.q.data,
          in.k.bf16,
          r * in.k.stride + column,
          r * in.v.stride + column,
          r * in.gate.stride + column,
          r * in.q.stride + column,
          at(in.beta, r, head)};
}

/// The chunked form on tensor cores (spec runtime §3.4), for bf16 inputs and heads of 64 and 128: pieces of the
/// absolute grid of 64. False where a size, a dtype or an alignment does not fit and nothing was done. `room` holds
/// chunk_room(c) bytes, 16-byte aligned.
bool run_chunks(const KdaView& c, const Rows& b, const KdaRows& in, int32_t first_seq, int32_t seqs, void* room,
                cudaStream_t on);
size_t chunk_room(const KdaView& c);

/// The recurrence with the state in registers, for heads of 64 and 128; false for others, and nothing was done. Window
/// sequences commit their replay records first and leave the new rows out of the state; chunk sequences leave them in
/// it and export states on the way.
bool run_lanes(const KdaView& c, const Rows& b, const KdaRows& in, int32_t first_seq, int32_t seqs, bool window,
               cudaStream_t on);
bool flush_lanes(const KdaView& c, const Pairs& pairs, int64_t count, cudaStream_t on);

}  // namespace glm53::cuda
