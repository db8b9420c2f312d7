// Collectives over NCCL on device memory, in the order of the backend's stream.
//
// The communicator does not block: starting up and calls that must first connect are waited for here, with a limit, and
// a thread looks ten times a second whether NCCL has met an error. A collective whose peer has gone never ends by
// itself; what ends it is abort(), called when the control link to the peer breaks (a dead process is seen at once) or
// when NCCL reports an error. Its result is then garbage, which is why check() is asked before results are used.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/comm/checks.h"
#include "engine/comm/communicator.h"
#include "engine/comm/nccl_library.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kLook{100};

ncclDataType_t type_of(Dtype type) {
  if (type == Dtype::f32) return ncclFloat32;
  if (type == Dtype::bf16) return ncclBfloat16;
  throw Error(Code::internal, cat("all_reduce: a tensor of ", name(type), ", expected f32 or bf16"));
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Communicator& bootstrap, Ops& ops, milliseconds timeout);
  ~NcclCommunicator() override;

  Shard shard() const override { return shard_; }
  void all_reduce(Tensor io) override;
  void gather(Tensor in, Tensor out) override;
  void all_gather(Tensor in, Tensor out) override;
  void broadcast(Tensor io, int root) override;
  void check() override;
  void abort() noexcept override { give_up("the group was aborted"); }

 private:
  void connect(Communicator& bootstrap);
  template <class F>
  void call(std::string_view what, F&& enqueue);
  void settle(std::string_view what);
  void watch() noexcept;
  void give_up(const std::string& why) noexcept;
  [[noreturn]] void lost(std::string_view what);
  const void* packed(const Tensor& in, const RowShape& shape);
  void place(const Tensor& out, const RowShape& shape, int part, const void* from);
  std::byte* scratch(size_t bytes);
  cudaStream_t stream() { return static_cast<cudaStream_t>(ops_.native_stream()); }

  const Shard shard_;
  Ops& ops_;
  const milliseconds timeout_;
  const NcclLibrary nccl_;
  std::mutex mutex_;  // of everything below, and of every call with comm_
  std::condition_variable ended_;
  ncclComm_t comm_ = nullptr;
  bool closing_ = false;
  std::string why_;  // it was given up
  std::atomic<bool> gone_ = false;
  Buffer scratch_;
  std::thread watch_;
};

NcclCommunicator::NcclCommunicator(Communicator& bootstrap, Ops& ops, milliseconds timeout)
    : shard_(bootstrap.shard()), ops_(ops), timeout_(timeout) {
  connect(bootstrap);
  watch_ = std::thread([this] { watch(); });
  log::info(cat("NCCL ", nccl_.version_text(), ", rank ", shard_.rank, " of ", shard_.size));
}

NcclCommunicator::~NcclCommunicator() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  ended_.notify_all();
  if (watch_.joinable()) watch_.join();
  give_up("closed");
}

/// Rank 0's id reaches the others over the bootstrap communicator.
void NcclCommunicator::connect(Communicator& bootstrap) {
  if (stream() == nullptr) throw Error(Code::internal, "NCCL: the backend has no stream of a GPU");
  ncclUniqueId id{};
  if (shard_.rank == 0) nccl_.check(nccl_.get_unique_id(&id), "an id for the group");
  bootstrap.broadcast(Tensor::of(&id, Dtype::u8, {static_cast<int64_t>(sizeof id)}), 0);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    nccl_.check(nccl_.comm_init(&comm_, shard_.size, id, shard_.rank, &config), "start");
    settle("start");
  } catch (const Error& e) {
    give_up("it could not be started");
    throw Error(Code::fabric, e.what(),
                "every rank needs a GPU of its own, and the nodes must reach each other on *.fabric_address; "
                "NCCL_DEBUG=INFO in the ranks' environment tells more");
  }
}

/// Waits until NCCL has done what the last call asked for on the host's side: not the collective itself.
void NcclCommunicator::settle(std::string_view what) {
  const auto limit = Clock::now() + timeout_;
  for (;;) {
    ncclResult_t state = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      if (comm_ == nullptr) break;
      nccl_.check(nccl_.async_error(comm_, &state), what);
      nccl_.check(state, what);
    }
    if (state == ncclSuccess) return;
    if (Clock::now() > limit)
      throw Error(Code::fabric,
                  cat("NCCL: ", what, ": the other ranks did not answer within ", timeout_.count(), " ms"));
    std::this_thread::yield();
  }
  lost(what);
}

void NcclCommunicator::lost(std::string_view what) {
  const std::lock_guard lock(mutex_);
  throw Error(Code::peer_lost, cat("NCCL: ", what, ": ", why_.empty() ? "the group was aborted" : why_));
}

/// Enqueues on the stream; an error of NCCL means that the group is of no use any more.
template <class F>
void NcclCommunicator::call(std::string_view what, F&& enqueue) {
  const cudaStream_t on = stream();
  try {
    {
      const std::lock_guard lock(mutex_);
      if (comm_ != nullptr) enqueue(on);
    }
    if (gone_) lost(what);
    settle(what);
  } catch (const Error& e) {
    if (e.code() != Code::fabric) throw;
    give_up(e.what());
    throw Error(Code::peer_lost, e.what());
  }
}

void NcclCommunicator::all_reduce(Tensor io) {
  if (!io.contiguous()) throw Error(Code::internal, "all_reduce: expected a contiguous tensor");
  const ncclDataType_t type = type_of(io.dtype);
  call("all_reduce", [&](cudaStream_t on) {
    nccl_.check(nccl_.all_reduce(io.data, io.data, static_cast<size_t>(io.elements()), type, ncclSum, comm_, on),
                "all_reduce");
  });
}

