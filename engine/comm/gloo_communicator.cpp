// Collectives over Gloo's TCP transport.
//
// Gloo gives connected pairs and buffers that a peer writes into; the algorithms are here, because sums must be in rank
// order with the same bits on every rank and because a forward pass waits for some 90 small messages. Measured on
// loopback with two ranks on two cores (bench/bench_comm), bound buffers beat gloo's own all-reduce and its unbound
// buffers: a bound send is one packet, an unbound one needs a "ready" from the receiver first.
//
// Every pair of ranks exchanges *pieces* of at most kPiece bytes, always the same number in both directions (an empty
// one is a single byte). A rank sends piece s only when it has consumed the peer's piece s-2; so the peer has consumed
// this rank's piece s-4, and a ring of four places never overwrites what is not yet read. This is the whole flow
// control.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>

#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/transport/buffer.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include "common/error.h"
#include "common/strings.h"
#include "engine/comm/checks.h"
#include "engine/comm/communicator.h"
#include "engine/comm/gloo_store.h"

namespace glm53 {
namespace {

using Bytes = std::span<const std::byte>;

constexpr size_t kPiece = 64 * 1024;
constexpr size_t kRing = 4;
/// From this size on three and more ranks divide the sum among themselves instead of each adding everything.
constexpr size_t kDivideFrom = 32 * 1024;
constexpr int64_t kBlock = 1024;  ///< elements summed at a time; on the stack

/// One peer: a ring of pieces in each direction.
class Peer {
 public:
  explicit Peer(gloo::transport::Pair& pair)
      : out_(kRing * kPiece),
        in_(kRing * kPiece),
        send_(pair.createSendBuffer(0, out_.data(), out_.size())),
        receive_(pair.createRecvBuffer(0, in_.data(), in_.size())) {}

  void send(Bytes piece) {
    if (sent_ >= kRing) send_->waitSend();  // of the piece that was in this place
    const size_t at = sent_++ % kRing * kPiece;
    std::copy(piece.begin(), piece.end(), out_.begin() + static_cast<ptrdiff_t>(at));
    send_->send(at, std::max<size_t>(piece.size(), 1), at);
  }
  Bytes receive(size_t n) {
    receive_->waitRecv();
    return Bytes(in_).subspan(received_++ % kRing * kPiece, n);
  }

 private:
  std::vector<std::byte> out_, in_;
  size_t sent_ = 0, received_ = 0;
  std::unique_ptr<gloo::transport::Buffer> send_, receive_;  // last: they refer to the memory above
};

size_t pieces_of(size_t bytes) {
  return (bytes + kPiece - 1) / kPiece;
}

Bytes piece_of(Bytes all, size_t k) {
  const size_t begin = std::min(k * kPiece, all.size());
  return all.subspan(begin, std::min(kPiece, all.size() - begin));
}

Bytes bytes_of(const Tensor& t) {
  return {static_cast<const std::byte*>(t.data), t.bytes()};
}
const float* floats(Bytes b) {
  return reinterpret_cast<const float*>(b.data());
}

/// to[i] = Σ_r from[r][i] in rank order. `to` may be one of the inputs.
void sum_in_order(std::span<const float* const> from, float* to, int64_t n) {
  std::array<float, kBlock> sum;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = std::min(kBlock, n - begin);
    std::copy_n(from[0] + begin, count, sum.begin());
    for (size_t r = 1; r < from.size(); ++r) {
      const float* add = from[r] + begin;
      for (int64_t i = 0; i < count; ++i) sum[static_cast<size_t>(i)] += add[i];
    }
    std::copy_n(sum.begin(), count, to + begin);
  }
}

/// Gloo's text without the source line in front of it.
std::string text_of(const gloo::Exception& e) {
  const std::string text = e.what();
  const size_t end = text.starts_with('[') ? text.find("] ") : std::string::npos;
  return end == std::string::npos ? text : text.substr(end + 2);
}

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(Shard shard, const std::string& bind_address, std::span<ControlLink* const> links,
                   std::chrono::milliseconds timeout);
  ~GlooCommunicator() override { abort(); }

