#include "agent/sync/sender.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unistd.h>

#include <sys/stat.h>

#include "agent/hub/transport.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"

namespace glm53::sync {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kTick = milliseconds(100);
constexpr milliseconds kLongestPause{10'000};
constexpr int kMostDamage = 3;

[[noreturn]] void throw_cancelled() {
  throw Error(Code::cancelled, "the copy was called off");
}

/// Worth another attempt: the other end is away, or something on the way went wrong.
bool passing(const Error& e) {
  switch (e.code()) {
    case Code::peer_lost:
    case Code::stalled:
    case Code::busy:
    case Code::corrupt:
    case Code::overloaded:
    case Code::not_found:  // its agent was started again and knows of no copy
      return true;
    case Code::unavailable:
      return std::string_view(e.what()).find("E64") == std::string_view::npos;  // a full disk stays full
    default:
      return false;
  }
}

}  // namespace

/// One pass over what is missing.
struct Sender::Round {
  Round(Sender& owner, const Manifest& manifest, const hub::Cache& source, Have have, hub::RateLimit& limit)
      : settings(owner.settings_),
        connect(owner.connect_),
        cancelled(owner.cancelled_),
        cache(source),
        repo(manifest.repo),
        rate(limit),
        bytes_done(have.bytes_done) {
    for (const hub::FileEntry& f : manifest.files) files.emplace(f.etag, f);
    for (Range& r : have.missing) queues[r.etag].push_back(std::move(r));
    for (auto& [etag, queue] : queues) {
      std::reverse(queue.begin(), queue.end());  // taken from the back
      order.push_back(etag);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](const std::string& a, const std::string& b) { return files.at(a).size > files.at(b).size; });
  }

  /// The next range: of a blob that no other stream is at, if there is one.
  std::optional<Range> next() {
    const std::lock_guard lock(mutex);
    if (failed || cancelled) return std::nullopt;
    for (const bool alone : {true, false}) {
      for (const std::string& etag : order) {
        auto& queue = queues.at(etag);
        if (queue.empty() || (alone && at_work.contains(etag))) continue;
        Range range = std::move(queue.back());
        queue.pop_back();
        at_work.insert(etag);
        return range;
      }
    }
    return std::nullopt;
  }
  void leave(const std::string& etag) {
    const std::lock_guard lock(mutex);
    at_work.erase(at_work.find(etag));
  }

  void work() {
    try {
      std::unique_ptr<Peer> peer;
      std::string buffer(kPiece, '\0');
      while (const auto range = next()) {
        if (!peer) peer = connect();
        send(*peer, *range, buffer);
        leave(range->etag);
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failed) failed = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    --running;
    ended.notify_all();
  }

  void send(Peer& peer, const Range& range, std::string& buffer) {
    const hub::FileEntry& file = files.at(range.etag);
    const std::string path = cache.blob_path(repo, range.etag);
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) throw_errno(Code::weights, cat("sync: cannot read ", path));
    const auto before = cache.blob(repo, range.etag, file.size);
    int64_t at = range.offset;
    do {
      const int64_t n = std::min<int64_t>(static_cast<int64_t>(kPiece), range.offset + range.length - at);
      while (n > 0 && !rate.take(n)) {
        if (stopping()) return;
        std::this_thread::sleep_for(milliseconds(5));
      }
      read_piece(fd.get(), path, at, n, buffer);
      const std::string_view piece(buffer.data(), static_cast<size_t>(n));
      peer.send(range.etag, at, piece, xxh64(std::as_bytes(std::span(piece))));
      at += n;
      bytes_done += n;
      bytes_sent += n;
      if (stopping()) return;
    } while (at < range.offset + range.length);
    if (file.size > (int64_t{256} << 20))
      (void)::posix_fadvise(fd.get(), range.offset, range.length, POSIX_FADV_DONTNEED);
    if (!before || cache.blob(repo, range.etag, file.size) != before) {
      throw Error(Code::weights, cat("sync: ", path, " changed while it was read"), "nothing may write into the cache");
    }
  }

  static void read_piece(int fd, const std::string& path, int64_t at, int64_t n, std::string& buffer) {
    for (int64_t done = 0; done < n;) {
      const ssize_t got = ::pread(fd, buffer.data() + done, static_cast<size_t>(n - done), at + done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_errno(Code::weights, cat("sync: cannot read ", path));
      if (got == 0) throw Error(Code::weights, cat("sync: ", path, " became shorter while it was read"));
      done += got;
    }
  }

  bool stopping() {
    if (cancelled) return true;
    const std::lock_guard lock(mutex);
    return failed != nullptr;
  }

  void run(const std::function<void(int64_t done, int64_t sent)>& on_tick) {
    running = static_cast<size_t>(std::max(1, settings.streams));
    const size_t count = running;
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < count; ++i) threads.emplace_back([this] { work(); });
    std::unique_lock lock(mutex);
    while (running > 0) {
      ended.wait_for(lock, kTick);
      lock.unlock();
      on_tick(bytes_done, bytes_sent);
      lock.lock();
    }
  }

