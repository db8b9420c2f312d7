// Kimi delta attention in the chunk family: pieces of a prompt on the absolute grid (spec runtime §3.4).
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/kda_args.h"

namespace glm53::cpu {
namespace {

// One head of one sequence: chunks end at multiples of kChunk of the position, so a piece that starts between them
// begins with a short one.
void run_piece(const KdaCall& call, const SeqRows& seq, int64_t head, float* scratch) {
  const int dim = static_cast<int>(call.caches.dim);
  float* state = call.caches.state(seq.slot, head);
  const HeadGate gate = call.gate(head);
  std::array<StateExport, 2> exports{};
  const auto wanted = [&](int64_t first_position, int64_t last_position) {
    size_t n = 0;
    for (size_t e = 0; e < seq.export_pos.size(); ++e) {
      const int64_t p = seq.export_pos[e];
      if (p <= first_position || p > last_position) continue;
      exports[n++] = {static_cast<int>(p - first_position), call.caches.saved_state(seq.export_snap[e], head)};
    }
    return std::span<const StateExport>(exports).first(n);
  };
  for (size_t e = 0; e < seq.export_pos.size(); ++e) {  // nothing of this piece belongs to such a state
    if (seq.export_pos[e] != seq.position) continue;
    const auto bytes = static_cast<size_t>(dim) * static_cast<size_t>(dim) * sizeof(float);
    std::memcpy(call.caches.saved_state(seq.export_snap[e], head), state, bytes);
  }
  for (int64_t row = seq.begin; row < seq.end;) {
    const int64_t position = seq.position + (row - seq.begin);
    const int64_t count = std::min<int64_t>(kChunk - position % kChunk, seq.end - row);
    run_chunk(call.rows(head, row, row + count), gate, dim, state, wanted(position, position + count), scratch);
    row += count;
  }
}

}  // namespace

void CpuOps::kda_chunk(const KdaArgs& args) {
  const CacheGeometry& g = args.caches->geometry;
  float* dt_bias = scratch(Area::kda).get<float>(static_cast<size_t>(g.kda_heads) * static_cast<size_t>(g.head_dim));
  const KdaCall call(args, dt_bias, "kda_chunk");
  const auto floats = static_cast<size_t>(chunk_scratch(g.head_dim));
  const int64_t first = call.batch.window_seqs();
  const auto body = [&](int worker, int64_t begin, int64_t end) {
    float* memory = worker_scratch(worker).get<float>(floats);
    for (int64_t task = begin; task < end; ++task) {
      const SeqRows seq = call.batch.at(first + task / g.kda_heads);
      if (seq.slot >= 0) run_piece(call, seq, task % g.kda_heads, memory);
    }
  };
  pool().parallel_for_worker((call.batch.seqs() - first) * g.kda_heads, 1, body);
  for (int64_t row = call.batch.window_rows(); row < call.batch.rows(); ++row) {
    if (call.batch.padding(row)) zero_rows(args.out, row, row + 1);
  }
  zero_rows(args.out, call.batch.rows(), args.out.dim(0));
}

}  // namespace glm53::cpu
