#include "agent/hub/cache.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <thread>
#include <unistd.h>

#include <sys/file.h>
#include <sys/statvfs.h>

#include "agent/hub/names.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/log.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

namespace fs = std::filesystem;

std::string variable(const char* name) {
  return environment(name).value_or("");
}

mode_t current_umask() {
  // umask(2) can only be read by changing it, for every thread; /proc says it without.
  try {
    const std::string status = read_file("/proc/self/status", 1 << 16);
    const size_t at = status.find("\nUmask:");
    if (at != std::string::npos) return static_cast<mode_t>(std::strtoul(status.c_str() + at + 7, nullptr, 8));
  } catch (const Error&) {
    // An old kernel: fall through.
  }
  return 022;
}

void make_folder(const std::string& path) {
  try {
    make_dirs(path, 0777);
  } catch (const Error& e) {
    throw Error(Code::unavailable, cat("E641 hub: ", e.what()),
                cat("if it belongs to somebody else: sudo chown -R \"$(id -u):$(id -g)\" '", path, "'"));
  }
}

std::optional<std::string> real_path(const std::string& path) {
  std::error_code ec;
  const fs::path resolved = fs::canonical(path, ec);
  if (ec) return std::nullopt;
  return resolved.string();
}

void sync_dir(const std::string& path, FileOps& ops) {
  const UniqueFd fd(ops.open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0));
  if (!fd || (ops.fsync(fd.get()) != 0 && errno != EINVAL && errno != ENOTSUP)) {
    throw_errno(Code::unavailable, cat("hub: cannot make ", path, " durable"));
  }
}

void copy_file(const std::string& from, const std::string& to, FileOps& ops) {
  const UniqueFd in(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  if (!in) throw_errno(Code::unavailable, cat("cannot read ", from));
  const std::string temporary = cat(to, ".", random_hex(4), ".tmp");
  const UniqueFd out(ops.open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!out) throw_errno(Code::unavailable, cat("cannot write ", temporary));
  std::vector<char> buffer(size_t{1} << 20);
  try {
    while (true) {
      const ssize_t n = ::read(in.get(), buffer.data(), buffer.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw_errno(Code::unavailable, cat("cannot read ", from));
      if (n == 0) break;
      for (ssize_t done = 0; done < n;) {
        const ssize_t w = ops.write(out.get(), buffer.data() + done, static_cast<size_t>(n - done));
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) throw_errno(Code::unavailable, cat("cannot write ", temporary));
        done += w;
      }
    }
    if (::fchmod(out.get(), 0666 & ~current_umask()) != 0 || ops.fsync(out.get()) != 0 ||
        ops.rename(temporary.c_str(), to.c_str()) != 0) {
      throw_errno(Code::unavailable, cat("cannot write ", to));
    }
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

}  // namespace

FileId file_id(const struct stat& info) {
  return {info.st_size, info.st_ino, int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec};
}

std::string default_home() {
  if (const std::string home = variable("HF_HOME"); !home.empty()) return home;
  if (const std::string cache = variable("XDG_CACHE_HOME"); !cache.empty()) return cache + "/huggingface";
  const std::string home = variable("HOME");
  if (home.empty()) throw Error(Code::config, "hub: neither HF_HOME nor HOME is set", "set hub.home");
  return home + "/.cache/huggingface";
}

std::string default_cache() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"}) {
    if (const std::string cache = variable(name); !cache.empty()) return cache;
  }
  return default_home() + "/hub";
}

std::string Cache::repo_dir(const std::string& repo) const {
  check_repo_id(repo);
  return cat(hub_, "/", folder_name(repo));
}

std::string Cache::blob_path(const std::string& repo, const std::string& etag) const {
  if (!is_etag(etag)) throw Error(Code::internal, "hub: no name of a blob");
  return cat(repo_dir(repo), "/blobs/", etag);
}

std::string Cache::partial_path(const std::string& repo, const std::string& etag) const {
  return blob_path(repo, etag) + ".glm53.incomplete";
}

