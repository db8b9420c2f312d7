// Whether a snapshot can be served: from its own index, never by counting files.
#include <algorithm>
#include <array>
#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "agent/hub/cache.h"
#include "agent/hub/client.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr uint64_t kMaxHeader = uint64_t{100} << 20;

/// Whole or nothing.
bool read_at(int fd, char* to, size_t n, off_t at) {
  while (n > 0) {
    const ssize_t got = ::pread(fd, to, n, at);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    at += got;
    n -= static_cast<size_t>(got);
  }
  return true;
}

std::set<std::string> needed(const std::string& dir, std::vector<std::string>& missing) {
  std::set<std::string> files{"config.json"};
  try {
    files.merge(parse_index(read_file(cat(dir, "/", kIndex), size_t{256} << 20), kIndex));
    files.insert(kIndex);
  } catch (const Error& e) {
    if (e.code() == Code::not_found) {
      files.insert("model.safetensors");
    } else {
      missing.push_back(e.what());
    }
  }
  return files;
}

}  // namespace

std::optional<std::string> safetensors_fault(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return "cannot be read";
  struct stat info {};
  std::array<char, 8> prefix{};
  if (::fstat(fd.get(), &info) != 0 || !read_at(fd.get(), prefix.data(), 8, 0)) return "is too short";
  uint64_t length = 0;
  for (size_t i = 8; i-- > 0;) length = length << 8 | static_cast<unsigned char>(prefix.at(i));
  const auto size = static_cast<uint64_t>(info.st_size);
  if (length < 2 || length > kMaxHeader || length > size - 8) return "has no valid header";
  std::string header(length, '\0');
  if (!read_at(fd.get(), header.data(), length, 8)) return "has no valid header";
  try {
    const nlohmann::ordered_json tensors = parse_json(header);
    if (!tensors.is_object()) return "has no valid header";
    uint64_t end = 0;
    for (const auto& [name, tensor] : tensors.items()) {
      if (name == "__metadata__") continue;
      end = std::max(end, tensor.at("data_offsets").at(1).get<uint64_t>());
    }
    if (end != size - 8 - length) return cat("should end at byte ", end + 8 + length, ", but has ", size);
  } catch (const std::exception&) {
    return "has no valid header";
  }
  return std::nullopt;
}

Completeness Cache::check(const std::string& repo, const std::string& commit,
                          const std::function<int64_t(const std::string&)>& size_of) const {
  Completeness result;
  const std::string dir = snapshot_dir(repo, commit);
  for (const std::string& file : needed(dir, result.missing)) {
    const std::string path = cat(dir, "/", file);
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) {
      result.missing.push_back(file + ": is missing");
      continue;
    }
    ++result.files;
    result.bytes += info.st_size;
    const int64_t size = size_of(file);
    if (size >= 0 && info.st_size != size) {
      result.missing.push_back(cat(file, ": has ", info.st_size, " bytes instead of ", size));
    } else if (file.ends_with(".safetensors")) {
      if (const auto fault = safetensors_fault(path)) result.missing.push_back(cat(file, ": ", *fault));
    }
  }
  return result;
}

}  // namespace glm53::hub
