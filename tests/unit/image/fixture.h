// Images made by hand, good and bad ones.
#pragma once

#include <string>
#include <vector>

#include "agent/image/store.h"
#include "tests/temp_dir.h"

namespace glm53::image::test {

using glm53::test::TempDir;

/// A member of a tar; every field is taken as it is.
struct Member {
  std::string name, content;
  char type = '0';  ///< '0' file, '1' hard link, '2' link, '3' device, '5' folder
  std::string target = {};
  int mode = 0644;
};
/// A ustar archive of the members, with its end; `end` false leaves it out.
std::string make_tar(const std::vector<Member>& members, bool end = true);
std::string gzip(const std::string& bytes);

/// An image in blobs: the layers' tars are packed with gzip when `packed`.
struct Made {
  std::string digest;  ///< of the manifest
  std::vector<std::pair<std::string, std::string>> blobs;
};
Made make_image(const std::vector<std::string>& tars, bool packed = true, const std::string& architecture = {});
/// A tar with a program that answers as an engine does.
std::string engine_tar(const std::string& version);
/// Into the store as if it had been pulled.
void put(const Store& store, const Made& image);

}  // namespace glm53::image::test
