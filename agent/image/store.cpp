#include "agent/image/store.h"

#include <algorithm>
#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <set>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "agent/image/tree.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string text(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

int64_t number(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

std::optional<Json> read_json(const std::string& path) {
  try {
    Json json = parse_json(read_file(path, size_t{64} << 20));
    if (json.is_object()) return json;
  } catch (const Error& e) {
    if (e.code() == Code::not_found) return std::nullopt;
    throw Error(Code::corrupt, cat("E656 image: ", path, ": ", e.what()), "remove it and install the image again");
  }
  throw Error(Code::corrupt, cat("E656 image: ", path, " is no record"), "remove it and install the image again");
}

/// Active and previous digest, "" for none.
std::pair<std::string, std::string> read_active(const std::string& dir) {
  const auto json = read_json(dir + "/active.json");
  if (!json) return {};
  std::string now = text(*json, "active"), before = text(*json, "previous");
  if (!is_digest(now)) now.clear();
  if (!is_digest(before)) before.clear();
  return {now, before};
}

void sync_folder(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd || ::fsync(fd.get()) != 0) throw_errno(Code::unavailable, cat("image: cannot make ", path, " durable"));
}

void remove(const std::string& path) {
  std::error_code failed;
  fs::remove_all(path, failed);
  if (failed) throw Error(Code::unavailable, cat("image: cannot remove ", path, ": ", failed.message()));
}

/// True when a process of this machine runs something below `folder`.
bool in_use(const std::string& folder) {
  std::error_code ignored;
  for (const auto& process : fs::directory_iterator("/proc", ignored)) {
    const std::string program = fs::read_symlink(process.path() / "exe", ignored).string();
    if (program.starts_with(folder + "/")) return true;
  }
  return false;
}

}  // namespace

std::optional<std::string> active_program(const std::string& dir) {
  const std::string digest = read_active(dir).first;
  if (digest.empty()) return std::nullopt;
  return cat(dir, "/bundles/", hex_of(digest), "/glm53-engine");
}

Store::Store(StoreOptions options) : options_(std::move(options)) {
  if (!options_.self_check) options_.self_check = run_self_check;
  make_dirs(options_.dir + "/blobs/sha256");
  make_dirs(options_.dir + "/bundles");
  auto lock = try_lock(options_.dir + "/lock");
  if (!lock) {
    throw Error(Code::busy, cat("E655 image: somebody else works on ", options_.dir), "wait until that is done");
  }
  lock_ = std::move(*lock);
}

std::string Store::blob_path(const std::string& digest) const {
  return cat(options_.dir, "/blobs/sha256/", hex_of(digest));
}

std::string Store::bundle_path(const std::string& digest) const {
  return cat(options_.dir, "/bundles/", hex_of(digest));
}

bool Store::has_blob(const Descriptor& blob) const {
  std::error_code none;
  return static_cast<int64_t>(fs::file_size(blob_path(blob.digest), none)) == blob.size && !none;
}

void Store::put_document(const std::string& digest, std::string_view bytes) {
  write_file(blob_path(digest), bytes);
}

std::string Store::document(const std::string& digest) const {
  std::string bytes = read_file(blob_path(digest), kMaxDocument);
  if (digest_of(bytes) != digest) {
    throw Error(Code::corrupt, cat("E650 image: ", blob_path(digest), " does not match its digest"),
                "install the image again");
  }
  return bytes;
}

std::pair<std::string, Manifest> Store::image_of(const std::string& digest) const {
  Document d = parse_document(document(digest), digest);
  if (d.manifest) return {digest, std::move(*d.manifest)};
  const std::string own = choose(d.index, options_.platform, digest).descriptor.digest;
  d = parse_document(document(own), own);
  if (!d.manifest) throw Error(Code::corrupt, cat("E651 image: ", digest, ": an index within an index"));
  return {own, std::move(*d.manifest)};
}

Bundle Store::install(const std::string& asked, const std::string& ref) {
  const auto [digest, manifest] = image_of(asked);
  if (auto there = read(digest)) return *there;
  const ImageConfig config = parse_config(document(manifest.config.digest), manifest.layers.size(), digest);
  if (config.platform != options_.platform) {
    throw Error(Code::config,
                cat("E652 image: ", digest, " is made for ", config.platform.os, "/", config.platform.architecture),
                "install an image made for this machine");
  }
  const std::string folder = bundle_path(digest), fresh = folder + ".new";
  remove(fresh);
  remove(folder);  // without a record it is none
  make_dirs(fresh);
  try {
    Unpacker unpacker(fresh, options_.limits, options_.check);
    for (size_t i = 0; i < manifest.layers.size(); ++i) {
      const Descriptor& layer = manifest.layers[i];
      const std::string got = unpacker.layer(blob_path(layer.digest), packing_of(layer.media_type));
      if (got != config.diff_ids[i]) {
        throw Error(Code::corrupt,
                    cat("E650 image: layer ", layer.digest, " unpacks to ", got, ", not ", config.diff_ids[i]));
      }
    }
    unpacker.sync();
    const std::string version = options_.self_check(fresh);
    Json record{{"digest", digest}, {"asked", asked}, {"ref", ref}, {"version", version}, {"label", config.version}};
    record["installed_at"] =
        std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
            .count();
    int64_t bytes = 0;
    Json& files = record["files"] = Json::array();
    for (const TreeEntry& f : list_tree(fresh, options_.check)) {
      bytes += f.size;
      files.push_back(Json::array({f.path, f.kind, f.size, f.content}));
    }
    record["bytes"] = bytes;
    if (::rename(fresh.c_str(), folder.c_str()) != 0)
      throw_errno(Code::unavailable, cat("image: cannot make ", folder));
    sync_folder(options_.dir + "/bundles");
    write_file(folder + ".json", dump(record));  // from here on it is installed
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(fresh, ignored);
    throw;
  }
  return *read(digest);
}

