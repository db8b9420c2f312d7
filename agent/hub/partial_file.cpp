#include "agent/hub/partial_file.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <numeric>
#include <unistd.h>

#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

constexpr int64_t kBlock = int64_t{1} << 20;
constexpr int64_t kThreadAbove = int64_t{8} << 20;  // below, a thread costs more than it saves
constexpr int64_t kCacheStep = int64_t{16} << 20;   // how far behind the frontier pages leave the cache

constexpr int64_t kPollutes = int64_t{256} << 20;  // larger files are not worth the page cache

size_t read_block(int fd, std::string& buffer, size_t n, int64_t at) {
  while (true) {
    const ssize_t got = ::pread(fd, buffer.data(), n, at);
    if (got > 0) return static_cast<size_t>(got);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) throw Error(Code::corrupt, "hub: a file became shorter while it was read");
    throw_errno(Code::unavailable, "hub: cannot read back a file");
  }
}

}  // namespace

FrontierHash::FrontierHash(int fd, size_t digits, int64_t size, bool bypass_cache)
    : fd_(fd),
      size_(size),
      bypass_cache_(bypass_cache),
      hash_(digits, size),
      buffer_(static_cast<size_t>(kBlock), '\0') {
  if (size > kThreadAbove) thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
}

FrontierHash::~FrontierHash() = default;

void FrontierHash::run(const std::stop_token& stop) {
  try {
    std::unique_lock lock(mutex_);
    while (wake_.wait(lock, stop, [&] { return frontier_ > hashed_; })) {
      const int64_t to = std::min(frontier_, hashed_ + kBlock);
      lock.unlock();
      hash_to(to);
      lock.lock();
      if (stop.stop_requested()) return;
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failed_ = std::current_exception();
  }
}

void FrontierHash::hash_to(int64_t frontier) {
  while (hashed_ < frontier) {
    const size_t n = read_block(fd_, buffer_, static_cast<size_t>(std::min(kBlock, frontier - hashed_)), hashed_);
    hash_.update({buffer_.data(), n});
    hashed_ += static_cast<int64_t>(n);
    if (bypass_cache_ && hashed_ - requested_ >= kCacheStep) leave_cache();
  }
}

/// On unified memory the page cache takes from the model. Only clean pages leave: writing is started for one step,
/// and the step before it, written by now, leaves. Advice: failure changes nothing.
void FrontierHash::leave_cache() {
  (void)::sync_file_range(fd_, requested_, hashed_ - requested_, SYNC_FILE_RANGE_WRITE);
  if (requested_ > left_) {
    (void)::sync_file_range(fd_, left_, requested_ - left_,
                            SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    (void)::posix_fadvise(fd_, left_, requested_ - left_, POSIX_FADV_DONTNEED);
    left_ = requested_;
  }
  requested_ = hashed_;
}

void FrontierHash::advance(int64_t frontier) {
  {
    const std::lock_guard lock(mutex_);
    if (frontier <= frontier_) return;
    frontier_ = frontier;
  }
  wake_.notify_one();
}

std::string FrontierHash::finish() {
  if (thread_.joinable()) {
    thread_.request_stop();
    thread_.join();
  }
  if (failed_) std::rethrow_exception(failed_);
  hash_to(size_);
  return hash_.hex();
}

std::string digest_of_file(const std::string& path, size_t digits, int64_t size,
                           const std::function<void()>& progress) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw_errno(Code::unavailable, cat("hub: cannot read ", path));
  BlobHash hash(digits, size);
  std::string buffer(static_cast<size_t>(kBlock), '\0');
  for (int64_t at = 0; at < size;) {
    const size_t n = read_block(fd.get(), buffer, static_cast<size_t>(std::min(kBlock, size - at)), at);
    hash.update({buffer.data(), n});
    at += static_cast<int64_t>(n);
    progress();
    if (size > kPollutes && (at % kCacheStep == 0 || at == size))
      (void)::posix_fadvise(fd.get(), 0, at, POSIX_FADV_DONTNEED);
  }
  return hash.hex();
}

PartialFile::PartialFile(const Cache& cache, Journal& journal, const std::string& repo, const FileEntry& file,
                         Layout layout)
    : cache_(cache),
      journal_(journal),
      repo_(repo),
      folder_(cache.repo_dir(repo)),
      path_(cache.partial_path(repo, file.etag)),
      file_(file),
      layout_(layout) {
  open();
  start_hash();
}

PartialFile::~PartialFile() = default;

void PartialFile::fail(const std::string& what) const {
  const int error = errno;
  if (error == ENOSPC || error == EDQUOT) {
    throw HubError(Action::give_up,
                   Error(Code::unavailable,
                         cat("E640 hub: no space for ", file_.path, ": ", path_, " needs ",
                             human_bytes(file_.size - done_bytes()), error == EDQUOT ? " (quota)" : ""),
                         "make room and run the download again: it goes on where it stopped"));
  }
  errno = error;
  try {
    throw_errno(Code::unavailable, cat("E642 hub: ", what, " ", path_));
  } catch (const Error& e) {
    throw HubError(Action::give_up, e);
  }
}

void PartialFile::open() {
  FileOps& ops = cache_.ops();
  const auto known = journal_.segments(folder_, file_, path_);
  fd_ = UniqueFd(ops.open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0));
  if (fd_) {
    struct stat info {};
    const bool ours =
        ::fstat(fd_.get(), &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == ::geteuid() && info.st_nlink == 1;
    if (ours && known && info.st_size == file_.size) {
      segments_ = *known;
      return;
    }
    fd_.reset();
  }
  // Unknown, of another size, or no file of ours (then the name goes, never what it links to).
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) fail("cannot remove");
  fd_ = UniqueFd(ops.open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd_) fail("cannot create");
  if (ops.reserve(fd_.get(), file_.size) != 0) fail("cannot reserve");
  segments_.size = file_.size > layout_.ranges_above ? layout_.segment_bytes : std::max<int64_t>(file_.size, 1);
  segments_.done.assign(static_cast<size_t>((file_.size + segments_.size - 1) / segments_.size), 0);
}

