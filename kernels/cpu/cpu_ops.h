// The CPU backend: the reference for every operator, and what runs where there is no GPU. Bodies are spread over this
// folder by subject.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/thread_pool.h"
#include "kernels/ops.h"

namespace glm53::cpu {

/// Memory that grows to the largest request and is then kept; one live block, contents undefined after get().
class Scratch {
 public:
  /// At least n values, 256-byte aligned. Throws Error(memory).
  template <class T>
  T* get(size_t n) {
    return reinterpret_cast<T*>(raw(n * sizeof(T)));
  }

 private:
  std::byte* raw(size_t bytes);
  Buffer memory_;
};

/// Shared scratch blocks; each belongs to one purpose at a time, named so that two live ones never collide.
enum class Area : uint8_t { mix, logits, rotated, gate, up, act, pairs, gathered, sort, kda, mla, indexer, count };

/// Pairs [begin, end) of a mixture step that go to one expert.
struct ExpertRun {
  int32_t expert;
  int64_t begin, end;
};
/// The (row, expert) pairs of a mixture step, sorted by expert and then row.
struct ExpertPairs {
  std::vector<ExpertRun> runs;
  std::vector<int32_t> row;
  std::vector<float> weight;
  std::vector<const float*> input;  ///< of each pair, for the projection that comes next
  int64_t longest = 0;              ///< pairs of the longest run
};

class CpuOps final : public Ops {
 public:
  explicit CpuOps(int threads);

  std::string_view backend() const override { return "cpu"; }
  Dtype activation() const override { return Dtype::f32; }

  Buffer allocate(size_t bytes, Place place) override;
  void reserve(const OpLimits& limits) override;
  void synchronize() override {}
  uint64_t record() override { return 0; }
  bool done(uint64_t) override { return true; }
  std::unique_ptr<Graph> capture(const std::function<void()>& body) override;
  void copy(Tensor dst, Tensor src) override;
  void zero(Tensor dst) override;

  void embed(const EmbedArgs&) override;
  void rms_norm(const RmsNormArgs&) override;
  void linear(const LinearArgs&) override;
  void mhc_pre(const MhcPreArgs&) override;
  void mhc_post(const MhcPostArgs&) override;
  void mhc_post_pre(const MhcPostPreArgs&) override;
  void stream_mean(const StreamMeanArgs&) override;
  void kda_conv(const KdaConvArgs&) override;
  void kda_window(const KdaArgs&) override;
  void kda_chunk(const KdaArgs&) override;
  void kda_flush(const FlushArgs&) override;
  void gated_norm(const GatedNormArgs&) override;
  void latent_write(const LatentWriteArgs&) override;
  void index_write(const IndexWriteArgs&) override;
  void index_select(const IndexSelectArgs&) override;
  void mla_absorb(const MlaAbsorbArgs&) override;
  void mla_sparse(const MlaSparseArgs&) override;
  void mla_expand(const MlaExpandArgs&) override;
  void swiglu(const SwigluArgs&) override;
  void router(const RouterArgs&) override;
  void moe(const MoeArgs&) override;
  void add(const AddArgs&) override;
  void sample(const SampleArgs&) override;
  void rope(const RopeArgs&) override;
  void block_conv(const BlockConvArgs&) override;
  void draft_write(const DraftWriteArgs&) override;
  void draft_attention(const DraftAttentionArgs&) override;
  void top_logits(const TopLogitsArgs&) override;
  void selector_walk(const SelectorWalkArgs&) override;

  void snapshot_save(const Caches&, SlotId from, SnapId to) override;
  void snapshot_restore(const Caches&, SnapId from, SlotId to) override;
  void slot_reset(const Caches&, SlotId slot) override;
  void block_copy(const Caches&, BlockId from, BlockId to) override;

 private:
  /// y[r][o] (row stride y_stride) = W[o] · x[r] + beta · y[r][o] for a f32 or bf16 weight; the one dense matrix
  /// product of the backend.
  void dense(const Weight& w, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride, float beta);

  void linear_exl3(const LinearArgs& args);
  void linear_quantised(const LinearArgs& args);

  void collect_pairs(const MoeArgs& args);
  /// Copies each pair's input to `prepared` [pairs][in], rotated where its expert is EXL3; pairs_.input then points
  /// there.
  void prepare_inputs(std::span<const Weight> experts, int64_t in, float* prepared);
  /// out[pair] = W of its expert times its prepared input.
  void project(std::span<const Weight> experts, int64_t in, int64_t width, float* out);
  void combine(const MoeArgs& args, const float* down);

  ThreadPool& pool() { return pool_; }
  Scratch& scratch(Area area) { return shared_[static_cast<size_t>(area)]; }
  /// Scratch of one worker of a parallel_for_worker.
  Scratch& worker_scratch(int worker) { return of_worker_[static_cast<size_t>(worker)]; }

  ThreadPool pool_;
  std::array<Scratch, static_cast<size_t>(Area::count)> shared_;
  std::vector<Scratch> of_worker_;
  ExpertPairs pairs_;
};

}  // namespace glm53::cpu
