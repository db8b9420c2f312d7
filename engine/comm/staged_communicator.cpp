// Collectives of device memory by way of host memory and another communicator. Slow: every call waits for the device.
// For ranks that share one GPU, which NCCL refuses; bits are those of sums in rank order in fp32, rounded once.
#include <utility>

#include "common/error.h"
#include "engine/comm/checks.h"
#include "engine/comm/communicator.h"
#include "kernels/ops.h"

namespace glm53 {
namespace {

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> inner, Ops& ops) : inner_(std::move(inner)), ops_(ops) {}

  Shard shard() const override { return inner_->shard(); }
  void all_reduce(Tensor io) override {
    if (!io.contiguous()) throw Error(Code::internal, "all_reduce: expected a contiguous tensor");
    const Tensor flat = io.reshaped({io.elements()});
    const Tensor here = stage(in_, Dtype::f32, 1, io.elements()).reshaped({io.elements()});
    ops_.copy(here, flat);
    ops_.synchronize();
    inner_->all_reduce(here);
    ops_.copy(flat, here);
  }
  void gather(Tensor in, Tensor out) override { spread(in, out, false); }
  void all_gather(Tensor in, Tensor out) override { spread(in, out, true); }
  void broadcast(Tensor io, int root) override {
    if (!io.contiguous()) throw Error(Code::internal, "broadcast: expected a contiguous tensor");
    const Tensor flat = io.reshaped({io.elements()});
    const Tensor here = stage(in_, io.dtype, 1, io.elements()).reshaped({io.elements()});
    ops_.copy(here, flat);
    ops_.synchronize();
    inner_->broadcast(here, root);
    ops_.copy(flat, here);
  }
  bool capturable() const override { return false; }
  void check() override { inner_->check(); }
  void abort() noexcept override { inner_->abort(); }

 private:
  /// Host memory, after whatever the device may still do with it. Grows with the first calls.
  Tensor stage(Buffer& buffer, Dtype dtype, int64_t rows, int64_t columns) {
    const auto bytes = static_cast<size_t>(rows * columns) * size_of(dtype);
    ops_.synchronize();
    if (buffer.bytes() < bytes) buffer = ops_.allocate(bytes, Place::pinned);
    return buffer.view(dtype, {rows, columns});
  }
  void spread(const Tensor& in, const Tensor& out, bool everywhere) {
    const bool one = in.rank == 1;
    const int64_t rows = one ? 1 : in.dim(0), columns = one ? in.dim(0) : in.dim(1);
    const auto matrix = [&](const Tensor& t, int64_t n) { return t.rank == 1 ? t.reshaped({1, n}) : t; };
    const Tensor here = stage(in_, in.dtype, rows, columns);
    ops_.copy(here, matrix(in, columns));
    ops_.synchronize();
    const bool wanted = everywhere || shard().rank == 0;
    const int64_t all = columns * shard().size;
    const Tensor whole = wanted ? stage(out_, in.dtype, rows, all) : Tensor{};
    everywhere ? inner_->all_gather(here, whole) : inner_->gather(here, whole);
    if (wanted) ops_.copy(matrix(out, all), whole);
  }

  const std::unique_ptr<Communicator> inner_;
  Ops& ops_;
  Buffer in_, out_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> inner, Ops& ops) {
  return std::make_unique<StagedCommunicator>(std::move(inner), ops);
}

}  // namespace glm53
