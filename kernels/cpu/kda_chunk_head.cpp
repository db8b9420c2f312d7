// The chunked form of one head (spec model §4.1, runtime §3.4).
#include <algorithm>
#include <cmath>
#include <string>

#include "common/error.h"
#include "kernels/batch.h"
#include "kernels/cpu/kda_head.h"
#include "kernels/cpu/kda_rows.h"
#include "kernels/cpu/row_gemm.h"

namespace glm53::cpu {
namespace {

constexpr int kSubBlock = 16;
constexpr float kLargestExponent = 80.0F;  // exp(80)·128 is still finite in fp32

// Everything a chunk keeps, one after the other in the scratch; n = kChunk rows, D = dim.
struct Chunk {
  Chunk(float* at, int dim_of_head)
      : dim(dim_of_head),
        k(at),
        q(k + matrix(dim)),
        sum(q + matrix(dim)),
        left_k(sum + matrix(dim)),
        left_q(left_k + matrix(dim)),
        right(left_q + matrix(dim)),
        delta(right + matrix(dim)),
        lower(delta + matrix(dim)),
        mix(lower + kChunk * kChunk),
        beta(mix + kChunk * kChunk) {}
  static int64_t matrix(int dim) { return int64_t{kChunk} * dim; }
  static int64_t size(int dim) { return 7 * matrix(dim) + 2 * kChunk * kChunk + kChunk; }

