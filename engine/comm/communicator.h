// Collectives between ranks. Gloo on CPUs, NCCL on GPUs, nothing at all for one rank.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "kernels/tensor.h"
#include "kernels/weight.h"

namespace glm53 {

class ControlLink;
class Ops;

/// Collectives of one group; every rank calls them in the same order. Throw Error(peer_lost) when a peer is gone or
/// abort() was called. On a GPU they are work of the backend's stream: what goes wrong after the call shows in check().
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual Shard shard() const = 0;
  /// Sum in rank order: the same bits on every rank, for any element count. f32 (CPU), bf16 (CUDA). Stream-ordered.
  virtual void all_reduce(Tensor io) = 0;
  /// Concatenates each rank's [rows][n] into [rows][size·n] on rank 0; out may be empty elsewhere.
  virtual void gather(Tensor in, Tensor out_on_0) = 0;
  virtual void all_gather(Tensor in, Tensor out) = 0;
  virtual void broadcast(Tensor io, int root) = 0;
  /// Throws Error(peer_lost) when a collective may have given garbage since the group was whole. Asked after
  /// Ops::synchronize(), before results are used.
  virtual void check() {}
  /// Whether calls can be recorded in a graph (Ops::capture).
  virtual bool capturable() const { return true; }
  /// From any thread; makes blocked calls throw Error(peer_lost).
  virtual void abort() noexcept = 0;
};

/// One rank: every call is a copy or nothing.
std::unique_ptr<Communicator> make_single_communicator();
/// Gloo over TCP on `bind_address`. The rendezvous store runs over the control links: rank 0 holds one link to every
/// other rank, in rank order; the others hold one to rank 0. Every call waits at most `timeout`.
/// The process must ignore SIGPIPE: Gloo writes to lost peers without MSG_NOSIGNAL.
std::unique_ptr<Communicator> make_gloo_communicator(Shard shard, const std::string& bind_address,
                                                     std::span<ControlLink* const> links,
                                                     std::chrono::milliseconds timeout);
/// NCCL on the stream of `ops`, a GPU's. `bootstrap` carries the group's id and is not needed afterwards. Two ranks
/// give the same bits whatever NCCL chooses (a + b); with more, NCCL's order, the same on every rank. Throws
/// Error(unavailable) where NCCL is missing, Error(fabric) when the ranks do not meet within `timeout`.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& bootstrap, Ops& ops,
                                                     std::chrono::milliseconds timeout);
/// Device memory by way of host memory and `inner`, for ranks that share a GPU.
std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> inner, Ops& ops);

}  // namespace glm53