void NcclCommunicator::broadcast(Tensor io, int root) {
  if (!io.contiguous() || root < 0 || root >= shard_.size)
    throw Error(Code::internal, cat("broadcast: root ", root, " of ", shard_.size, ", or a strided tensor"));
  call("broadcast", [&](cudaStream_t on) {
    nccl_.check(nccl_.broadcast(io.data, io.data, io.bytes(), ncclUint8, root, comm_, on), "broadcast");
  });
}

/// Device memory of the communicator's own. Grows with the first calls, which are those of the warm-up.
std::byte* NcclCommunicator::scratch(size_t bytes) {
  if (scratch_.bytes() < bytes) {
    ops_.synchronize();
    scratch_ = ops_.allocate(bytes, Place::device);
  }
  return static_cast<std::byte*>(scratch_.data());
}

/// The rows of a tensor without gaps; in scratch, at this rank's place, unless they lie so already.
const void* NcclCommunicator::packed(const Tensor& in, const RowShape& shape) {
  if (shape.pitch == shape.bytes || shape.rows <= 1) return in.data;
  const size_t all = static_cast<size_t>(shape.rows) * shape.bytes;
  std::byte* to = scratch(all * static_cast<size_t>(shard_.size)) + all * static_cast<size_t>(shard_.rank);
  cuda::check(cudaMemcpy2DAsync(to, shape.bytes, in.data, shape.pitch, shape.bytes, static_cast<size_t>(shape.rows),
                                cudaMemcpyDeviceToDevice, stream()),
              "pack rows");
  return to;
}

/// Packed rows of a rank to its columns of the whole.
void NcclCommunicator::place(const Tensor& out, const RowShape& shape, int part, const void* from) {
  const RowShape to = row_shape(out, "gather output");
  cuda::check(
      cudaMemcpy2DAsync(static_cast<std::byte*>(out.data) + static_cast<size_t>(part) * shape.bytes, to.pitch, from,
                        shape.bytes, shape.bytes, static_cast<size_t>(shape.rows), cudaMemcpyDeviceToDevice, stream()),
      "place rows");
}

void check_output(const Tensor& in, const Tensor& out, const RowShape& shape, int size) {
  const RowShape to = row_shape(out, "gather output");
  if (to.rows != shape.rows || to.bytes != shape.bytes * static_cast<size_t>(size) || out.dtype != in.dtype)
    throw Error(Code::internal, cat("gather: output has ", to.rows, " rows of ", to.bytes, " bytes, expected ",
                                    shape.rows, " of ", shape.bytes * static_cast<size_t>(size)));
}

void NcclCommunicator::gather(Tensor in, Tensor out) {
  const RowShape shape = row_shape(in, "gather input");
  const size_t all = static_cast<size_t>(shape.rows) * shape.bytes;
  if (shard_.rank == 0) check_output(in, out, shape, shard_.size);
  std::byte* parts = scratch(all * static_cast<size_t>(shard_.size));
  const void* mine = packed(in, shape);
  call("gather", [&](cudaStream_t on) {
    nccl_.check(nccl_.group_start(), "gather");
    if (shard_.rank != 0) nccl_.check(nccl_.send(mine, all, ncclUint8, 0, comm_, on), "gather");
    for (int r = 1; r < shard_.size && shard_.rank == 0; ++r)
      nccl_.check(nccl_.recv(parts + all * static_cast<size_t>(r), all, ncclUint8, r, comm_, on), "gather");
    nccl_.check(nccl_.group_end(), "gather");
  });
  if (shard_.rank != 0) return;
  for (int r = 0; r < shard_.size; ++r) place(out, shape, r, r == 0 ? mine : parts + all * static_cast<size_t>(r));
}

void NcclCommunicator::all_gather(Tensor in, Tensor out) {
  const RowShape shape = row_shape(in, "gather input");
  const size_t all = static_cast<size_t>(shape.rows) * shape.bytes;
  check_output(in, out, shape, shard_.size);
  std::byte* parts = scratch(all * static_cast<size_t>(shard_.size));
  const void* mine = packed(in, shape);
  call("all_gather",
       [&](cudaStream_t on) { nccl_.check(nccl_.all_gather(mine, parts, all, ncclUint8, comm_, on), "all_gather"); });
  for (int r = 0; r < shard_.size; ++r) place(out, shape, r, parts + all * static_cast<size_t>(r));
}

void NcclCommunicator::check() {
  if (gone_) lost("a collective");
}

void NcclCommunicator::watch() noexcept {
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, kLook, [this] { return closing_; })) {
    if (comm_ == nullptr) return;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl_.async_error(comm_, &state);
    if (asked == ncclSuccess && (state == ncclSuccess || state == ncclInProgress)) continue;
    lock.unlock();
    give_up(nccl_.error_string(asked == ncclSuccess ? state : asked));
    return;
  }
}

void NcclCommunicator::give_up(const std::string& why) noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  try {
    why_ = why;
  } catch (...) {  // without words then
  }
  gone_ = true;
  nccl_.comm_abort(comm_);
  comm_ = nullptr;
}

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& bootstrap, Ops& ops, milliseconds timeout) {
  return std::make_unique<NcclCommunicator>(bootstrap, ops, timeout);
}

}  // namespace glm53
