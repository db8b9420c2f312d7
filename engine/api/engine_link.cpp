#include "engine/api/engine_link.h"

#include <array>
#include <condition_variable>
#include <deque>
#include <poll.h>
#include <unistd.h>

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>

#include "common/error.h"
#include "common/log.h"
#include "common/socket.h"
#include "common/strings.h"
#include "engine/api/errors.h"

namespace glm53::api {

namespace {

constexpr std::chrono::seconds kHelloLimit{5};

/// A peer that stops in the middle of a frame must not stop us.
void set_limits(int fd) {
  const timeval receive{10, 0}, send{30, 0};
  if (::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &receive, sizeof receive) != 0 ||
      ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &send, sizeof send) != 0) {
    throw_errno(Code::internal, "cannot set the time limits of the rank's socket");
  }
}

void report(const std::vector<Journal::Failure>& failures) {
  for (const Journal::Failure& f : failures) f.sink->on_failure(f.id, f.status, f.message, 0);
}

}  // namespace

/// A connected rank: frames are written by a thread of its own, so that nobody waits for the rank to read.
class EngineLink::Connection {
 public:
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)) {
    set_limits(fd_.get());
    writer_ = std::thread([this] { write(); });
  }
  ~Connection() { close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_.get(); }
  void push(wire::Message message) {
    {
      const std::scoped_lock lock(mutex_);
      queue_.push_back(std::move(message));
    }
    changed_.notify_one();
  }
  void close() noexcept {
    ::shutdown(fd_.get(), SHUT_RDWR);
    {
      const std::scoped_lock lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    if (writer_.joinable()) writer_.join();
  }

 private:
  void write() noexcept {
    try {
      while (true) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (closing_) return;
        const wire::Message message = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        wire::send_frame(fd_.get(), message);
      }
    } catch (const std::exception& e) {
      log::warn(cat("cannot write to rank 0: ", e.what()));
      ::shutdown(fd_.get(), SHUT_RDWR);  // the reader sees the end
    }
  }

  UniqueFd fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<wire::Message> queue_;
  bool closing_ = false;
  std::thread writer_;
};

EngineLink::EngineLink(const std::string& socket, Limits limits)
    : limits_(limits), path_(socket), listener_(listen_unix(socket)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno(Code::internal, "cannot create an eventfd");
  thread_ = std::thread([this] { run(); });
}

EngineLink::~EngineLink() {
  stop();
}

void EngineLink::stop() {
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) != sizeof one) log::warn("cannot wake the link's thread");
  if (thread_.joinable()) {
    thread_.join();
    ::unlink(path_.c_str());
  }
  std::vector<Journal::Failure> failures;
  {
    const std::scoped_lock lock(mutex_);
    failures = journal_.fail_all(503, "the server is stopping");
  }
  report(failures);
}

uint64_t EngineLink::reserve(size_t count) {
  const std::scoped_lock lock(mutex_);
  const uint64_t first = next_id_;
  next_id_ += count;
  return first;
}

void EngineLink::submit(std::vector<wire::Submit> requests, const std::shared_ptr<RequestSink>& sink) {
  const std::scoped_lock lock(mutex_);
  const bool canary = !requests.empty() && requests.front().key == kCanaryKey;
  if (stopping_) throw ApiError(503, "the server is stopping");
  if (!status_.was_connected) throw ApiError(503, "the model is loading; try again later");
  if (canary && !status_.connected) throw ApiError(503, "no rank is connected");
  if (!canary && status_.draining) throw ApiError(503, "the server is draining; try again later");
  if (!canary && !status_.gate_open) throw ApiError(503, "the server is not ready; try again later");
  int64_t tokens = 0;
  for (const wire::Submit& r : requests) tokens += static_cast<int64_t>(r.prompt.size());
  const size_t room = limits_.max_queue + static_cast<size_t>(std::max(0, status_.hello.max_seqs));
  if (!canary && journal_.unfinished() + requests.size() > room) {
    throw ApiError(429, cat("too many requests: ", journal_.unfinished(), " are unfinished; try again later"), {},
                   retry_after_s());
  }
  const bool crowded = journal_.waiting_tokens() > 0 && journal_.waiting_tokens() + tokens > limits_.max_queue_tokens;
  if (!canary && crowded) {
    throw ApiError(429, cat("too many requests: ", journal_.waiting_tokens(), " prompt tokens wait; try again later"),
                   {}, retry_after_s());
  }
  for (wire::Submit& r : requests) journal_.add(std::move(r), sink);
  send_unsent();
}

