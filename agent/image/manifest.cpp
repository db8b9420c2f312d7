#include "agent/image/manifest.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

using Json = nlohmann::ordered_json;
constexpr int64_t kMaxBlob = int64_t{1} << 40;
constexpr size_t kMaxLayers = 128, kMaxEntries = 256;

[[noreturn]] void bad(const std::string& where, const std::string& what) {
  throw Error(Code::corrupt, cat("E651 image: ", where, ": ", what), "build it with scripts/make-image.sh");
}

Json parse(std::string_view bytes, const std::string& where) {
  if (bytes.size() > kMaxDocument) bad(where, cat("larger than ", kMaxDocument, " bytes"));
  try {
    Json json = parse_json(bytes, {.max_bytes = kMaxDocument, .max_depth = 32, .max_values = 1u << 17});
    if (!json.is_object()) bad(where, "no JSON object");
    return json;
  } catch (const Error& e) {
    if (e.code() == Code::corrupt) throw;
    bad(where, e.what());
  }
}

std::string text(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

Descriptor descriptor(const Json& json, const std::string& where) {
  if (!json.is_object()) bad(where, "a descriptor is no object");
  Descriptor d{text(json, "mediaType"), text(json, "digest"), -1};
  if (const auto size = json.find("size"); size != json.end() && size->is_number_integer()) {
    d.size = size->get<int64_t>();
  }
  if (!is_digest(d.digest)) bad(where, "a descriptor without a sha256 digest");
  if (d.size < 0 || d.size > kMaxBlob) bad(where, cat("no valid size for ", d.digest));
  return d;
}

const Json& array(const Json& object, const char* key, size_t most, const std::string& where) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array() || found->empty() || found->size() > most) {
    bad(where, cat("'", key, "' is no list of 1 to ", most));
  }
  return *found;
}

bool all(std::string_view part, std::string_view allowed) {
  return part.find_first_not_of(allowed) == std::string_view::npos;
}

constexpr std::string_view kLower = "abcdefghijklmnopqrstuvwxyz0123456789";
constexpr std::string_view kName = "abcdefghijklmnopqrstuvwxyz0123456789._-";
constexpr std::string_view kTag = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
constexpr std::string_view kHost = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-:[]";

bool valid_repository(std::string_view name) {
  if (name.empty() || name.size() > 255) return false;
  const auto parts = split(name, '/');
  return std::all_of(parts.begin(), parts.end(), [](const std::string& p) {
    return !p.empty() && all(p, kName) && kLower.find(p.front()) != std::string_view::npos &&
           kLower.find(p.back()) != std::string_view::npos && p.find("..") == std::string::npos;
  });
}

}  // namespace

bool is_digest(std::string_view t) {
  return t.size() == 71 && t.starts_with("sha256:") && all(t.substr(7), "0123456789abcdef");
}

std::string digest_of(std::string_view bytes) {
  return "sha256:" + sha256_hex(bytes);
}

std::string hex_of(const std::string& digest) {
  return digest.substr(7);
}

std::string Reference::scheme() const {
  const bool here = registry == "localhost" || registry.starts_with("localhost:") || registry.starts_with("127.") ||
                    registry.starts_with("[::1]");
  return here ? "http" : "https";
}

Reference parse_reference(std::string_view whole) {
  const auto fail = [&](std::string_view why) {
    throw Error(Code::usage, cat("'", whole.substr(0, 300), "' names no image: ", why),
                "REGISTRY/NAME@sha256:DIGEST or REGISTRY/NAME:TAG");
  };
  Reference r;
  std::string_view rest = whole;
  if (const size_t at = rest.find('@'); at != std::string_view::npos) {
    r.digest = rest.substr(at + 1);
    rest = rest.substr(0, at);
    if (!is_digest(r.digest)) fail("after the @ comes sha256: and 64 hex digits");
  }
  const size_t slash = rest.find('/');
  if (slash == std::string_view::npos) fail("it needs a registry");
  r.registry = rest.substr(0, slash);
  rest = rest.substr(slash + 1);
  if (const size_t colon = rest.find(':'); colon != std::string_view::npos) {
    r.tag = rest.substr(colon + 1);
    rest = rest.substr(0, colon);
    if (r.tag.empty() || r.tag.size() > 128 || !all(r.tag, kTag) || r.tag.front() == '.' || r.tag.front() == '-') {
      fail("the tag is none");
    }
  }
  r.repository = rest;
  if (r.registry.empty() || !all(r.registry, kHost) || r.registry.front() == '-' || r.registry.front() == ':') {
    fail("the registry is no host");
  }
  const bool host = r.registry.find_first_of(".:") != std::string::npos || r.registry == "localhost";
  if (!host) fail("it needs a registry, such as ghcr.io");
  if (!valid_repository(r.repository)) fail("the name has lower-case letters, digits, and . _ - between them");
  if (!r.digest.empty()) r.tag.clear();
  if (r.digest.empty() && r.tag.empty()) r.tag = "latest";
  return r;
}

