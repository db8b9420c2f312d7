#include "agent/image/tree.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"

namespace glm53::image {

namespace fs = std::filesystem;

std::string hash_file(const std::string& path, const std::function<void()>& check) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) {
    if (errno == ENOENT) return {};
    throw_errno(Code::unavailable, cat("image: cannot read ", path));
  }
  Sha256 hash;
  std::string buffer(size_t{1} << 20, '\0');
  while (true) {
    check();
    const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, cat("image: cannot read ", path));
    if (n == 0) return "sha256:" + hash.hex();
    hash.update({buffer.data(), static_cast<size_t>(n)});
  }
}

std::vector<TreeEntry> list_tree(const std::string& root, const std::function<void()>& check) {
  std::vector<TreeEntry> all;
  for (const auto& item : fs::recursive_directory_iterator(root)) {
    TreeEntry e;
    e.path = item.path().lexically_relative(root).string();
    const fs::file_status status = item.symlink_status();
    if (fs::is_symlink(status)) {
      e.kind = "link";
      e.content = fs::read_symlink(item.path()).string();
    } else if (fs::is_directory(status)) {
      e.kind = "folder";
    } else {
      const bool program = (status.permissions() & fs::perms::owner_exec) != fs::perms::none;
      e.kind = fs::is_regular_file(status) ? (program ? "program" : "file") : "device";
      e.size = static_cast<int64_t>(item.file_size());
      e.content = hash_file(item.path().string(), check);
    }
    all.push_back(std::move(e));
  }
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace glm53::image