  Shard shard() const override { return shard_; }
  void all_reduce(Tensor io) override;
  void gather(Tensor in, Tensor out) override;
  void all_gather(Tensor in, Tensor out) override;
  void broadcast(Tensor io, int root) override;
  void abort() noexcept override;

 private:
  /// What goes to peer p as piece k; what to do when piece k of every peer is here (from[p], by rank; own place empty).
  using Fill = std::function<Bytes(size_t peer, size_t k)>;
  using Take = std::function<void(size_t k, std::span<const Bytes> from)>;
  /// Bytes of piece k that come from peer p.
  using Expect = std::function<size_t(size_t peer, size_t k)>;

  void connect(const std::string& bind_address, std::span<ControlLink* const> links, std::chrono::milliseconds timeout);
  void exchange(size_t pieces, const Fill& fill, const Expect& expect, const Take& take);
  void send_piece(size_t k, const Fill& fill);
  void reduce_whole(Tensor io);
  void reduce_divided(Tensor io);
  void spread(Tensor in, Tensor out, bool everywhere);
  size_t size() const { return static_cast<size_t>(shard_.size); }
  size_t rank() const { return static_cast<size_t>(shard_.rank); }
  template <class F>
  void guarded(std::string_view what, F&& body);

  const Shard shard_;
  std::shared_ptr<gloo::rendezvous::Context> context_;
  std::vector<std::unique_ptr<Peer>>
      peers_;  // by rank; own place null. After context_: its buffers belong to the context's pairs
  std::atomic<bool> aborted_ = false;
};

template <class F>
void GlooCommunicator::guarded(std::string_view what, F&& body) {
  if (aborted_) throw Error(Code::peer_lost, cat(what, ": the group was aborted"));
  try {
    body();
  } catch (const gloo::Exception& e) {
    throw Error(Code::peer_lost, aborted_ ? cat(what, ": the group was aborted")
                                          : cat(what, ": another rank went away or did not answer: ", text_of(e)));
  }
}

/// Gloo's versions differ in how they take the store.
template <class C, class D>
void connect_mesh(C& context, const std::shared_ptr<gloo::rendezvous::Store>& store, D& device) {
  if constexpr (requires { context.connectFullMesh(*store, device); })
    context.connectFullMesh(*store, device);
  else
    context.connectFullMesh(store, device);
}

GlooCommunicator::GlooCommunicator(Shard shard, const std::string& bind_address, std::span<ControlLink* const> links,
                                   std::chrono::milliseconds timeout)
    : shard_(shard) {
  const size_t expected = shard.rank == 0 ? size() - 1 : 1;
  if (links.size() != expected)
    throw Error(Code::internal,
                cat("gloo: rank ", shard.rank, " got ", links.size(), " control links, expected ", expected));
  try {
    connect(bind_address, links, timeout);
  } catch (const std::exception& e) {
    if (const auto* known = dynamic_cast<const Error*>(&e); known != nullptr && known->code() == Code::peer_lost) throw;
    throw Error(Code::fabric,
                cat("gloo: rank ", shard.rank, " at ", bind_address,
                    " cannot connect to the other ranks: ", std::string(e.what())),
                "check that *.fabric_address belongs to this machine and that the nodes reach each other");
  }
}

void GlooCommunicator::connect(const std::string& bind_address, std::span<ControlLink* const> links,
                               std::chrono::milliseconds timeout) {
  gloo::transport::tcp::attr attr;
  attr.hostname = bind_address;
  auto device = gloo::transport::tcp::CreateDevice(attr);
  context_ = std::make_shared<gloo::rendezvous::Context>(shard_.rank, shard_.size);
  context_->setTimeout(timeout);
  if (shard_.rank == 0) {
    const auto store = std::make_shared<ServingStore>(links, timeout);
    connect_mesh(*context_, store, device);
    store->finish();
  } else {
    const auto store = std::make_shared<AskingStore>(*links[0], timeout);
    connect_mesh(*context_, store, device);
    store->finish();
  }
  for (size_t p = 0; p < size(); ++p)
    peers_.push_back(p == rank() ? nullptr : std::make_unique<Peer>(*context_->getPair(static_cast<int>(p))));
}