std::string Cache::snapshot_dir(const std::string& repo, const std::string& commit) const {
  if (!is_commit(commit)) throw Error(Code::internal, "hub: no commit");
  return cat(repo_dir(repo), "/snapshots/", commit);
}

void Cache::prepare(const std::string& repo) const {
  const std::string dir = repo_dir(repo);
  struct stat info {};
  const bool fresh = ::stat(hub_.c_str(), &info) != 0;
  for (const char* sub : {"/blobs", "/refs", "/snapshots"}) make_folder(dir + sub);
  make_folder(cat(hub_, "/.locks/", folder_name(repo)));
  if (::access((dir + "/blobs").c_str(), W_OK | X_OK) != 0) {
    const int error = errno;
    errno = error;
    try {
      throw_errno(Code::unavailable, cat("E641 hub: cannot write in ", dir, "/blobs"));
    } catch (const Error& e) {
      throw Error(e.code(), e.what(), cat("sudo chown -R \"$(id -u):$(id -g)\" '", dir, "'"));
    }
  }
  if (fresh) {
    write_file(hub_ + "/CACHEDIR.TAG",
               "Signature: 8a477f597d28d172789f06886806bc55\n"
               "# This file is a cache directory tag.\n"
               "# For information about cache directory tags, see https://bford.info/cachedir/\n",
               0644, ops_);
  }
}

bool Cache::within_cache(const std::string& path) const {
  const auto root = real_path(hub_);
  const auto resolved = real_path(path);
  return root && resolved && resolved->starts_with(*root + "/");
}

std::optional<FileId> Cache::blob(const std::string& repo, const std::string& etag, int64_t size) const {
  const std::string path = blob_path(repo, etag);
  struct stat info {};
  // Newer clients may keep blobs as links into a store that all repositories share.
  if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size != size) return std::nullopt;
  if (!within_cache(path)) return std::nullopt;
  return file_id(info);
}

std::optional<std::string> Cache::etag_in_snapshot(const std::string& repo, const std::string& commit,
                                                   const std::string& path) const {
  if (unsafe_path(path)) return std::nullopt;
  std::error_code ec;
  const fs::path target = fs::read_symlink(cat(snapshot_dir(repo, commit), "/", path), ec);
  const std::string etag = target.filename().string();
  if (ec || !is_etag(etag)) return std::nullopt;
  return etag;
}

std::optional<std::string> Cache::read_ref(const std::string& repo, const std::string& name) const {
  check_revision(name);
  try {
    const std::string text = read_file(cat(repo_dir(repo), "/refs/", name), 256);
    const std::string commit(trim(text));
    if (is_commit(commit)) return commit;
  } catch (const Error& e) {
    if (e.code() != Code::not_found) throw;
  }
  return std::nullopt;
}

void Cache::write_ref(const std::string& repo, const std::string& name, const std::string& commit) const {
  check_revision(name);
  if (!is_commit(commit)) throw Error(Code::internal, "hub: no commit");
  const std::string path = cat(repo_dir(repo), "/refs/", name);
  make_folder(fs::path(path).parent_path().string());
  write_file(path, commit, 0666 & static_cast<int>(~current_umask()), ops_);
}

