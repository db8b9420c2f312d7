#include "common/file.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

namespace {

UniqueFd open_for_reading(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd) return fd;
  if (errno == ENOENT || errno == ENOTDIR) throw_errno(Code::not_found, cat("cannot read '", path, "'"));
  throw_errno(Code::unavailable, cat("cannot read '", path, "'"));
}

std::string read_named(int fd, const std::string& path, size_t limit) {
  std::string content;
  struct stat info {};
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
    content.reserve(std::min(static_cast<size_t>(info.st_size), limit) + 1);
  }
  std::array<char, 1 << 16> buffer;
  while (true) {
    const ssize_t n = ::read(fd, buffer.data(), buffer.size());
    if (n < 0) {
      if (errno == EINTR) continue;
      throw_errno(Code::unavailable, cat("cannot read '", path, "'"));
    }
    if (n == 0) return content;
    if (content.size() + static_cast<size_t>(n) > limit) {
      throw Error(Code::unavailable, cat("'", path, "' is larger than ", limit, " bytes"));
    }
    content.append(buffer.data(), static_cast<size_t>(n));
  }
}

/// Removes the temporary file of an unfinished write.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::string path) : path_(std::move(path)) {}
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  const std::string& path() const { return path_; }
  void keep() { path_.clear(); }

 private:
  std::string path_;
};

void write_all(int fd, std::string_view content, const std::string& path, FileOps& ops) {
  while (!content.empty()) {
    const ssize_t n = ops.write(fd, content.data(), content.size());
    if (n < 0) {
      if (errno == EINTR) continue;
      throw_errno(Code::unavailable, cat("cannot write '", path, "'"));
    }
    content.remove_prefix(static_cast<size_t>(n));
  }
}

void sync_folder(const std::string& path, FileOps& ops) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  const UniqueFd fd(ops.open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  // Some file systems have no fsync of folders; the rename is as durable there as it can be.
  if (!fd || (ops.fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP)) {
    throw_errno(Code::unavailable, cat("wrote '", path, "' but cannot make it durable"));
  }
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& o) noexcept {
  if (this != &o) {
    reset();
    fd_ = o.release();
  }
  return *this;
}

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(fd_);  // nothing can be done about an error, and EINTR closes too on Linux
  fd_ = -1;
}

int FileOps::open(const char* path, int flags, int mode) {
  return ::open(path, flags, static_cast<mode_t>(mode));
}
ssize_t FileOps::write(int fd, const void* data, size_t n) {
  return ::write(fd, data, n);
}
ssize_t FileOps::pwrite(int fd, const void* data, size_t n, int64_t offset) {
  return ::pwrite(fd, data, n, offset);
}
ssize_t FileOps::pread(int fd, void* data, size_t n, int64_t offset) {
  return ::pread(fd, data, n, offset);
}
int FileOps::fsync(int fd) {
  return ::fsync(fd);
}
int FileOps::fdatasync(int fd) {
  return ::fdatasync(fd);
}
int FileOps::reserve(int fd, int64_t size) {
  if (size == 0) return ::ftruncate(fd, 0);
  if (::fallocate(fd, 0, 0, size) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return -1;
  return ::ftruncate(fd, size);
}
int FileOps::rename(const char* from, const char* to) {
  return ::rename(from, to);
}
int FileOps::unlink(const char* path) {
  return ::unlink(path);
}
FileOps& FileOps::real() {
  static FileOps ops;
  return ops;
}

std::string read_file(const std::string& path, size_t limit) {
  const UniqueFd fd = open_for_reading(path);
  return read_named(fd.get(), path, limit);
}

std::string read_all(int fd, size_t limit) {
  try {
    return read_named(fd, cat("descriptor ", fd), limit);
  } catch (const Error& e) {
    throw Error(Code::config, e.what(), "whoever starts this program opens it for reading");
  }
}

void write_file(const std::string& path, std::string_view content, int mode, FileOps& ops) {
  TemporaryFile temporary(cat(path, ".", random_hex(6), ".tmp"));
  UniqueFd fd(ops.open(temporary.path().c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) throw_errno(Code::unavailable, cat("cannot write '", path, "'"));
  write_all(fd.get(), content, path, ops);
  if (::fchmod(fd.get(), static_cast<mode_t>(mode)) != 0 || ops.fsync(fd.get()) != 0) {
    throw_errno(Code::unavailable, cat("cannot write '", path, "'"));
  }
  fd.reset();
  if (ops.rename(temporary.path().c_str(), path.c_str()) != 0) {
    throw_errno(Code::unavailable, cat("cannot replace '", path, "'"));
  }
  temporary.keep();
  sync_folder(path, ops);
}

void make_dirs(const std::string& path, int mode) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    const std::string folder = path.substr(0, end);
    if (!folder.empty() && ::mkdir(folder.c_str(), static_cast<mode_t>(mode)) != 0) {
      const int error = errno;
      struct stat info {};
      if (::stat(folder.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
        errno = error == EEXIST ? ENOTDIR : error;
        throw_errno(Code::unavailable, cat("cannot make folder '", folder, "'"));
      }
    }
    if (end == std::string::npos) return;
  }
}

std::string read_secret(const std::string& path) {
  const UniqueFd fd = open_for_reading(path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) throw_errno(Code::unavailable, cat("cannot read '", path, "'"));
  if ((info.st_mode & 0077u) != 0) {
    throw Error(Code::config, cat("secret file '", path, "' can be read by other users"),
                cat("chmod 600 '", path, "'"));
  }
  std::string secret(trim(read_named(fd.get(), path, size_t{1} << 16)));
  if (secret.empty()) throw Error(Code::config, cat("secret file '", path, "' is empty"));
  return secret;
}

MappedFile::MappedFile(const std::string& path) {
  const UniqueFd fd = open_for_reading(path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) throw_errno(Code::unavailable, cat("cannot map '", path, "'"));
  if (!S_ISREG(info.st_mode)) throw Error(Code::unavailable, cat("cannot map '", path, "': not a regular file"));
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (data == MAP_FAILED) throw_errno(Code::unavailable, cat("cannot map '", path, "'"));
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::MappedFile(MappedFile&& o) noexcept
    : data_(std::exchange(o.data_, nullptr)), size_(std::exchange(o.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(size_, o.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::optional<UniqueFd> try_lock(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!fd) throw_errno(Code::unavailable, cat("cannot open lock file '", path, "'"));
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return std::nullopt;
    if (errno != EINTR) throw_errno(Code::unavailable, cat("cannot lock '", path, "'"));
  }
  return fd;
}

}  // namespace glm53