void GlooCommunicator::send_piece(size_t k, const Fill& fill) {
  for (size_t p = 0; p < size(); ++p)
    if (peers_[p]) peers_[p]->send(fill(p, k));
}

void GlooCommunicator::exchange(size_t pieces, const Fill& fill, const Expect& expect, const Take& take) {
  std::vector<Bytes> from(size());
  if (pieces > 0) send_piece(0, fill);
  for (size_t k = 0; k < pieces; ++k) {
    if (k + 1 < pieces) send_piece(k + 1, fill);
    for (size_t p = 0; p < size(); ++p)
      if (peers_[p]) from[p] = peers_[p]->receive(expect(p, k));
    take(k, from);
  }
}

void GlooCommunicator::all_reduce(Tensor io) {
  if (io.dtype != Dtype::f32 || !io.contiguous())
    throw Error(Code::internal, "all_reduce: expected a contiguous f32 tensor");
  guarded("all_reduce", [&] { size() > 2 && io.bytes() >= kDivideFrom ? reduce_divided(io) : reduce_whole(io); });
}

/// Everybody sends everything to everybody and adds for itself.
void GlooCommunicator::reduce_whole(Tensor io) {
  const Bytes all = bytes_of(io);
  std::vector<const float*> inputs(size());
  exchange(
      pieces_of(all.size()), [&](size_t, size_t k) { return piece_of(all, k); },
      [&](size_t, size_t k) { return piece_of(all, k).size(); },
      [&](size_t k, std::span<const Bytes> from) {
        const size_t begin = k * kPiece / sizeof(float);
        for (size_t r = 0; r < size(); ++r) inputs[r] = r == rank() ? io.as<float>() + begin : floats(from[r]);
        sum_in_order(inputs, io.as<float>() + begin, static_cast<int64_t>(piece_of(all, k).size() / sizeof(float)));
      });
}

/// Each rank adds one slice of everybody's and gives the sum to all.
void GlooCommunicator::reduce_divided(Tensor io) {
  const Bytes all = bytes_of(io);
  const size_t elements = all.size() / sizeof(float);
  const size_t step = (elements + size() - 1) / size();
  const auto slice = [&](size_t r) {
    const size_t begin = std::min(r * step, elements), end = std::min(begin + step, elements);
    return all.subspan(begin * sizeof(float), (end - begin) * sizeof(float));
  };
  const size_t pieces = pieces_of(step * sizeof(float));
  float* mine = io.as<float>() + std::min(rank() * step, elements);
  std::vector<const float*> inputs(size());
  exchange(
      pieces, [&](size_t p, size_t k) { return piece_of(slice(p), k); },
      [&](size_t, size_t k) { return piece_of(slice(rank()), k).size(); },
      [&](size_t k, std::span<const Bytes> from) {
        const size_t n = piece_of(slice(rank()), k).size() / sizeof(float);
        if (n == 0) return;
        float* to = mine + k * kPiece / sizeof(float);
        for (size_t r = 0; r < size(); ++r) inputs[r] = r == rank() ? to : floats(from[r]);
        sum_in_order(inputs, to, static_cast<int64_t>(n));
      });
  exchange(
      pieces, [&](size_t, size_t k) { return piece_of(slice(rank()), k); },
      [&](size_t p, size_t k) { return piece_of(slice(p), k).size(); },
      [&](size_t k, std::span<const Bytes> from) {
        for (size_t p = 0; p < size(); ++p) {
          if (!peers_[p] || from[p].empty()) continue;
          auto* to = static_cast<std::byte*>(io.data) + (slice(p).data() - all.data()) + k * kPiece;
          std::copy(from[p].begin(), from[p].end(), to);
        }
      });
}

/// Bytes [at, at + piece) of a packed [rows][n] matrix into its place in [rows][size·n].
void place_piece(const Tensor& out, size_t part, size_t row_bytes, size_t at, Bytes piece) {
  const size_t pitch = row_shape(out, "gather output").pitch;
  while (!piece.empty()) {
    const size_t row = at / row_bytes, column = at % row_bytes, n = std::min(piece.size(), row_bytes - column);
    std::copy_n(piece.begin(), n, static_cast<std::byte*>(out.data) + row * pitch + part * row_bytes + column);
    piece = piece.subspan(n);
    at += n;
  }
}