Platform own_platform() {
#if defined(__aarch64__)
  return {"linux", "arm64"};
#else
  return {"linux", "amd64"};
#endif
}

Document parse_document(std::string_view bytes, const std::string& where) {
  const Json json = parse(bytes, where);
  if (const auto v = json.find("schemaVersion"); v == json.end() || *v != 2) bad(where, "schemaVersion is not 2");
  const std::string type = text(json, "mediaType");
  const bool listed = json.contains("manifests"), single = json.contains("layers");
  // A document that is both would mean one thing to us and another to somebody else.
  if (listed == single) bad(where, "neither an image nor an index");
  Document d;
  if (listed) {
    if (!type.empty() && type != kIndexType && type != kDockerIndexType) bad(where, cat("an index of type ", type));
    for (const Json& item : array(json, "manifests", kMaxEntries, where)) {
      IndexEntry entry{descriptor(item, where), std::nullopt};
      if (const auto p = item.find("platform"); p != item.end() && p->is_object()) {
        entry.platform = Platform{text(*p, "os"), text(*p, "architecture")};
      }
      d.index.push_back(std::move(entry));
    }
    return d;
  }
  if (!type.empty() && type != kManifestType && type != kDockerManifestType) bad(where, cat("an image of type ", type));
  Manifest m;
  const auto config = json.find("config");
  if (config == json.end()) bad(where, "no config");
  m.config = descriptor(*config, where);
  if (m.config.size > static_cast<int64_t>(kMaxDocument)) bad(where, "the config is too large");
  for (const Json& item : array(json, "layers", kMaxLayers, where)) m.layers.push_back(descriptor(item, where));
  d.manifest = std::move(m);
  return d;
}

const IndexEntry& choose(const std::vector<IndexEntry>& index, const Platform& platform, const std::string& where) {
  std::string there;
  const IndexEntry* found = nullptr;
  for (const IndexEntry& entry : index) {
    if (entry.platform) there += cat(there.empty() ? "" : ", ", entry.platform->os, "/", entry.platform->architecture);
    if (found == nullptr && entry.platform == platform) found = &entry;
  }
  if (found == nullptr && index.size() == 1 && !index.front().platform) found = &index.front();
  if (found != nullptr) return *found;
  throw Error(Code::not_found,
              cat("E652 image: ", where, " has nothing for ", platform.os, "/", platform.architecture, ", only for ",
                  there.empty() ? "no named platform" : there.substr(0, 300)),
              "install an image made for this machine");
}

ImageConfig parse_config(std::string_view bytes, size_t layers, const std::string& where) {
  const Json json = parse(bytes, where);
  ImageConfig c;
  c.platform = {text(json, "os"), text(json, "architecture")};
  const auto rootfs = json.find("rootfs");
  if (rootfs == json.end() || !rootfs->is_object()) bad(where, "no rootfs");
  for (const Json& id : array(*rootfs, "diff_ids", kMaxLayers, where)) {
    if (!id.is_string() || !is_digest(id.get_ref<const std::string&>())) bad(where, "a diff id is no sha256 digest");
    c.diff_ids.push_back(id.get<std::string>());
  }
  if (c.diff_ids.size() != layers) bad(where, cat(c.diff_ids.size(), " diff ids for ", layers, " layers"));
  if (const auto inner = json.find("config"); inner != json.end() && inner->is_object()) {
    if (const auto labels = inner->find("Labels"); labels != inner->end() && labels->is_object()) {
      c.version = text(*labels, "org.opencontainers.image.version").substr(0, 200);
    }
  }
  return c;
}

Packing packing_of(const std::string& type) {
  constexpr std::string_view kOci = "application/vnd.oci.image.layer.v1.tar";
  if (type == kOci) return Packing::tar;
  if (type == cat(kOci, "+gzip") || type == "application/vnd.docker.image.rootfs.diff.tar.gzip") return Packing::gzip;
  if (type == cat(kOci, "+zstd")) return Packing::zstd;
  bad(cat("layer of type '", type.substr(0, 120), "'"), "only tar, tar+gzip and tar+zstd are unpacked");
}

}  // namespace glm53::image
