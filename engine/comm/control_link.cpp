// Control links over TCP.
//
// Handshake: the joining rank sends a magic number and its hello (u32 length, body); rank 0 answers with a verdict (u8
// error code, text) of the same form and, when it is ok, keeps the connection. Afterwards both sides exchange frames
// (u32 length, body). Whoever connects and does not speak this language is dropped without disturbing the others.
#include "engine/comm/control_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <mutex>
#include <optional>
#include <poll.h>
#include <thread>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "common/bytes.h"
#include "common/error.h"
#include "common/log.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t kMaxFrame = 64u << 20;
constexpr size_t kMaxHello = 4096;
constexpr uint64_t kMagic = 0x314c4333354d4c47;  // "GLM53CL1", little-endian
constexpr milliseconds kHelloTime{3000};         // a connection must have introduced itself by then
constexpr milliseconds kRetry{100};
constexpr size_t kMaxPending = 64;
constexpr int kPeerTimeoutMs = 5000;

/// A dead host (no FIN, no RST) is noticed within five seconds, idle or sending.
void detect_dead_peer(int fd) {
  const auto set = [fd](int level, int option, int value) {
    if (::setsockopt(fd, level, option, &value, sizeof value) != 0)
      throw_errno(Code::fabric, "control link: setsockopt");
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, kPeerTimeoutMs);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

class TcpLink final : public ControlLink {
 public:
  TcpLink(UniqueFd fd, std::string peer) : fd_(std::move(fd)), peer_(std::move(peer)) { detect_dead_peer(fd_.get()); }
  ~TcpLink() override { close(); }

  void send(std::span<const std::byte> frame) override {
    if (frame.size() > kMaxFrame)
      throw Error(Code::internal, cat("control frame of ", frame.size(), " bytes is over the limit of ", kMaxFrame));
    const std::lock_guard lock(send_mutex_);
    guarded([&] { send_block(fd_.get(), frame); });
  }

  std::vector<std::byte> receive() override {
    std::vector<std::byte> frame;
    guarded([&] { frame = receive_block(fd_.get(), kMaxFrame); });
    return frame;
  }

  void close() noexcept override { ::shutdown(fd_.get(), SHUT_RDWR); }

 private:
  template <class F>
  void guarded(F&& body) {
    try {
      body();
    } catch (const Error& e) {
      throw Error(e.code() == Code::corrupt ? Code::corrupt : Code::peer_lost, e.what())
          .within(cat("control link to ", peer_));
    }
  }

  UniqueFd fd_;
  const std::string peer_;
  std::mutex send_mutex_;
};

std::vector<std::byte> encode_hello(const Hello& h) {
  ByteWriter w;
  w.put(h.protocol);
  w.put(h.generation);
  w.put(h.rank);
  w.put(h.size);
  w.put(h.config_hash);
  w.put(h.model_digest);
  w.put(h.build);
  return w.take();
}

/// Of a hello in another protocol only the protocol is read.
Hello decode_hello(std::span<const std::byte> body, uint32_t protocol) {
  ByteReader r(body);
  Hello h;
  h.protocol = r.get<uint32_t>();
  if (h.protocol != protocol) return h;
  h.generation = r.get<uint64_t>();
  h.rank = r.get<int32_t>();
  h.size = r.get<int32_t>();
  h.config_hash = r.get_string();
  h.model_digest = r.get_string();
  h.build = r.get_string();
  r.finish();
  return h;
}

/// The first field in which two ranks differ, as an error; nothing when they agree.
std::optional<Error> disagreement(const Hello& mine, const Hello& theirs) {
  const auto differs = [&](Code code, std::string_view field, const auto& a, const auto& b, std::string_view remedy) {
    return Error(code, cat("rank ", theirs.rank, " and rank 0 differ in ", field, ": ", b, " and ", a),
                 std::string(remedy));
  };
  if (theirs.protocol != mine.protocol)
    return Error(Code::fabric, cat("a rank speaks protocol ", theirs.protocol, ", rank 0 protocol ", mine.protocol),
                 "run all ranks from the same build");
  if (theirs.size != mine.size)
    return differs(Code::fabric, "size", mine.size, theirs.size, "give every rank the same topology.ranks");
  if (theirs.rank < 1 || theirs.rank >= mine.size)
    return Error(Code::fabric, cat("rank ", theirs.rank, " joined a group of ", mine.size),
                 "ranks count from 1 to size - 1 here");
  if (theirs.generation != mine.generation)
    return differs(Code::config, "generation", mine.generation, theirs.generation,
                   "stop the ranks of the older generation");
  if (theirs.config_hash != mine.config_hash)
    return differs(Code::config, "config_hash", mine.config_hash, theirs.config_hash,
                   "start all ranks with the head's configuration");
  if (theirs.model_digest != mine.model_digest)
    return differs(Code::fabric, "model_digest", mine.model_digest, theirs.model_digest,
                   "bring the same checkpoint to every node");
  if (theirs.build != mine.build)
    return differs(Code::fabric, "build", mine.build, theirs.build, "run all ranks from the same build");
  return std::nullopt;
}

std::vector<std::byte> encode_verdict(const std::optional<Error>& error) {
  ByteWriter w;
  w.put(error ? static_cast<uint8_t>(error->code()) : uint8_t{0});
  w.put(error ? std::string(error->what()) : std::string());
  w.put(error ? error->remedy() : std::string());
  return w.take();
}

/// A connection that has not introduced itself yet. Reads without blocking.
struct Pending {
  UniqueFd fd;
  Deadline deadline;
  std::vector<std::byte> bytes;

  enum class State { more, complete, garbage };
  State read();
  std::span<const std::byte> body() const { return std::span(bytes).subspan(kHead); }

  static constexpr size_t kHead = sizeof kMagic + sizeof(uint32_t);

 private:
  size_t wanted() const;
};

size_t Pending::wanted() const {
  if (bytes.size() < kHead) return kHead;
  uint32_t n = 0;
  std::memcpy(&n, bytes.data() + sizeof kMagic, sizeof n);
  return kHead + n;
}

Pending::State Pending::read() {
  for (;;) {
    std::array<std::byte, kMaxHello> chunk;
    const size_t need = wanted() - bytes.size();
    if (need == 0 && bytes.size() > kHead) return State::complete;
    const ssize_t got = ::recv(fd.get(), chunk.data(), std::min(need, chunk.size()), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return State::more;
    if (got <= 0) return State::garbage;
    bytes.insert(bytes.end(), chunk.begin(), chunk.begin() + got);
    uint64_t magic = 0;
    std::memcpy(&magic, bytes.data(), std::min(bytes.size(), sizeof magic));
    if (bytes.size() >= sizeof magic && magic != kMagic) return State::garbage;
    if (bytes.size() >= kHead && (wanted() > kHead + kMaxHello || wanted() == kHead)) return State::garbage;
  }
}

bool peer_closed(int fd) {
  std::byte b;
  return ::recv(fd, &b, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

/// A port in use is a matter of the fabric here: the rank's exit code is its only other word.
UniqueFd listen_for_ranks(const std::string& address, uint16_t port) {
  try {
    return listen_tcp(address, port);
  } catch (const Error& e) {
    throw Error(Code::fabric, e.what(), e.remedy()).within("rendezvous");
  }
}

/// Rank 0's side of the meeting.
class Reception {
 public:
  Reception(const std::string& address, uint16_t port, const Hello& mine)
      : mine_(mine), listener_(listen_for_ranks(address, port)), joined_(static_cast<size_t>(mine.size)) {}

  std::vector<std::unique_ptr<ControlLink>> run(Deadline deadline) {
    while (missing() > 0) {
      if (Clock::now() >= deadline)
        throw Error(Code::fabric, cat("rendezvous: ", names_of_missing(), " did not join in time"),
                    "look at that rank's log and at the address in *.fabric_address");
      wait(deadline);
      accept_new();
      read_pending();
    }
    std::vector<std::unique_ptr<ControlLink>> links;
    for (size_t r = 1; r < joined_.size(); ++r)
      links.push_back(std::make_unique<TcpLink>(std::move(joined_[r]), cat("rank ", r)));
    return links;
  }

 private:
  int missing() const {
    return static_cast<int>(std::count_if(joined_.begin() + 1, joined_.end(), [](const UniqueFd& fd) { return !fd; }));
  }

  std::string names_of_missing() const {
    std::vector<std::string> names;
    for (size_t r = 1; r < joined_.size(); ++r)
      if (!joined_[r]) names.push_back(cat("rank ", r));
    return join(names, ", ");
  }

  void wait(Deadline deadline) {
    std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
    for (const Pending& p : pending_) {
      fds.push_back({p.fd.get(), POLLIN, 0});
      deadline = std::min(deadline, p.deadline);
    }
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count() + 1;
    if (::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<int64_t>(left, 0, 1000))) < 0 && errno != EINTR)
      throw_errno(Code::fabric, "rendezvous: poll");
  }

  void accept_new() {
    while (pending_.size() < kMaxPending) {
      UniqueFd fd = accept_until(listener_.get(), Clock::now());
      if (!fd) return;
      pending_.push_back({std::move(fd), Clock::now() + kHelloTime, {}});
    }
  }

  void read_pending() {
    for (size_t i = 0; i < pending_.size();) {
      const Pending::State state = pending_[i].read();
      if (state == Pending::State::more && Clock::now() < pending_[i].deadline) {
        ++i;
        continue;
      }
      Pending p = std::move(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(i));
      if (state == Pending::State::complete)
        judge(std::move(p));
      else
        log::warn("rendezvous: closed a connection that is not a rank");
    }
  }

  void judge(Pending p) {
    Hello theirs;
    try {
      theirs = decode_hello(p.body(), mine_.protocol);
    } catch (const Error& e) {
      log::warn(cat("rendezvous: closed a connection with a bad hello: ", e.what()));
      return;
    }
    const std::optional<Error> error = disagreement(mine_, theirs);
    const bool taken = !error && joined_[static_cast<size_t>(theirs.rank)] &&
                       !peer_closed(joined_[static_cast<size_t>(theirs.rank)].get());
    const std::optional<Error> answer =
        taken ? Error(Code::fabric, cat("rank ", theirs.rank, " has joined already"), "start each rank once") : error;
    try {
      send_block(p.fd.get(), encode_verdict(answer));
    } catch (const Error&) {
      if (!error) return;  // it went away: wait for it to come back
    }
    if (error) throw *error;
    if (taken)
      log::warn(cat("rendezvous: refused a second rank ", theirs.rank));
    else
      joined_[static_cast<size_t>(theirs.rank)] = std::move(p.fd);
  }

  const Hello mine_;
  UniqueFd listener_;
  std::vector<UniqueFd> joined_;  // by rank; 0 unused
  std::vector<Pending> pending_;
};

/// Exactly n bytes before the deadline; false when the other side closed or the time is up.
bool read_until(int fd, std::span<std::byte> out, Deadline deadline) {
  while (!out.empty()) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return false;
    pollfd p{fd, POLLIN, 0};
    const int ready = ::poll(&p, 1, static_cast<int>(std::min<int64_t>(left, 1000)));
    if (ready < 0 && errno != EINTR) return false;
    if (ready <= 0) continue;
    const ssize_t got = ::recv(fd, out.data(), out.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    out = out.subspan(static_cast<size_t>(got));
  }
  return true;
}

/// One attempt to join. Nothing when the other side does not answer like a rank 0; throws its verdict when that is a
/// refusal.
std::unique_ptr<ControlLink> try_join(const std::string& address, uint16_t port, const Hello& mine, Deadline deadline) {
  UniqueFd fd;
  std::vector<std::byte> body;
  try {
    fd = connect_tcp(address, port, deadline);
    send_all(fd.get(), std::as_bytes(std::span(&kMagic, 1)));
    send_block(fd.get(), encode_hello(mine));
    uint32_t n = 0;
    if (!read_until(fd.get(), std::as_writable_bytes(std::span(&n, 1)), deadline) || n > 4 * kMaxHello) return nullptr;
    body.resize(n);
    if (!read_until(fd.get(), body, deadline)) return nullptr;
  } catch (const Error&) {
    return nullptr;
  }
  ByteReader r(body);
  Code code{};
  std::string what, remedy;
  try {
    code = static_cast<Code>(r.get<uint8_t>());
    what = r.get_string();
    remedy = r.get_string();
    r.finish();
  } catch (const Error&) {
    return nullptr;
  }
  if (code == Code::config) throw Error(Code::config, what, remedy);
  if (code != Code::ok) throw Error(Code::fabric, what, remedy);
  return std::make_unique<TcpLink>(std::move(fd), "rank 0");
}

}  // namespace

std::vector<std::unique_ptr<ControlLink>> accept_ranks(const std::string& address, uint16_t port, const Hello& mine,
                                                       milliseconds timeout) {
  if (mine.size <= 1) return {};
  return Reception(address, port, mine).run(Clock::now() + timeout);
}

std::unique_ptr<ControlLink> join_rank0(const std::string& address, uint16_t port, const Hello& mine,
                                        milliseconds timeout) {
  const Deadline deadline = Clock::now() + timeout;
  while (Clock::now() < deadline) {
    if (auto link = try_join(address, port, mine, deadline)) return link;
    std::this_thread::sleep_for(kRetry);
  }
  throw Error(Code::fabric, cat("rendezvous: no rank 0 at ", address, ":", port, " within ", timeout.count(), " ms"),
              "look at rank 0's log and at head.fabric_address");
}

}  // namespace glm53
