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

/// Shared scratch; each belongs to one purpose at a time.
enum class Area : uint8_t { mix, logits, rotated, gate, up, pairs, scores, batch, count };

class CudaOps final : public Ops {
 public:
  /// Throws Error(unavailable) when there is no such device or it is too old, Error(config) for an activation that is
  /// neither f32 nor bf16.
  CudaOps(int device, Dtype activation);
  ~CudaOps() override;

  std::string_view backend() const override { return "cuda"; }
  Dtype activation() const override { return activation_; }

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
  /// The stream, after making its device the calling thread's.
  cudaStream_t stream();
  template <class T>
  T* scratch(Area area, size_t n) {
    return reinterpret_cast<T*>(scratch_[static_cast<size_t>(area)].get(n * sizeof(T), device_, capturing_));
  }
  /// Row views of a batch; arrays in plain host memory are first copied to the device, in stream order.
  Rows rows(std::string_view op, const Batch& batch, int64_t capacity);
  Batch staged(const Batch& batch);
  /// y = W x (+ beta y) for a plain weight.
  void dense(Plain w, int64_t out, int64_t in, Matrix x, Matrix y, float beta);
  void linear_exl3(const Linear& w, int64_t out, int64_t in, Matrix x, Matrix y, float beta);
  void kda_rows(const KdaArgs& args, bool window, std::string_view op);
  /// Views of a layer's experts on the device; uploaded when first seen or changed.
  const Linear* experts(std::span<const Weight> all, std::string_view argument, int64_t out, int64_t in);
  void copy_item(std::string_view op, const Tensor& to, int64_t to_id, const Tensor& from, int64_t from_id);
  void copy_history(std::string_view op, const Caches& c, const Tensor& to, int64_t to_id, const Tensor& from,
                    int64_t from_id);

  struct ExpertTable {
    std::vector<Linear> host;
    Buffer device;
  };
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
  std::unique_ptr<Ops> host_;  ///< samples on the host
  Buffer host_logits_;
};

}  // namespace glm53::cuda
