// Files and descriptors. Writes go through one door (FileOps) so that tests can make them fail.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace glm53 {

/// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& o) noexcept : fd_(o.release()) {}
  UniqueFd& operator=(UniqueFd&& o) noexcept;
  ~UniqueFd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() {
    int f = fd_;
    fd_ = -1;
    return f;
  }
  void reset();

 private:
  int fd_ = -1;
};

/// The calls through which files are changed; a test derives from it and fails one on purpose. real() is the system.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual int open(const char* path, int flags, int mode);
  virtual ssize_t write(int fd, const void* data, size_t n);
  virtual ssize_t pwrite(int fd, const void* data, size_t n, int64_t offset);
  virtual ssize_t pread(int fd, void* data, size_t n, int64_t offset);
  virtual int fsync(int fd);
  virtual int fdatasync(int fd);
  /// Reserves the blocks of the first `size` bytes and makes the file that long; only its length where the file system
  /// reserves nothing.
  virtual int reserve(int fd, int64_t size);
  virtual int rename(const char* from, const char* to);
  virtual int unlink(const char* path);
  static FileOps& real();
};

/// Whole file; throws Error(not_found) or Error(unavailable) naming it. `limit` bytes at most.
std::string read_file(const std::string& path, size_t limit = size_t{1} << 30);
/// Everything from a descriptor that the caller was given, until its end. Throws Error(config) when it cannot be read.
std::string read_all(int fd, size_t limit = size_t{1} << 26);
/// Atomic and durable: temporary file beside it, fsync, rename, fsync of the folder. An error leaves the old file as it
/// was.
void write_file(const std::string& path, std::string_view content, int mode = 0644, FileOps& ops = FileOps::real());
/// mkdir -p.
void make_dirs(const std::string& path, int mode = 0755);
/// A secret file (key, token): trimmed content; refuses files readable by others with the remedy.
std::string read_secret(const std::string& path);

/// Read-only memory map.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&&) noexcept;
  MappedFile& operator=(MappedFile&&) noexcept;
  ~MappedFile();
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// An advisory lock held while the object lives (flock). nullopt when somebody else holds it.
std::optional<UniqueFd> try_lock(const std::string& path);

}  // namespace glm53