std::optional<Bundle> Store::read(const std::string& digest) const {
  const std::string folder = bundle_path(digest);
  const auto json = read_json(folder + ".json");
  if (!json) return std::nullopt;
  std::error_code none;
  if (!fs::is_directory(folder, none)) return std::nullopt;
  Bundle b{digest, text(*json, "asked"), text(*json, "ref"), text(*json, "version"), folder};
  b.bytes = number(*json, "bytes");
  b.installed_at = number(*json, "installed_at");
  const auto [now, before] = active();
  b.active = now == digest;
  b.previous = before == digest;
  return b;
}

std::vector<Bundle> Store::list() const {
  std::vector<Bundle> all;
  for (const auto& item : fs::directory_iterator(options_.dir + "/bundles")) {
    const std::string digest = "sha256:" + item.path().stem().string();
    if (item.path().extension() != ".json" || !is_digest(digest)) continue;
    if (auto bundle = read(digest)) all.push_back(std::move(*bundle));
  }
  std::sort(all.begin(), all.end(), [](const Bundle& a, const Bundle& b) {
    return std::pair(a.installed_at, a.digest) < std::pair(b.installed_at, b.digest);
  });
  return all;
}

Bundle Store::find(std::string_view name) const {
  if (const size_t at = name.find('@'); at != std::string_view::npos) name = name.substr(at + 1);
  const std::string want = name.starts_with("sha256:") ? std::string(name) : cat("sha256:", name);
  std::vector<Bundle> matches;
  for (Bundle& b : list()) {
    if (b.digest == want || b.asked == want) return b;
    if (b.digest.starts_with(want) && want.size() >= 11) matches.push_back(std::move(b));
  }
  if (matches.size() == 1) return matches.front();
  if (matches.empty()) {
    throw Error(Code::not_found, cat("E657 image: no installed bundle is ", name.substr(0, 100)),
                "glm53ctl engine list");
  }
  throw Error(Code::usage, cat("several installed bundles begin with ", name), "give more digits");
}

std::pair<std::string, std::string> Store::active() const {
  return read_active(options_.dir);
}

void Store::set_active(const std::string& now, const std::string& before) {
  write_file(options_.dir + "/active.json", dump(Json{{"active", now}, {"previous", before}}));
}

Bundle Store::use(std::string_view name) {
  const Bundle bundle = find(name);
  const auto [now, before] = active();
  if (now != bundle.digest) set_active(bundle.digest, now);
  return find(bundle.digest);
}

Bundle Store::rollback() {
  const auto [now, before] = active();
  if (before.empty()) {
    throw Error(Code::not_found, "E657 image: there is no bundle before the active one", "glm53ctl engine list");
  }
  const Bundle bundle = find(before);
  set_active(bundle.digest, now);
  return find(bundle.digest);
}

std::vector<Finding> Store::verify(std::string_view name) const {
  std::vector<Finding> findings;
  for (const Bundle& b : name.empty() ? list() : std::vector<Bundle>{find(name)}) {
    const auto say = [&](const std::string& what) { findings.push_back({b.digest, what}); };
    try {
      const Manifest manifest = image_of(b.digest).second;
      std::vector<Descriptor> blobs = manifest.layers;
      blobs.push_back(manifest.config);
      for (const Descriptor& blob : blobs) {
        if (!has_blob(blob) || hash_file(blob_path(blob.digest), options_.check) != blob.digest) {
          say(cat("blob ", blob.digest, " is missing or damaged"));
        }
      }
    } catch (const Error& e) {
      if (e.code() == Code::cancelled) throw;
      say(e.what());
    }
    std::set<TreeEntry> want;
    const auto record = read_json(b.path + ".json");
    for (const Json& f : record->value("files", Json::array())) {
      if (f.is_array() && f.size() == 4 && f[0].is_string() && f[1].is_string() && f[2].is_number_integer() &&
          f[3].is_string()) {
        want.insert({f[0].get<std::string>(), f[1].get<std::string>(), f[2].get<int64_t>(), f[3].get<std::string>()});
      }
    }
    for (const TreeEntry& f : list_tree(b.path, options_.check)) {
      if (want.erase(f) == 0) say(cat(f.path, " was changed or added"));
    }
    for (const TreeEntry& f : want) say(cat(f.path, " is missing or was changed"));
  }
  return findings;
}

int64_t Store::gc() {
  int64_t freed = 0;
  std::set<std::string> keep;
  for (const Bundle& b : list()) {
    if (!b.active && !b.previous && !in_use(b.path)) {
      freed += b.bytes;
      remove(b.path + ".json");  // first: without a record the folder is none
      remove(b.path);
      continue;
    }
    keep.insert({b.digest, b.asked});
    const Manifest manifest = image_of(b.digest).second;
    keep.insert(manifest.config.digest);
    for (const Descriptor& layer : manifest.layers) keep.insert(layer.digest);
  }
  std::vector<fs::path> gone;
  for (const auto& item : fs::directory_iterator(options_.dir + "/blobs/sha256")) {
    if (!keep.contains("sha256:" + item.path().filename().string())) gone.push_back(item.path());
  }
  for (const auto& item : fs::directory_iterator(options_.dir + "/bundles")) {
    if (!keep.contains("sha256:" + item.path().stem().string())) gone.push_back(item.path());
  }
  for (const fs::path& path : gone) {
    std::error_code none;
    if (fs::is_regular_file(path, none)) freed += static_cast<int64_t>(fs::file_size(path, none));
    remove(path.string());
  }
  return freed;
}

}  // namespace glm53::image