// With mutex_ held. Models that changed are noticed at Hello, so nothing can fail here but what Hello reported.
void EngineLink::send_unsent() {
  if (!status_.connected) return;
  std::vector<Journal::Failure> none;
  for (wire::Submit& r : journal_.take_unsent(status_.hello.model_digest, status_.stats.gate_open, none)) {
    connection_->push(std::move(r));
  }
}

void EngineLink::cancel(uint64_t id, std::optional<uint32_t> keep_tokens) {
  const std::scoped_lock lock(mutex_);
  if (journal_.remove(id) && status_.connected) connection_->push(wire::Cancel{id, keep_tokens});
}

void EngineLink::set_gate(bool open) {
  const std::scoped_lock lock(mutex_);
  status_.gate_open = open;
  if (open) status_.draining = false;
}

void EngineLink::drain() {
  const std::scoped_lock lock(mutex_);
  status_.draining = true;
}

EngineStatus EngineLink::status() const {
  const std::scoped_lock lock(mutex_);
  EngineStatus s = status_;
  s.unfinished = journal_.unfinished();
  s.waiting = journal_.waiting();
  if (s.connected) {
    const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - stats_at_);
    s.progress_age_ms = s.stats.progress_age_ms + static_cast<uint64_t>(age.count());
  }
  return s;
}

void EngineLink::run() {
  while (true) {
    {
      const std::scoped_lock lock(mutex_);
      if (stopping_) break;
    }
    // connection_ is replaced by this thread only, so it may be read here.
    std::array<pollfd, 4> fds = {{{wake_.get(), POLLIN, 0},
                                  {listener_.get(), POLLIN, 0},
                                  {connection_ ? connection_->fd() : -1, POLLIN, 0},
                                  {candidate_ ? candidate_->fd() : -1, POLLIN, 0}}};
    if (::poll(fds.data(), fds.size(), candidate_ ? 1000 : -1) < 0 && errno != EINTR) {
      log::error("the link to rank 0 cannot poll");
      break;
    }
    try {
      if (fds[2].revents != 0) {
        if (!receive()) continue;
      }
      if (fds[3].revents != 0) greet();
      if (candidate_ && Clock::now() > candidate_until_) {
        log::warn("somebody connected to the rank socket and said nothing");
        candidate_.reset();
      }
      if (fds[1].revents != 0) accept_one();
    } catch (const std::exception& e) {
      log::error(cat("link to rank 0: ", e.what()));
    }
  }
  candidate_.reset();
  drop("the server is stopping");
}

void EngineLink::accept_one() {
  UniqueFd fd = accept_until(listener_.get(), Clock::now());
  if (!fd) return;
  candidate_ = std::make_shared<Connection>(std::move(fd));
  candidate_until_ = Clock::now() + kHelloLimit;
}

