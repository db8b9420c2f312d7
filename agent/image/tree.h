// The files of an unpacked bundle, for a check later, and digests of files.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace glm53::image {

struct TreeEntry {
  std::string path;     ///< relative
  std::string kind;     ///< "file", "program" (executable), "link" or "folder"
  int64_t size = 0;     ///< of a file
  std::string content;  ///< digest of a file, target of a link
  auto operator<=>(const TreeEntry&) const = default;
};
/// Sorted. Links are not followed.
std::vector<TreeEntry> list_tree(const std::string& root, const std::function<void()>& check);

/// "sha256:…" of a file; `check` now and then, it may throw. "" when there is no such file.
std::string hash_file(const std::string& path, const std::function<void()>& check);

}  // namespace glm53::image
