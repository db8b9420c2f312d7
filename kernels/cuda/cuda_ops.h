// The CUDA backend: one device, one stream. Bodies are spread over this folder by family.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <vector>

#include "kernels/cuda/runtime.h"
#include "kernels/cuda/views.h"
#include "kernels/ops.h"

namespace glm53::cuda {

struct Select;

/// Shared scratch; each belongs to one purpose at a time.
enum class Area : uint8_t { mix, logits, rotated, gate, up, pairs, order, scores, attention, batch, sampling, count };

class CudaOps final : public Ops {
 public:
  /// Throws Error(unavailable) when there is no such device or it is too old, Error(config) for an activation that is
  /// neither f32 nor bf16.
  CudaOps(int device, Dtype activation);
  ~CudaOps() override;

  std::string_view backend() const override { return "cuda"; }
  Dtype activation() const override { return activation_; }
  void* native_stream() override { return stream(); }

  Buffer allocate(size_t bytes, Place place) override;
  void reserve(const OpLimits& limits) override;
  void synchronize() override;
  uint64_t record() override;
  bool done(uint64_t ticket) override;
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

  void snapshot_save(const Caches&, SlotId from, SnapId to) override;
  void snapshot_restore(const Caches&, SnapId from, SlotId to) override;
  void slot_reset(const Caches&, SlotId slot) override;
  void block_copy(const Caches&, BlockId from, BlockId to) override;

 private:
  struct ExpertTable {
    std::vector<Linear> host;
    Buffer device;
    bool packed = false;              ///< all exl3 of 4 bits with the MCG codebook
    const void* inputs_as = nullptr;  ///< the first weight of a table found to have the same input scales, or not:
    bool same_inputs = false;
  };

  /// The stream, after making its device the calling thread's.
  cudaStream_t stream();
  template <class T>
  T* scratch(Area area, size_t n) {
    return reinterpret_cast<T*>(scratch_[static_cast<size_t>(area)].get(n * sizeof(T), device_, capturing_));
  }
  /// Row views of a batch; arrays in plain host memory are first copied to the device, in stream order.
  Rows rows(std::string_view op, const Batch& batch, int64_t capacity);
  Batch staged(const Batch& batch);
  void sample_on_host(const SampleArgs& args, int64_t row);
  /// y = W x (+ beta y) for a plain weight; rows of the window or of the chunk family.
  void dense(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta, bool window);
  /// The same through tensor cores, for few and for many rows of bf16 that is aligned; false where it is not and
  /// nothing was done.
  bool dense_skinny(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta);
  bool dense_gemm(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta);
  /// moe() for the experts of the packs in use (exl3, 4 bits, MCG) and bf16 activations; false where they are others
  /// and nothing was done.
  bool moe_packed(const MoeArgs& args);
  /// The two ways to do it, for few rows and for many.
  struct PackedExperts {
    const Linear *gate, *up, *down;
    bool same_inputs;  ///< of gate and up
  };
  bool moe_window(const MoeArgs& args, const PackedExperts& experts);
  bool moe_grouped(const MoeArgs& args, const PackedExperts& experts);
  void linear_exl3(const Linear& w, int64_t out, int64_t in, Matrix x, Matrix y, float beta);
  /// mla_sparse through tensor cores, for bf16; false where a size does not fit and nothing was done.
  bool mla_flash(const MlaSparseArgs& args, const Rows& b, const LatentView& c, const Matrix& q, const Matrix& out);
  /// out[r][h] = x[r][h] · W[h] for every head, for bf16; false where a size does not fit and nothing was done.
  struct HeadsProduct {
    Plain w;
    int64_t first, w_step;  ///< values before the first head's matrix and between heads
    int64_t heads, in, out;
    bool columns;  ///< the matrix lies as [in][out], not [out][in]
  };
  /// Scores of index_select for some rows through tensor cores; false where a size does not fit.
  bool score_flash(const Rows& b, const LatentView& c, const Select& a, unsigned rows);
  bool heads_gemm(const HeadsProduct& p, Matrix x, Matrix y);
  /// mhc_post (where there is a site before) and mhc_pre for four streams; false for other numbers.
  bool mhc_seam(const MhcPostArgs* before, const MhcPreArgs& args);
  void kda_rows(const KdaArgs& args, bool window, std::string_view op);
  /// Views of a layer's experts on the device; uploaded when first seen or changed.
  const Linear* experts(std::span<const Weight> all, std::string_view argument, int64_t out, int64_t in);
  /// Whether every expert has the same input scales in both tables, as the packs in use do for gate and up: then one
  /// rotation serves both (spec exl3 §1.3). Compared once.
  bool same_inputs(const ExpertTable& gate, std::span<const Weight> up, int64_t in);
  const ExpertTable& expert_table(std::span<const Weight> all, std::string_view argument, int64_t out, int64_t in);
  void copy_item(std::string_view op, const Tensor& to, int64_t to_id, const Tensor& from, int64_t from_id);
  void copy_history(std::string_view op, const Caches& c, const Tensor& to, int64_t to_id, const Tensor& from,
                    int64_t from_id);

  struct Ticket {
    uint64_t number;
    Event event;
  };

  int device_;
  Dtype activation_;
  bool capturing_ = false;
  std::unique_ptr<Stream> stream_;
  std::array<Scratch, static_cast<size_t>(Area::count)> scratch_;
  std::map<const void*, ExpertTable> experts_;
  std::vector<Ticket> tickets_;
  uint64_t last_ticket_ = 0;
  std::unique_ptr<Ops> host_;           ///< samples the rows that the device leaves to it
  Buffer host_logits_, sample_buffer_;  ///< pinned
};

}  // namespace glm53::cuda