void PartialFile::start_hash() {
  contiguous_ = 0;
  hash_ = std::make_unique<FrontierHash>(fd_.get(), file_.etag.size(), file_.size, layout_.bypass_cache);
  if (segments() > 0) write(0, {});
}

int64_t PartialFile::done_bytes() const {
  return std::accumulate(segments_.done.begin(), segments_.done.end(), int64_t{0});
}

void PartialFile::write(size_t segment, std::string_view data) {
  while (!data.empty()) {
    const ssize_t n =
        cache_.ops().pwrite(fd_.get(), data.data(), data.size(), begin(segment) + segments_.done[segment]);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot write");
    segments_.done[segment] += n;
    data.remove_prefix(static_cast<size_t>(n));
  }
  while (contiguous_ < segments() && done(contiguous_) == length(contiguous_)) ++contiguous_;
  hash_->advance(contiguous_ < segments() ? begin(contiguous_) + done(contiguous_) : file_.size);
}

void PartialFile::restart(bool single) {
  if (single) segments_.size = std::max<int64_t>(file_.size, 1);
  segments_.done.assign(static_cast<size_t>((file_.size + segments_.size - 1) / segments_.size), 0);
  journal_.forget(folder_, file_.etag);
  start_hash();
}

void PartialFile::save() {
  const Segments now = segments_;
  if (cache_.ops().fdatasync(fd_.get()) != 0) fail("cannot make durable");
  journal_.save_segments(folder_, file_, path_, now);
}

FileId PartialFile::publish() {
  const std::string blob = cache_.blob_path(repo_, file_.etag);
  cache_.publish(fd_.get(), path_, blob);
  struct stat info {};
  if (::fstat(fd_.get(), &info) != 0) fail("cannot look at");
  const FileId id = file_id(info);
  journal_.verified(folder_, file_.etag, id);
  journal_.forget(folder_, file_.etag);
  return id;
}

void PartialFile::discard(bool keep) {
  hash_.reset();
  fd_.reset();
  journal_.forget(folder_, file_.etag);
  if (keep) {
    const std::string aside = cat(cache_.blob_path(repo_, file_.etag), ".bad-", state::now_ms() / 1000);
    if (cache_.ops().rename(path_.c_str(), aside.c_str()) == 0) return;
  }
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) fail("cannot remove");
}

}  // namespace glm53::hub
