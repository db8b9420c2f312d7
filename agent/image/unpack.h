// Layers of an image -> a folder. The content is somebody else's: nothing is written outside the folder, no link leads
// out of it, no device, no setuid file, and there are limits to what comes out of a small file.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>

#include "agent/image/manifest.h"
#include "common/file.h"

namespace glm53::image {

struct UnpackLimits {
  int64_t entries = 200'000;
  int64_t bytes = int64_t{32} << 30;  ///< of all tars, uncompressed
  int64_t ratio = 64;                 ///< a tar may be so many times larger than its blob, beyond the first 64 MiB
};

/// Unpacks layers, lowest first, into one empty folder that nobody else writes to.
class Unpacker {
 public:
  Unpacker(
      std::string root, UnpackLimits limits, std::function<void()> check = [] {});
  /// Returns the digest of the uncompressed tar. Throws Error(corrupt) E653 for hostile or damaged content,
  /// Error(unavailable) E640 when the disk is full; `check` is called now and then and may throw.
  std::string layer(const std::string& path, Packing packing);
  /// Makes the folders durable (files are already).
  void sync() const;

 private:
  struct Entry;
  void extract(const Entry& entry);
  void whiteout(const std::string& path);
  UniqueFd parent_of(const std::string& path, bool create) const;
  void make_room(int parent, const std::string& name, const std::string& path, bool folder);

  const std::string root_;
  const UnpackLimits limits_;
  const std::function<void()> check_;
  UniqueFd fd_;
  int64_t entries_ = 0, bytes_ = 0;
  std::set<std::string, std::less<>> fresh_;  ///< paths of the layer at work; whiteouts do not reach them
};

/// Why an entry's name cannot be used, "" when it can. A leading "./" and a trailing '/' are taken off first.
std::string unsafe_entry(std::string& name);
/// True when a symbolic link at `path` to `target` stays below the folder: relative, ".." only at the start, and no
/// more of them than folders above the link.
bool link_stays_inside(const std::string& path, const std::string& target);

}  // namespace glm53::image
