// What a snapshot is made of, as the source tells the receiver. Names from the other end are judged here before they
// become part of a path; link targets never travel.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "agent/hub/cache.h"
#include "agent/hub/client.h"

namespace glm53::sync {

/// One snapshot of one repository. Content is named by digest (the etag), so two equal manifests mean equal bytes.
struct Manifest {
  std::string repo, commit;
  std::vector<std::string> refs;      ///< names that are to point at the commit, such as main
  std::vector<hub::FileEntry> files;  ///< by path

  int64_t bytes() const;  ///< of distinct blobs
};

/// Canonical: the same manifest is the same text.
std::string to_json(const Manifest& manifest);
/// SHA-256 of to_json().
std::string digest_of(const Manifest& manifest);
/// Throws Error(usage) naming what is wrong: an id, a commit, a path that could leave its folder, a path twice, a file
/// that is a folder of another one, one blob with two sizes, a size out of bounds, too many files.
Manifest parse_manifest(std::string_view json);
/// Of a snapshot in a cache, from its links. Throws Error(not_found) when there is none, Error(corrupt) for a file that
/// is no link to a blob or whose blob is missing.
Manifest manifest_of(const hub::Cache& cache, const std::string& repo, const std::string& commit);

}  // namespace glm53::sync
