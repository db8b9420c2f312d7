// A disk that loses power: what was written or renamed and not made durable since is gone afterwards.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <fcntl.h>
#include <filesystem>
#include <mutex>
#include <string>
#include <unistd.h>
#include <vector>

#include "common/file.h"

namespace glm53::test {

/// After `bytes` written bytes every call fails, as for a machine that has stopped. lose() then puts the files back to
/// what the disk was sure to have. Thread-safe.
class PowerLoss final : public FileOps {
 public:
  explicit PowerLoss(int64_t bytes) : left_(bytes) {}
  bool off() const { return left_ <= 0; }

  int open(const char* path, int flags, int mode) override {
    return off() ? stopped() : FileOps::open(path, flags, mode);
  }
  ssize_t write(int fd, const void* data, size_t n) override { return pwrite_and_move(fd, data, n); }
  ssize_t pwrite(int fd, const void* data, size_t n, int64_t offset) override {
    const std::lock_guard lock(mutex_);
    if (off()) return stopped();
    left_ -= static_cast<int64_t>(n);
    std::string before(n, '\0');
    const ssize_t had = ::pread(fd, before.data(), n, offset);
    before.resize(had > 0 ? static_cast<size_t>(had) : 0);
    before.resize(n, '\0');  // never written: nothing but zeros
    undo_.push_back({path_of(fd), {}, offset, std::move(before)});
    return FileOps::pwrite(fd, data, n, offset);
  }
  int fsync(int fd) override { return settle(fd) ? FileOps::fsync(fd) : -1; }
  int fdatasync(int fd) override { return settle(fd) ? FileOps::fdatasync(fd) : -1; }
  int rename(const char* from, const char* to) override {
    const std::lock_guard lock(mutex_);
    if (off()) return stopped();
    const int result = FileOps::rename(from, to);
    if (result == 0 && !std::filesystem::is_symlink(to)) undo_.push_back({to, from, 0, {}});
    return result;
  }
  /// Call it when nobody writes any more.
  void lose() {
    const std::lock_guard lock(mutex_);
    left_ = 0;
    for (auto it = undo_.rbegin(); it != undo_.rend(); ++it) {
      if (!it->from.empty()) {
        ::rename(it->path.c_str(), it->from.c_str());
        continue;
      }
      const UniqueFd fd(::open(it->path.c_str(), O_WRONLY | O_CLOEXEC));
      if (fd && ::pwrite(fd.get(), it->before.data(), it->before.size(), it->offset) < 0) continue;  // it is gone
    }
    undo_.clear();
  }

 private:
  struct Change {
    std::string path, from;  ///< `from`: it was renamed
    int64_t offset = 0;
    std::string before;
  };
  static int stopped() {
    errno = EIO;
    return -1;
  }
  static std::string path_of(int fd) {
    std::error_code ignored;
    return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored).string();
  }
  ssize_t pwrite_and_move(int fd, const void* data, size_t n) {
    const off_t at = ::lseek(fd, 0, SEEK_CUR);
    if (at < 0) return -1;
    const ssize_t done = pwrite(fd, data, n, at);
    if (done > 0 && ::lseek(fd, at + done, SEEK_SET) < 0) return -1;
    return done;
  }
  /// What the descriptor stands for is durable: a file's bytes, or the names in a folder.
  bool settle(int fd) {
    const std::lock_guard lock(mutex_);
    if (off()) return stopped() == 0;
    const std::string path = path_of(fd);
    std::erase_if(undo_, [&](const Change& c) {
      return c.from.empty() ? c.path == path : std::filesystem::path(c.path).parent_path() == path;
    });
    return true;
  }

  std::atomic<int64_t> left_;
  std::mutex mutex_;
  std::vector<Change> undo_;  ///< oldest first
};

}  // namespace glm53::test