  const SenderSettings& settings;
  const Connect& connect;
  const std::atomic<bool>& cancelled;
  const hub::Cache& cache;
  const std::string repo;
  hub::RateLimit& rate;
  std::map<std::string, hub::FileEntry> files;
  std::mutex mutex;  // guards the next six
  std::condition_variable ended;
  std::map<std::string, std::vector<Range>> queues;
  std::vector<std::string> order;
  std::multiset<std::string> at_work;
  std::exception_ptr failed;
  size_t running = 0;
  std::atomic<int64_t> bytes_done, bytes_sent{0};
};

namespace {

/// A blob that was never verified is hashed before a byte of it goes out.
void verify_source(const hub::Cache& cache, hub::Journal& journal, const Manifest& manifest, const Have& have,
                   const std::atomic<bool>& cancelled, const std::function<void(const std::string&)>& on_event) {
  std::set<std::string> wanted;
  for (const Range& r : have.missing) wanted.insert(r.etag);
  const std::string folder = cache.repo_dir(manifest.repo);
  for (const hub::FileEntry& f : manifest.files) {
    if (wanted.erase(f.etag) == 0) continue;
    const auto id = cache.blob(manifest.repo, f.etag, f.size);
    if (!id) throw Error(Code::weights, cat("sync: the blob of ", f.path, " went away"), "download it again");
    if (journal.is_verified(folder, f.etag, *id)) continue;
    on_event(cat("verifying ", f.path, " before it is copied"));
    const std::string got = hub::digest_of_file(cache.blob_path(manifest.repo, f.etag), f.etag.size(), f.size, [&] {
      if (cancelled) throw_cancelled();
    });
    if (got != f.etag) {
      throw Error(Code::weights, cat("E610 sync: ", f.path, " of the head's cache does not match its digest"),
                  cat("glm53ctl download --verify ", manifest.repo, "@", manifest.commit, " repairs it"));
    }
    journal.verified(folder, f.etag, *id);
  }
}

}  // namespace

SendResult Sender::run(const Manifest& manifest, const std::function<void(const SendProgress&)>& on_progress,
                       const std::function<void(const std::string&)>& on_event) {
  const hub::Cache cache(settings_.cache);
  hub::Journal journal(settings_.journal_dir);
  hub::RateLimit limit(settings_.limit_rate);
  SendResult result{digest_of(manifest), manifest.bytes(), 0};
  auto last_progress = steady_clock::now();
  milliseconds pause = settings_.pause;
  int damaged = 0;
  while (true) {
    if (cancelled_) throw_cancelled();
    std::exception_ptr failed;
    int64_t sent = 0;
    try {
      const auto peer = connect_();
      const Have have = peer->open(manifest);
      if (have.digest != result.digest) throw Error(Code::busy, "sync: the receiver is at another copy");
      on_progress({have.bytes_done, result.bytes, result.bytes_sent});
      if (have.missing.empty()) {
        peer->commit(result.digest);
        return result;
      }
      verify_source(cache, journal, manifest, have, cancelled_, on_event);
      Round round(*this, manifest, cache, have, limit);
      round.run([&](int64_t done, int64_t now_sent) {
        on_progress({done, result.bytes, result.bytes_sent + now_sent});
      });
      sent = round.bytes_sent;
      failed = round.failed;
    } catch (const std::exception&) {
      failed = std::current_exception();
    }
    result.bytes_sent += sent;
    if (cancelled_) throw_cancelled();
    if (!failed) {
      last_progress = steady_clock::now();
      continue;  // ask what is missing now: nothing, if all went well
    }
    try {
      std::rethrow_exception(failed);
    } catch (const Error& e) {
      damaged += e.code() == Code::corrupt ? 1 : 0;
      if (!passing(e) || damaged > kMostDamage) throw;
      if (sent > 0) {
        last_progress = steady_clock::now();
        pause = settings_.pause;
      }
      if (steady_clock::now() - last_progress >= settings_.give_up_after) {
        throw Error(Code::unavailable,
                    cat("E643 sync: no progress for ",
                        std::chrono::ceil<std::chrono::seconds>(settings_.give_up_after).count(), " s: ", e.what()),
                    "run it again: it goes on where it stopped");
      }
      on_event(cat("copying is interrupted: ", e.what()));
    }
    const auto until = steady_clock::now() + pause;
    while (steady_clock::now() < until && !cancelled_) std::this_thread::sleep_for(milliseconds(20));
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace glm53::sync
