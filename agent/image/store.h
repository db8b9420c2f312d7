// Engine bundles on the disk of one node: blobs by digest, unpacked bundles by the digest of their image, and which one
// is active. Everything becomes visible by one rename of something durable; killed at any instant it can be run again.
//
//   blobs/sha256/HEX        a blob; HEX.partial on its way
//   bundles/HEX/            an unpacked bundle that passed its self-check
//   bundles/HEX.json        what it is, and its files
//   active.json             the active bundle and the one before it
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/image/manifest.h"
#include "agent/image/unpack.h"
#include "common/file.h"

namespace glm53::image {

struct Bundle {
  std::string digest;  ///< of the image for this platform: its identity
  std::string asked;   ///< the digest that was asked for: the same, or of an index
  std::string ref;     ///< where it came from, with the digest; for people
  std::string version, path;
  int64_t bytes = 0;         ///< of its files
  int64_t installed_at = 0;  ///< ms since 1970
  bool active = false, previous = false;
};

/// What a check of a bundle found.
struct Finding {
  std::string digest, what;
};

struct StoreOptions {
  std::string dir;
  Platform platform = own_platform();
  UnpackLimits limits = {};
  std::function<void()> check = [] {};  ///< called during long work; may throw to end it
  /// Runs an unpacked bundle's engine and says its version; throws when it does not answer.
  std::function<std::string(const std::string& folder)> self_check = {};  ///< empty: the real one
};

/// The program of the active bundle; nullopt when none is active. Reads one small file.
std::optional<std::string> active_program(const std::string& dir);

class Store {
 public:
  /// Makes the folders and takes the lock. Throws Error(busy) E655 when somebody else works on them.
  explicit Store(StoreOptions options);

  const StoreOptions& options() const { return options_; }
  std::string blob_path(const std::string& digest) const;
  bool has_blob(const Descriptor& blob) const;
  /// A document that was checked against its digest.
  void put_document(const std::string& digest, std::string_view bytes);
  /// Throws Error(not_found), Error(corrupt) E650 when the file has another digest.
  std::string document(const std::string& digest) const;
  /// The image for this platform that a digest names, from the blobs alone.
  std::pair<std::string, Manifest> image_of(const std::string& digest) const;

  /// Unpacks and checks a bundle whose blobs are there; does nothing when it is installed.
  Bundle install(const std::string& digest, const std::string& ref);
  std::vector<Bundle> list() const;  ///< oldest first
  /// By digest, or by the first digits of one. Throws Error(not_found), Error(usage) when several match.
  Bundle find(std::string_view name) const;
  /// Makes it the active one.
  Bundle use(std::string_view name);
  /// Back to the one before; again: forward.
  Bundle rollback();
  /// Hashes blobs and files again; empty `name`: all bundles.
  std::vector<Finding> verify(std::string_view name) const;
  /// Removes what is neither active, nor the one before, nor running; the bytes that became free.
  int64_t gc();
  /// One tar with the OCI layout of a bundle.
  void export_tar(std::string_view name, const std::string& file) const;
  /// The digest that the layout names, after its blobs are stored, checked. Throws Error(corrupt).
  std::string import_tar(const std::string& file);

 private:
  std::string bundle_path(const std::string& digest) const;
  std::optional<Bundle> read(const std::string& digest) const;
  void set_active(const std::string& active, const std::string& previous);
  std::pair<std::string, std::string> active() const;
  StoreOptions options_;
  UniqueFd lock_;
};

/// Runs `folder`/glm53-engine describe; the version it says. Throws Error(unavailable) E654.
std::string run_self_check(const std::string& folder);

}  // namespace glm53::image