void GlooCommunicator::spread(Tensor in, Tensor out, bool everywhere) {
  const RowShape shape = row_shape(in, "gather input");
  const bool wanted = everywhere || shard_.rank == 0;
  if (wanted) {
    const RowShape to = row_shape(out, "gather output");
    if (to.rows != shape.rows || to.bytes != shape.bytes * size() || out.dtype != in.dtype)
      throw Error(Code::internal, cat("gather: output has ", to.rows, " rows of ", to.bytes, " bytes, expected ",
                                      shape.rows, " of ", shape.bytes * size()));
    copy_rows(in, out, shard_.rank);
  }
  std::vector<std::byte> packed;
  Bytes all{static_cast<const std::byte*>(in.data), static_cast<size_t>(shape.rows) * shape.bytes};
  if (shape.pitch != shape.bytes && shape.rows > 1) {
    packed.resize(all.size());
    copy_rows(in, Tensor::of(packed.data(), in.dtype, {shape.rows, in.dim(in.rank - 1)}), 0);
    all = packed;
  }
  const auto goes_to = [&](size_t p) { return everywhere || p == 0; };
  exchange(
      pieces_of(all.size()), [&](size_t p, size_t k) { return goes_to(p) ? piece_of(all, k) : Bytes(); },
      [&](size_t, size_t k) { return wanted ? piece_of(all, k).size() : 0; },
      [&](size_t k, std::span<const Bytes> from) {
        if (!wanted) return;
        for (size_t p = 0; p < size(); ++p)
          if (peers_[p]) place_piece(out, p, shape.bytes, k * kPiece, from[p]);
      });
}

void GlooCommunicator::gather(Tensor in, Tensor out) {
  guarded("gather", [&] { spread(in, out, false); });
}
void GlooCommunicator::all_gather(Tensor in, Tensor out) {
  guarded("all_gather", [&] { spread(in, out, true); });
}

void GlooCommunicator::broadcast(Tensor io, int root) {
  if (!io.contiguous() || root < 0 || root >= shard_.size)
    throw Error(Code::internal, cat("broadcast: root ", root, " of ", shard_.size, ", or a strided tensor"));
  guarded("broadcast", [&] {
    const Bytes all = bytes_of(io);
    const bool source = shard_.rank == root;
    exchange(
        pieces_of(all.size()), [&](size_t, size_t k) { return source ? piece_of(all, k) : Bytes(); },
        [&](size_t p, size_t k) { return static_cast<int>(p) == root ? piece_of(all, k).size() : 0; },
        [&](size_t k, std::span<const Bytes> from) {
          if (source) return;
          const Bytes piece = from[static_cast<size_t>(root)];
          std::copy(piece.begin(), piece.end(), static_cast<std::byte*>(io.data) + k * kPiece);
        });
  });
}

/// Closing a gloo pair wakes the peer but not who waits here. What wakes everybody is the timeout of an unbound buffer:
/// gloo then signals an error to every pair of the context.
void GlooCommunicator::abort() noexcept {
  if (aborted_.exchange(true)) return;
  try {
    std::byte nothing{};
    context_->createUnboundBuffer(&nothing, 1)->waitRecv(std::chrono::milliseconds(1));
  } catch (...) {  // the timeout itself, or that the pairs are broken already
  }
}

}  // namespace

std::unique_ptr<Communicator> make_gloo_communicator(Shard shard, const std::string& bind_address,
                                                     std::span<ControlLink* const> links,
                                                     std::chrono::milliseconds timeout) {
  if (shard.size < 1 || shard.rank < 0 || shard.rank >= shard.size)
    throw Error(Code::internal, cat("gloo: rank ", shard.rank, " of ", shard.size));
  if (shard.size == 1) return make_single_communicator();
  return std::make_unique<GlooCommunicator>(shard, bind_address, links, timeout);
}

}  // namespace glm53
