// Plans and results between ranks: our own length-prefixed frames on TCP, not collectives.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace glm53 {

/// A connected, ordered, reliable frame pipe. send and receive may be used by one thread each; close from any thread.
class ControlLink {
 public:
  virtual ~ControlLink() = default;
  /// Throws Error(peer_lost) when the peer is gone.
  virtual void send(std::span<const std::byte> frame) = 0;
  /// Blocks for the next frame; throws Error(peer_lost) on end of stream or close().
  virtual std::vector<std::byte> receive() = 0;
  virtual void close() noexcept = 0;
};

/// What both sides must agree on before anything else. Rank 0 refuses a hello that differs, naming the field; both
/// sides get Error(fabric) (exit 67) or, for config_hash and generation, Error(config) (exit 64).
struct Hello {
  uint32_t protocol = 1;
  uint64_t generation = 0;
  int32_t rank = 0, size = 1;
  std::string config_hash, model_digest, build;
};

/// Rank 0: listens on address:port and returns links of ranks 1 … size-1 in order. Throws Error(fabric) naming the
/// ranks that did not come within `timeout`. Wrong or garbage connections are closed and waited past.
std::vector<std::unique_ptr<ControlLink>> accept_ranks(const std::string& address, uint16_t port, const Hello& mine,
                                                       std::chrono::milliseconds timeout);
/// Other ranks: connects to rank 0, retrying until `timeout`.
std::unique_ptr<ControlLink> join_rank0(const std::string& address, uint16_t port, const Hello& mine,
                                        std::chrono::milliseconds timeout);

}  // namespace glm53
