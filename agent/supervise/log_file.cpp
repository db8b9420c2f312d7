#include "agent/supervise/log_file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <system_error>
#include <unistd.h>

#include <sys/stat.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::supervise {
namespace {

namespace fs = std::filesystem;
constexpr size_t kChunk = 64 * 1024;
/// Bytes a reader takes at a time, and the most a tail looks back within one piece.
constexpr uint64_t kMostBytes = 4u << 20;

std::string piece(const std::string& path, int n) {
  return n == 0 ? path : cat(path, ".", n);
}

/// Copies from `from` until its end was reached; returns the bytes copied.
uint64_t copy_all(int from, int to, const std::string& what) {
  std::vector<char> buffer(kChunk);
  uint64_t at = 0;
  while (true) {
    const ssize_t n = ::pread(from, buffer.data(), buffer.size(), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, "cannot read " + what);
    if (n == 0) return at;
    for (ssize_t done = 0; done < n;) {
      const ssize_t w = ::write(to, buffer.data() + done, static_cast<size_t>(n - done));
      if (w < 0 && errno == EINTR) continue;
      if (w < 0) throw_errno(Code::unavailable, "cannot copy " + what);
      done += w;
    }
    at += static_cast<uint64_t>(n);
  }
}

/// Bytes [begin, end) of a file; less when it is shorter, empty when it is missing.
std::string read_range(const std::string& path, uint64_t begin, uint64_t end) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::string out;
  if (!fd || end <= begin) return out;
  out.resize(static_cast<size_t>(end - begin));
  size_t have = 0;
  while (have < out.size()) {
    const ssize_t n = ::pread(fd.get(), out.data() + have, out.size() - have, static_cast<off_t>(begin + have));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    have += static_cast<size_t>(n);
  }
  out.resize(have);
  return out;
}

/// Tells one rotated piece from another; empty when there is none.
std::string identity(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0) return {};
  return cat(static_cast<uint64_t>(st.st_ino), ":", static_cast<int64_t>(st.st_size), ":",
             static_cast<int64_t>(st.st_mtim.tv_sec), ".", static_cast<int64_t>(st.st_mtim.tv_nsec));
}

/// Start of the last `lines` lines of `text` (which ends with a newline); `found` counts those there are.
size_t start_of_last(const std::string& text, int lines, int& found) {
  found = 0;
  size_t at = text.size();
  while (at > 0 && found < lines) {
    const size_t newline = at < 2 ? std::string::npos : text.rfind('\n', at - 2);
    at = newline == std::string::npos ? 0 : newline + 1;
    ++found;
  }
  return at;
}

}  // namespace

std::string log_path(const std::string& dir, std::string_view process, uint64_t generation) {
  return cat(dir, "/", process, "/gen-", generation, ".log");
}

UniqueFd open_log(const std::string& path) {
  make_dirs(fs::path(path).parent_path().string(), 0750);
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640));
  if (!fd) throw_errno(Code::unavailable, "cannot write log " + path);
  return fd;
}

uint64_t log_size(const std::string& path) {
  std::error_code ec;
  const auto size = fs::file_size(path, ec);
  return ec ? 0 : size;
}

bool rotate_log(const std::string& path, uint64_t max_bytes) {
  if (log_size(path) <= max_bytes) return false;
  const std::string copy = path + ".new";
  const UniqueFd from(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!from) throw_errno(Code::unavailable, "cannot open log " + path);
  const UniqueFd to(::open(copy.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0640));
  if (!to) throw_errno(Code::unavailable, "cannot write " + copy);
  try {
    copy_all(from.get(), to.get(), path);
  } catch (const Error&) {
    ::unlink(copy.c_str());
    throw;
  }
  std::error_code ec;
  for (int n = kLogPieces - 1; n >= 1; --n) fs::rename(piece(path, n), piece(path, n + 1), ec);
  fs::rename(copy, piece(path, 1), ec);
  if (ec) throw Error(Code::unavailable, cat("cannot rotate ", path, ": ", ec.message()));
  if (::ftruncate(from.get(), 0) != 0) throw_errno(Code::unavailable, "cannot truncate " + path);
  return true;
}

std::vector<uint64_t> log_generations(const std::string& dir, std::string_view process) {
  std::vector<uint64_t> found;
  std::error_code ec;
  for (const auto& entry : fs::directory_iterator(cat(dir, "/", process), ec)) {
    const std::string file = entry.path().filename().string();
    if (!file.starts_with("gen-") || !file.ends_with(".log")) continue;
    const auto n = parse_int(std::string_view(file).substr(4, file.size() - 8));
    if (n && *n >= 0) found.push_back(static_cast<uint64_t>(*n));
  }
  std::sort(found.begin(), found.end());
  return found;
}

void prune_logs(const std::string& dir, std::string_view process, int keep) {
  const auto all = log_generations(dir, process);
  std::error_code ec;
  for (size_t i = 0; i + static_cast<size_t>(std::max(keep, 1)) < all.size(); ++i) {
    const std::string path = log_path(dir, process, all[i]);
    for (int n = 0; n <= kLogPieces; ++n) fs::remove(piece(path, n), ec);
  }
}

std::string LogReader::tail(int lines) {
  std::string out;
  int left = std::max(lines, 0);
  piece_ = identity(piece(path_, 1));
  offset_ = log_size(path_);
  for (int n = 0; n <= kLogPieces && left > 0; ++n) {
    const uint64_t size = n == 0 ? offset_ : log_size(piece(path_, n));
    if (n > 0 && size == 0) break;
    std::string text = read_range(piece(path_, n), size > kMostBytes ? size - kMostBytes : 0, size);
    const size_t whole = text.rfind('\n');
    if (n == 0) {
      // An unfinished line is left to read_new().
      const size_t keep = whole == std::string::npos ? 0 : whole + 1;
      offset_ = size - (text.size() - keep);
      text.resize(keep);
    }
    int found = 0;
    const size_t start = start_of_last(text, left, found);
    out.insert(0, text, start);
    left -= found;
  }
  return out;
}

std::string LogReader::read_new() {
  std::string out;
  uint64_t size = log_size(path_);
  if (const std::string now = identity(piece(path_, 1)); now != piece_ || size < offset_) {
    const uint64_t rotated = log_size(piece(path_, 1));
    // Copied, but not truncated yet: the next call will see it done.
    if (now != piece_ && size >= rotated && size >= offset_) return out;
    // The rest of what we were reading is in piece 1.
    out = read_range(piece(path_, 1), offset_, rotated);
    piece_ = now;
    offset_ = 0;
    size = log_size(path_);
  }
  std::string text = read_range(path_, offset_, std::min(size, offset_ + kMostBytes));
  const size_t whole = text.rfind('\n');
  if (whole == std::string::npos) {
    // A line longer than the largest read is passed on in pieces.
    if (text.size() < kMostBytes) return out;
  } else {
    text.resize(whole + 1);
  }
  offset_ += text.size();
  return out + text;
}

}  // namespace glm53::supervise
