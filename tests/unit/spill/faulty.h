// A file system that refuses on purpose, and records to store.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "common/digest.h"
#include "common/file.h"
#include "engine/spill/spill_disk.h"

namespace glm53::spill::test {

class Faulty : public FileOps {
 public:
  std::atomic<int64_t> room{std::numeric_limits<int64_t>::max()};  ///< bytes that can still be written
  std::atomic<int> write_error{ENOSPC};
  std::atomic<int> read_error{0}, sync_error{0};
  std::atomic<size_t> most{std::numeric_limits<size_t>::max()};  ///< taken by one call

  ssize_t pwrite(int fd, const void* data, size_t n, int64_t offset) override {
    n = std::min(n, most.load());
    if (room <= 0) {
      errno = write_error;
      return -1;
    }
    // As a disk that fills up does: it takes what fits first.
    n = std::min(n, static_cast<size_t>(room.load()));
    room -= static_cast<int64_t>(n);
    return FileOps::pwrite(fd, data, n, offset);
  }
  ssize_t pread(int fd, void* data, size_t n, int64_t offset) override {
    if (read_error != 0) {
      errno = read_error;
      return -1;
    }
    return FileOps::pread(fd, data, std::min(n, most.load()), offset);
  }
  int fdatasync(int fd) override {
    if (sync_error == 0) return FileOps::fdatasync(fd);
    errno = sync_error;
    return -1;
  }
};

inline Meta meta_of(int number, Kind kind = Kind::block) {
  Meta m;
  m.name.kind = kind;
  std::memcpy(m.name.hash.data(), &number, sizeof number);
  m.cls = kind == Kind::snapshot ? 3 : 0;
  m.position = 64 * (number + 1);
  for (int t = 0; t < kTokens; ++t) m.tokens[static_cast<size_t>(t)] = number * kTokens + t;
  return m;
}

inline std::vector<std::byte> payload_of(int number, size_t bytes) {
  std::vector<std::byte> out(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(static_cast<size_t>(number) * 7 + i * 13);
  return out;
}

inline DiskOptions disk_options(const std::string& dir, uint64_t bytes, uint64_t record) {
  return {.dir = dir, .name_space = sha256_hex("one model"), .bytes = bytes, .largest_record = record};
}

}  // namespace glm53::spill::test