void Cache::link(const std::string& repo, const std::string& commit, const std::string& path,
                 const std::string& etag) const {
  if (unsafe_path(path) || !is_etag(etag)) throw Error(Code::internal, "hub: unchecked name");
  const std::string at = cat(snapshot_dir(repo, commit), "/", path);
  std::string target;
  for (const char c : path) {
    if (c == '/') target += "../";
  }
  target += "../../blobs/" + etag;
  std::error_code ec;
  if (fs::read_symlink(at, ec) == target && !ec) return;
  const std::string folder = fs::path(at).parent_path().string();
  // A folder of the snapshot that is a link itself would take ours elsewhere.
  const auto check = [&](const std::string& dir) {
    if (!within_cache(dir)) {
      throw Error(Code::corrupt, cat("hub: ", dir, " leads out of the cache"), "remove that link");
    }
  };
  fs::path there = folder;
  while (!fs::exists(there, ec) && there != there.root_path()) there = there.parent_path();
  check(there.string());
  make_folder(folder);
  check(folder);
  const std::string temporary = cat(at, ".", random_hex(4), ".tmp");
  if (::symlink(target.c_str(), temporary.c_str()) != 0) throw_errno(Code::unavailable, cat("hub: cannot link ", at));
  if (ops_.rename(temporary.c_str(), at.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    errno = error;
    throw_errno(Code::unavailable, cat("hub: cannot link ", at));
  }
}

void Cache::mark_absent(const std::string& repo, const std::string& commit, const std::string& path) const {
  if (unsafe_path(path) || !is_commit(commit)) return;
  const std::string at = cat(repo_dir(repo), "/.no_exist/", commit, "/", path);
  make_folder(fs::path(at).parent_path().string());
  const UniqueFd fd(::open(at.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (!fd) throw_errno(Code::unavailable, cat("hub: cannot write ", at));
}

void Cache::publish(int fd, const std::string& partial, const std::string& blob) const {
  if (::fchmod(fd, 0666 & ~current_umask()) != 0 || ops_.fsync(fd) != 0 ||
      ops_.rename(partial.c_str(), blob.c_str()) != 0) {
    throw_errno(Code::unavailable, cat("hub: cannot finish ", blob));
  }
  sync_dir(fs::path(blob).parent_path().string(), ops_);
}

std::optional<UniqueFd> Cache::lock(const std::string& repo, const std::string& etag,
                                    const std::function<bool(int64_t)>& waiting) const {
  const std::string path = cat(hub_, "/.locks/", folder_name(repo), "/", etag, ".lock");
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0664));
  if (!fd) throw_errno(Code::unavailable, cat("hub: cannot open lock file ", path));
  const auto start = std::chrono::steady_clock::now();
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    // Without locks the unique name of our partial file and the rename at the end keep the cache right.
    if (errno != EWOULDBLOCK) return std::nullopt;
    const auto waited = std::chrono::steady_clock::now() - start;
    if (!waiting(std::chrono::duration_cast<std::chrono::seconds>(waited).count())) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return fd;
}

std::optional<std::string> Cache::elsewhere(const std::string& repo, const std::string& etag, int64_t size) const {
  std::error_code ec;
  const std::string own = folder_name(repo);
  for (const fs::directory_entry& entry : fs::directory_iterator(hub_, ec)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("models--") || name == own) continue;
    const std::string path = cat(entry.path().string(), "/blobs/", etag);
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_size == size && within_cache(path)) {
      return path;
    }
  }
  return std::nullopt;
}

void Cache::adopt(const std::string& from, const std::string& to) const {
  const auto source = real_path(from);
  if (!source) throw Error(Code::unavailable, cat("hub: ", from, " went away"));
  const std::string temporary = cat(to, ".", random_hex(4), ".tmp");
  if (::link(source->c_str(), temporary.c_str()) != 0) {
    copy_file(*source, to, ops_);
    return;
  }
  if (ops_.rename(temporary.c_str(), to.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary.c_str());
    errno = error;
    throw_errno(Code::unavailable, cat("hub: cannot link ", to));
  }
  // rename(2) of two names of one file does nothing, and leaves both.
  ::unlink(temporary.c_str());
}

Cache::Space Cache::space() const {
  fs::path folder = fs::absolute(hub_);
  struct statvfs info {};
  while (::statvfs(folder.c_str(), &info) != 0) {
    if (errno != ENOENT || folder == folder.root_path())
      throw_errno(Code::unavailable, cat("hub: cannot look at ", hub_));
    folder = folder.parent_path();
  }
  return {static_cast<int64_t>(info.f_bavail * info.f_frsize), static_cast<int64_t>(info.f_blocks * info.f_frsize)};
}

}  // namespace glm53::hub
