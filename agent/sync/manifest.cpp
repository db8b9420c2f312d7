#include "agent/sync/manifest.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include "agent/hub/names.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::sync {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr size_t kMostFiles = 20'000, kMostRefs = 16;
constexpr int64_t kLargest = int64_t{1} << 44;  // of one file: 16 TiB
constexpr JsonLimits kLimits{.max_bytes = size_t{8} << 20, .max_depth = 6};

[[noreturn]] void refuse(const std::string& what) {
  throw Error(Code::usage, cat("sync: ", what));
}

std::string text(const Json& j, const char* name) {
  const auto it = j.find(name);
  if (it == j.end() || !it->is_string()) refuse(cat("the manifest has no text '", std::string_view(name), "'"));
  return it->get<std::string>();
}

const Json& list(const Json& j, const char* name, size_t most) {
  const auto it = j.find(name);
  if (it == j.end() || !it->is_array()) refuse(cat("the manifest has no list '", std::string_view(name), "'"));
  if (it->size() > most) refuse(cat("'", std::string_view(name), "' has more than ", most, " entries"));
  return *it;
}

hub::FileEntry parse_file(const Json& j) {
  if (!j.is_object()) refuse("a file of the manifest is no object");
  hub::FileEntry file;
  file.path = text(j, "path");
  file.etag = text(j, "etag");
  if (const auto why = hub::unsafe_path(file.path)) refuse(cat("a file of the manifest has an unsafe path: ", *why));
  if (!hub::is_etag(file.etag)) refuse(cat("'", file.path, "' has no digest"));
  const auto size = j.find("size");
  const bool fits = size != j.end() && size->is_number_integer() && *size >= 0 && *size <= kLargest;
  if (!fits) refuse(cat("the size of '", file.path, "' is out of bounds"));
  file.size = size->get<int64_t>();
  return file;
}

/// The files together: distinct paths, no file where a folder must be, one size a blob.
void check_files(const std::vector<hub::FileEntry>& files) {
  std::set<std::string> paths;
  std::map<std::string, int64_t> sizes;
  for (const hub::FileEntry& f : files) {
    if (!paths.insert(f.path).second) refuse(cat("the manifest names '", f.path, "' twice"));
    if (!sizes.emplace(f.etag, f.size).second && sizes.at(f.etag) != f.size)
      refuse(cat("the blob of '", f.path, "' has two sizes"));
  }
  for (const std::string& path : paths) {
    for (size_t at = path.find('/'); at != std::string::npos; at = path.find('/', at + 1)) {
      if (paths.contains(path.substr(0, at))) refuse(cat("'", path.substr(0, at), "' is a file and a folder"));
    }
  }
}

}  // namespace

int64_t Manifest::bytes() const {
  std::map<std::string, int64_t> sizes;
  int64_t sum = 0;
  for (const hub::FileEntry& f : files) {
    if (sizes.emplace(f.etag, f.size).second) sum += f.size;
  }
  return sum;
}

std::string to_json(const Manifest& manifest) {
  Manifest m = manifest;
  std::sort(m.files.begin(), m.files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  std::sort(m.refs.begin(), m.refs.end());
  Json files = Json::array();
  for (const hub::FileEntry& f : m.files) files.push_back({{"path", f.path}, {"etag", f.etag}, {"size", f.size}});
  return dump({{"version", 1}, {"repo", m.repo}, {"commit", m.commit}, {"refs", m.refs}, {"files", files}});
}

std::string digest_of(const Manifest& manifest) {
  return sha256_hex(to_json(manifest));
}

Manifest parse_manifest(std::string_view json) {
  const Json j = parse_json(json, kLimits);
  if (!j.is_object()) refuse("the manifest is no object");
  const auto version = j.find("version");
  if (version == j.end() || *version != 1) refuse("the manifest is of another version; the agents must be the same");
  Manifest m;
  m.repo = text(j, "repo");
  hub::check_repo_id(m.repo);
  m.commit = text(j, "commit");
  if (!hub::is_commit(m.commit)) refuse("'commit' must be 40 hex digits");
  for (const Json& ref : list(j, "refs", kMostRefs)) {
    if (!ref.is_string()) refuse("a ref is no text");
    hub::check_revision(ref.get<std::string>());
    if (hub::is_commit(ref.get<std::string>())) refuse("a ref must not look like a commit");
    m.refs.push_back(ref.get<std::string>());
  }
  for (const Json& file : list(j, "files", kMostFiles)) m.files.push_back(parse_file(file));
  if (m.files.empty()) refuse("the manifest has no files");
  check_files(m.files);
  return m;
}

Manifest manifest_of(const hub::Cache& cache, const std::string& repo, const std::string& commit) {
  Manifest m;
  m.repo = repo;
  m.commit = commit;
  const fs::path dir = cache.snapshot_dir(repo, commit);
  std::error_code ec;
  if (!fs::is_directory(dir, ec)) {
    throw Error(Code::not_found, cat("sync: ", repo, "@", commit, " is not in ", cache.hub()),
                cat("glm53ctl download ", repo, "@", commit));
  }
  for (auto it = fs::recursive_directory_iterator(dir); it != fs::recursive_directory_iterator(); ++it) {
    if (it->is_directory() && !it->is_symlink()) continue;
    const std::string path = it->path().lexically_relative(dir).generic_string();
    const auto etag = cache.etag_in_snapshot(repo, commit, path);
    const auto size = fs::file_size(it->path(), ec);
    if (!etag || ec || !cache.blob(repo, *etag, static_cast<int64_t>(size))) {
      throw Error(Code::corrupt, cat("sync: ", it->path().string(), " is no link to a blob of the cache"),
                  cat("glm53ctl download ", repo, "@", commit, " repairs it"));
    }
    m.files.push_back({path, static_cast<int64_t>(size), *etag});
  }
  std::sort(m.files.begin(), m.files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  check_files(m.files);
  if (cache.read_ref(repo, "main") == commit) m.refs.emplace_back("main");
  return m;
}

}  // namespace glm53::sync
