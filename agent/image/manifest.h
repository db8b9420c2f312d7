// OCI names and documents: references, digests, manifests, indexes, configurations. Everything a registry or a file
// says is checked here before it is used. Format: OCI image specification 1.1, Docker image manifest 2.2.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::image {

inline constexpr const char* kManifestType = "application/vnd.oci.image.manifest.v1+json";
inline constexpr const char* kIndexType = "application/vnd.oci.image.index.v1+json";
inline constexpr const char* kDockerManifestType = "application/vnd.docker.distribution.manifest.v2+json";
inline constexpr const char* kDockerIndexType = "application/vnd.docker.distribution.manifest.list.v2+json";
inline constexpr size_t kMaxDocument = size_t{4} << 20;  ///< bytes of a manifest, an index or a configuration

/// "sha256:" and 64 lower-case hex digits.
bool is_digest(std::string_view text);
/// "sha256:…" of the bytes.
std::string digest_of(std::string_view bytes);
/// The 64 digits of a digest.
std::string hex_of(const std::string& digest);

/// "registry/name[:tag][@sha256:…]".
struct Reference {
  std::string registry;    ///< "host" or "host:port"
  std::string repository;  ///< "org/name"
  std::string tag;         ///< "" when there is a digest
  std::string digest;      ///< "" when there is none
  /// "http" for this machine, else "https".
  std::string scheme() const;
  /// With this digest instead of tag or digest.
  std::string pinned(const std::string& to) const { return registry + "/" + repository + "@" + to; }
};
/// Throws Error(usage) for anything else; a reference without tag and digest means the tag "latest".
Reference parse_reference(std::string_view text);

struct Descriptor {
  std::string media_type, digest;
  int64_t size = 0;
};
struct Platform {
  std::string os = "linux", architecture;  ///< "amd64" or "arm64"
  bool operator==(const Platform&) const = default;
};
/// This machine's.
Platform own_platform();

struct Manifest {
  Descriptor config;
  std::vector<Descriptor> layers;  ///< lowest first
};
struct IndexEntry {
  Descriptor descriptor;
  std::optional<Platform> platform;
};
/// What a digest of an image names: one image, or a list of them.
struct Document {
  std::optional<Manifest> manifest;
  std::vector<IndexEntry> index;
};
/// Throws Error(corrupt) naming `where`; unknown media types, digests that are none, sizes out of range.
Document parse_document(std::string_view bytes, const std::string& where);

/// The one entry for a platform. Throws Error(not_found) naming those there are.
const IndexEntry& choose(const std::vector<IndexEntry>& index, const Platform& platform, const std::string& where);

struct ImageConfig {
  Platform platform;
  std::vector<std::string> diff_ids;  ///< digest of each layer's tar, uncompressed
  std::string version;                ///< label org.opencontainers.image.version; "" when absent
};
/// Throws Error(corrupt), also when it does not have `layers` diff ids.
ImageConfig parse_config(std::string_view bytes, size_t layers, const std::string& where);

/// How a layer is packed.
enum class Packing { tar, gzip, zstd };
/// Throws Error(corrupt) for what is no layer of a file system.
Packing packing_of(const std::string& media_type);

}  // namespace glm53::image
