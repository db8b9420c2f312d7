// The digest that names a blob: sha256 of the content, or git's sha1 of "blob SIZE\0" and the content.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace glm53::hub {

class BlobHash {
 public:
  /// `digits` of the etag: 64 for sha256, 40 for git-sha1, which covers the size.
  BlobHash(size_t digits, int64_t size);
  ~BlobHash();
  void update(std::string_view data);
  std::string hex();  ///< finishes

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
std::string hash_of(std::string_view content, size_t digits);

}  // namespace glm53::hub