void EngineLink::greet() {
  const std::shared_ptr<Connection> candidate = std::move(candidate_);
  candidate_.reset();
  wire::Hello hello;
  try {
    const wire::Message first = wire::receive_frame(candidate->fd());
    const auto* said = std::get_if<wire::Hello>(&first);
    if (said == nullptr) throw Error(Code::corrupt, "the first frame is no Hello");
    if (said->protocol != wire::kProtocol) {
      throw Error(Code::corrupt, cat("protocol ", said->protocol, ", this program speaks ", wire::kProtocol));
    }
    hello = *said;
  } catch (const Error& e) {
    log::warn(cat("a rank was turned away: ", e.what()));
    return;
  }
  if (connection_ && hello.generation < status_.generation) {
    log::warn(
        cat("a rank of generation ", hello.generation, " was turned away, ", status_.generation, " is connected"));
    return;
  }
  drop("a newer rank took its place");
  std::vector<Journal::Failure> failures;
  {
    const std::scoped_lock lock(mutex_);
    connection_ = candidate;
    status_.connected = status_.was_connected = true;
    status_.generation = hello.generation;
    status_.hello = hello;
    status_.stats = {};
    stats_at_ = Clock::now();
    for (wire::Submit& r : journal_.take_unsent(hello.model_digest, false, failures)) connection_->push(std::move(r));
  }
  log::info(cat("rank 0 of generation ", hello.generation, " is connected"));
  report(failures);
}

bool EngineLink::receive() {
  try {
    const wire::Message message = wire::receive_frame(connection_->fd());
    if (const auto* delta = std::get_if<wire::Delta>(&message)) {
      handle(*delta);
    } else if (const auto* stats = std::get_if<wire::Stats>(&message)) {
      handle(*stats);
    } else {
      throw Error(Code::corrupt, "rank 0 sent a frame it should only receive");
    }
    return true;
  } catch (const Error& e) {
    drop(e.what());
    return false;
  }
}

/// How often requests end, while there are more.
void EngineLink::count_end() {
  constexpr double kMemory = 0.9;
  const auto now = Clock::now();
  if (ended_at_) {
    const double ms = std::chrono::duration<double, std::milli>(now - *ended_at_).count();
    ends_every_ms_ = ends_every_ms_ == 0 ? ms : kMemory * ends_every_ms_ + (1 - kMemory) * ms;
  }
  ended_at_ = journal_.unfinished() > 0 ? std::optional(now) : std::nullopt;
}

/// Seconds until what waits now has had its turn, 1 to 600; 0 = unknown.
uint32_t EngineLink::retry_after_s() const {
  if (ends_every_ms_ == 0) return 0;
  return static_cast<uint32_t>(
      std::clamp(ends_every_ms_ * static_cast<double>(journal_.unfinished()) / 1000, 1.0, 600.0));
}

void EngineLink::handle(const wire::Delta& delta) {
  std::optional<Journal::Fresh> fresh;
  {
    const std::scoped_lock lock(mutex_);
    fresh = journal_.accept(delta);
    if (fresh && !delta.finish.empty()) count_end();
  }
  if (!fresh) return;
  if (delta.finish == "error") {
    const int status = delta.error_code >= 400 && delta.error_code < 600 ? delta.error_code : 500;
    fresh->sink->on_failure(delta.id, status, delta.error.empty() ? "the engine failed" : delta.error,
                            delta.retry_after_s);
  } else if (delta.finish == "abort") {
    fresh->sink->on_failure(delta.id, 503, "the engine ended this request", 0);
  } else {
    fresh->sink->on_delta(fresh->delta);
  }
}

void EngineLink::handle(const wire::Stats& stats) {
  std::vector<Journal::Failure> failures;
  {
    const std::scoped_lock lock(mutex_);
    status_.stats = stats;
    stats_at_ = Clock::now();
    if (stats.gate_open) {
      for (wire::Submit& r : journal_.take_unsent(status_.hello.model_digest, true, failures)) {
        connection_->push(std::move(r));
      }
    }
  }
  report(failures);
}

void EngineLink::drop(std::string_view why) {
  std::shared_ptr<Connection> gone;
  std::vector<Journal::Failure> failures;
  {
    const std::scoped_lock lock(mutex_);
    gone = std::move(connection_);
    connection_.reset();
    if (!gone) return;
    status_.connected = false;
    failures = journal_.lost();
    log::warn(cat("rank 0 of generation ", status_.generation, " is gone: ", why, "; ", journal_.unfinished(),
                  " requests wait for the next"));
  }
  gone->close();
  report(failures);
}

}  // namespace glm53::api
