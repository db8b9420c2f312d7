// Kimi delta attention of one head (spec model §4, runtime §3): the recurrence of the window family and the chunked
// form of the chunk family. The state is [key dim][value dim], fp32.
#pragma once

#include <cstdint>
#include <span>

namespace glm53::cpu {

/// What turns raw gates into decays for one head: log decay of channel a = lower · σ(exp(a_log) · (gate[a] +
/// dt_bias[a])).
struct HeadGate {
  float a_log;
  const float* dt_bias;  ///< [dim]
  float lower;
};

/// Rows of one head as the projections left them (after convolution and SiLU, before normalisation). Row i of each is
/// at + i·stride. q and out may be null: the state alone is wanted.
struct HeadRows {
  const float *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t stride = 0;  ///< of q, k and v
  const float* gate = nullptr;
  int64_t gate_stride = 0;
  const float* beta = nullptr;
  int64_t beta_stride = 0;
  float* out = nullptr;
  int64_t out_stride = 0;
  int rows = 0;
};

/// State columns that run_window works on at once; they stay in the first-level cache.
inline constexpr int kWindowColumns = 16;

/// f32 values of scratch that run_window needs for `rows` rows of replay and window together.
int64_t window_scratch(int dim, int rows);
/// Commits `replay` to the state, then runs `window` on a copy of it. Every row takes the same instructions whichever
/// part it is in, so committing a row later gives the bits of having run it alone.
void run_window(const HeadRows& replay, const HeadRows& window, const HeadGate& gate, int dim, float* state,
                float* scratch);

/// The state after the first `rows` rows of a chunk, to be written to `state`.
struct StateExport {
  int rows;
  float* state;
};

int64_t chunk_scratch(int dim);
/// Runs at most kChunk rows in the form of runtime §3.4, writes their outputs and the wanted states, and advances the
/// state. The rows share one decay reference per 16 rows (fewer when `lower` is below −5), so no exponent exceeds 75.
void run_chunk(const HeadRows& rows, const HeadGate& gate, int dim, float* state, std::span<const StateExport> exports,
               float* scratch);

}  // namespace glm53::cpu