  int dim;
  int rows = 0;
  float *k, *q;            // normalised
  float* sum;              // inclusive cumulative log decay G
  float *left_k, *left_q;  // rows times a decay, the left operands of products
  float* right;            // k times a decay, transposed: [dim][kChunk]
  float* delta;            // δ of each row
  float* lower;            // −β_i Σ k_i k_m exp(G_i − G_m), m < i
  float* mix;              // Σ q_i k_m exp(G_i − G_m), m ≤ i
  float* beta;
};

void prepare(const HeadRows& in, const HeadGate& gate, Chunk& c) {
  c.rows = in.rows;
  const float scale = q_scale(c.dim);
  for (int i = 0; i < c.rows; ++i) {
    l2_normalise(in.k + i * in.stride, c.dim, 1.0F, c.k + i * c.dim);
    l2_normalise(in.q + i * in.stride, c.dim, scale, c.q + i * c.dim);
    float* g = c.sum + i * c.dim;
    log_decay(in.gate + i * in.gate_stride, gate, c.dim, g);
    if (i > 0) {
      for (int a = 0; a < c.dim; ++a) g[a] += g[a - c.dim];
    }
    c.beta[i] = sigmoid(in.beta[i * in.beta_stride]);
  }
}

// δ starts as β (v − (k ∘ exp G) S), the output as (q ∘ exp G) S: what the incoming state contributes.
void from_state(const HeadRows& in, const float* state, Chunk& c) {
  for (int64_t at = 0; at < int64_t{c.rows} * c.dim; ++at) {
    const float decay = std::exp(c.sum[at]);
    c.left_k[at] = c.k[at] * decay;
    c.left_q[at] = c.q[at] * decay;
  }
  row_gemm({c.left_q, c.dim}, {state, c.dim}, {in.out, in.out_stride}, c.rows, c.dim, c.dim, false);
  row_gemm({c.left_k, c.dim}, {state, c.dim}, {c.delta, c.dim}, c.rows, c.dim, c.dim, false);
  for (int i = 0; i < c.rows; ++i) {
    const float* v = in.v + i * in.stride;
    float* d = c.delta + i * c.dim;
    for (int b = 0; b < c.dim; ++b) d[b] = c.beta[i] * (v[b] - d[b]);
  }
}

// Coefficients of rows [begin, end) against all rows before `end`. Decays are taken relative to the first row of the
// block: differences to earlier blocks are then negative, and inside the block at most (rows − 1)·|lower|. Entries
// above the diagonal are products of finite numbers that nobody reads.
void coefficients(int begin, int end, Chunk& c) {
  const float* reference = c.sum + begin * c.dim;
  for (int i = begin; i < end; ++i) {
    for (int a = 0; a < c.dim; ++a) {
      const float decay = std::exp(c.sum[i * c.dim + a] - reference[a]);
      c.left_k[i * c.dim + a] = -c.beta[i] * c.k[i * c.dim + a] * decay;
      c.left_q[i * c.dim + a] = c.q[i * c.dim + a] * decay;
    }
  }
  for (int m = 0; m < end; ++m) {
    for (int a = 0; a < c.dim; ++a) {
      c.right[a * kChunk + m] = c.k[m * c.dim + a] * std::exp(reference[a] - c.sum[m * c.dim + a]);
    }
  }
  const int64_t first = int64_t{begin} * c.dim, row = int64_t{begin} * kChunk;
  row_gemm({c.left_k + first, c.dim}, {c.right, kChunk}, {c.lower + row, kChunk}, end - begin, c.dim, end, false);
  row_gemm({c.left_q + first, c.dim}, {c.right, kChunk}, {c.mix + row, kChunk}, end - begin, c.dim, end, false);
}

// Forward substitution of the block's δ, then its share of the output. Rows before `begin` are done.
void solve(const HeadRows& in, int begin, int end, Chunk& c) {
  const ConstMatrix delta{c.delta, c.dim};
  const int64_t row = int64_t{begin} * kChunk;
  row_gemm({c.lower + row, kChunk}, delta, {c.delta + int64_t{begin} * c.dim, c.dim}, end - begin, begin, c.dim, true);
  row_gemm({c.mix + row, kChunk}, delta, {in.out + begin * in.out_stride, in.out_stride}, end - begin, begin, c.dim,
           true);
  for (int i = begin; i < end; ++i) {
    const ConstMatrix block{c.delta + int64_t{begin} * c.dim, c.dim};
    const int64_t at = int64_t{i} * kChunk + begin;
    row_gemm({c.lower + at, kChunk}, block, {c.delta + int64_t{i} * c.dim, c.dim}, 1, i - begin, c.dim, true);
    row_gemm({c.mix + at, kChunk}, block, {in.out + i * in.out_stride, in.out_stride}, 1, i - begin + 1, c.dim, true);
  }
}

// to = diag(exp G_last) from + Σ (k_m ∘ exp(G_last − G_m)) δ_mᵀ over the first `rows` rows; from may be to.
void advance(int rows, const float* from, float* to, Chunk& c) {
  const float* last = c.sum + int64_t{rows - 1} * c.dim;
  for (int m = 0; m < rows; ++m) {
    for (int a = 0; a < c.dim; ++a) {
      c.right[a * kChunk + m] = c.k[m * c.dim + a] * std::exp(last[a] - c.sum[m * c.dim + a]);
    }
  }
  for (int a = 0; a < c.dim; ++a) {
    const float decay = std::exp(last[a]);
    for (int b = 0; b < c.dim; ++b) to[a * c.dim + b] = decay * from[a * c.dim + b];
  }
  row_gemm({c.right, kChunk}, {c.delta, c.dim}, {to, c.dim}, c.dim, rows, c.dim, true);
}

}  // namespace

int64_t chunk_scratch(int dim) {
  return Chunk::size(dim);
}

void run_chunk(const HeadRows& rows, const HeadGate& gate, int dim, float* state, std::span<const StateExport> exports,
               float* scratch) {
  if (!(gate.lower <= 0) || !std::isfinite(gate.lower)) {
    throw Error(Code::internal, "kda_chunk: lower_bound " + std::to_string(gate.lower) + " is not a decay",
                "expected a finite number of at most 0");
  }
  Chunk chunk(scratch, dim);
  prepare(rows, gate, chunk);
  from_state(rows, state, chunk);
  const int block =
      gate.lower < 0 ? std::clamp(static_cast<int>(std::min(kLargestExponent / -gate.lower, 15.0F)) + 1, 1, kSubBlock)
                     : kSubBlock;
  for (int begin = 0; begin < chunk.rows; begin += block) {
    const int end = std::min(begin + block, chunk.rows);
    coefficients(begin, end, chunk);
    solve(rows, begin, end, chunk);
  }
  for (const StateExport& e : exports) advance(e.rows, state, e.state, chunk);
  advance(chunk.rows, state, state, chunk);
}

}  // namespace glm53::cpu
