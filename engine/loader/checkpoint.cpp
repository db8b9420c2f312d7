#include <filesystem>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/loader/json_text.h"
#include "engine/loader/safetensors.h"

namespace glm53 {
namespace {

constexpr std::string_view kIndex = "model.safetensors.index.json";
constexpr std::string_view kSingle = "model.safetensors";
constexpr size_t kMaxListed = 20;  // names in one message

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

std::string listed(const std::vector<std::string>& names) {
  const size_t shown = std::min(names.size(), kMaxListed);
  std::string out = join(std::span(names).first(shown), ", ");
  if (shown < names.size()) out += cat(" and ", names.size() - shown, " more");
  return out;
}

/// Tensor to shard file, as the index says. A shard is a plain file name, so an index cannot reach out of its folder.
std::map<std::string, std::string> read_index(const std::string& text, const std::string& path) {
  const nlohmann::json json = parse_json_object(text, path, Code::weights);
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty())
    throw Error(Code::weights, cat(path, ": \"weight_map\" is missing, empty or not an object"),
                "the index is damaged; download it again");
  std::map<std::string, std::string> out;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos)
      throw Error(Code::weights, cat(path, ": tensor ", tensor, " is not placed in a plain file name"),
                  "shards lie beside the index");
    out.emplace(tensor, name);
  }
  return out;
}

}  // namespace

struct Checkpoint::Impl {
  std::string dir, digest;
  std::map<std::string, SafetensorsFile, std::less<>> files;
  std::map<std::string, TensorInfo, std::less<>> tensors;

  void open_files(const std::set<std::string>& names) {
    std::vector<std::string> missing;
    for (const std::string& name : names)
      if (!exists(cat(dir, "/", name))) missing.push_back(name);
    if (!missing.empty())
      throw Error(Code::weights,
                  cat(dir, ": ", missing.size(), " of ", names.size(), " shards are missing: ", listed(missing)),
                  "download the model again; complete files are kept");
    for (const std::string& name : names) files.emplace(name, SafetensorsFile(cat(dir, "/", name)));
  }

  void collect_tensors() {
    for (const auto& [name, file] : files) {
      for (const auto& [tensor, info] : file.tensors()) {
        const auto [at, added] = tensors.emplace(tensor, info);
        if (!added)
          throw Error(Code::weights, cat(dir, ": tensor ", tensor, " is in ", at->second.file, " and in ", name),
                      "a tensor has one shard");
      }
    }
  }

  void check_index(const std::map<std::string, std::string>& index) const {
    for (const auto& [tensor, file] : index) {
      const auto at = tensors.find(tensor);
      if (at == tensors.end() || at->second.file != file)
        throw Error(Code::weights,
                    cat(dir, "/", kIndex, ": tensor ", tensor, " is not in ", file,
                        at == tensors.end() ? std::string() : cat(" but in ", at->second.file)),
                    "index and shards belong to different revisions; download the model again");
    }
    for (const auto& [tensor, info] : tensors)
      if (!index.contains(tensor))
        throw Error(Code::weights, cat(dir, "/", kIndex, ": does not name tensor ", tensor, " of ", info.file),
                    "index and shards belong to different revisions; download the model again");
  }

  void digest_headers(std::string_view index_text) {
    Sha256 sha;
    sha.update(cat("index ", index_text.size(), "\n"));
    sha.update(index_text);
    for (const auto& [name, file] : files) {
      sha.update(cat(name, " ", file.header().size(), "\n"));
      sha.update(file.header());
    }
    digest = sha.hex();
  }
};

Checkpoint::Checkpoint(const std::string& dir) : impl_(std::make_unique<Impl>()) {
  impl_->dir = dir;
  const std::string index_path = cat(dir, "/", kIndex);
  if (exists(index_path)) {
    const std::string text = read_file(index_path, size_t{1} << 28);
    const auto index = read_index(text, index_path);
    std::set<std::string> names;
    for (const auto& entry : index) names.insert(entry.second);
    impl_->open_files(names);
    impl_->collect_tensors();
    impl_->check_index(index);
    impl_->digest_headers(text);
    return;
  }
  if (!exists(cat(dir, "/", kSingle)))
    throw Error(Code::weights, cat(dir, ": neither ", kIndex, " nor ", kSingle, " is there"),
                "model.path must name a checkpoint folder");
  impl_->open_files({std::string(kSingle)});
  impl_->collect_tensors();
  impl_->digest_headers("");
}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const std::map<std::string, TensorInfo, std::less<>>& Checkpoint::tensors() const {
  return impl_->tensors;
}
bool Checkpoint::has(std::string_view name) const {
  return impl_->tensors.contains(name);
}
const std::string& Checkpoint::digest() const {
  return impl_->digest;
}
const std::string& Checkpoint::dir() const {
  return impl_->dir;
}

const TensorInfo& Checkpoint::info(std::string_view name) const {
  const auto at = impl_->tensors.find(name);
  if (at == impl_->tensors.end()) throw Error(Code::weights, cat(impl_->dir, ": no tensor ", name));
  return at->second;
}
std::span<const std::byte> Checkpoint::bytes(std::string_view name) const {
  const TensorInfo& found = info(name);
  return impl_->files.find(found.file)->second.bytes(found);
}
Tensor Checkpoint::view(std::string_view name) const {
  return impl_->files.find(info(name).file)->second.view(name);
}

}  // namespace glm53
