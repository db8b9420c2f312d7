// The standard cache layout, shared with every other Hugging Face client: blobs named by digest, snapshots of links.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <sys/stat.h>

#include "common/file.h"

namespace glm53::hub {

/// Where the hub cache is by the rules of the other clients: HF_HUB_CACHE, HUGGINGFACE_HUB_CACHE, HF_HOME/hub,
/// XDG_CACHE_HOME/huggingface/hub, ~/.cache/huggingface/hub.
std::string default_cache();
/// HF_HOME by the same rules.
std::string default_home();

/// What identifies unchanged content without reading it.
struct FileId {
  int64_t size = 0;
  uint64_t inode = 0;
  int64_t mtime_ns = 0;
  bool operator==(const FileId&) const = default;
};

/// What is missing or wrong in a snapshot; empty: complete.
struct Completeness {
  std::vector<std::string> missing;  ///< "model-00031-of-00120.safetensors: is missing"
  int64_t files = 0, bytes = 0;      ///< of what was looked at
  bool complete() const { return missing.empty(); }
};

/// One cache folder. All paths are made of checked names.
class Cache {
 public:
  explicit Cache(std::string hub, FileOps& ops = FileOps::real()) : hub_(std::move(hub)), ops_(ops) {}
  const std::string& hub() const { return hub_; }
  FileOps& ops() const { return ops_; }

  std::string repo_dir(const std::string& repo) const;
  std::string blob_path(const std::string& repo, const std::string& etag) const;
  std::string partial_path(const std::string& repo, const std::string& etag) const;
  std::string snapshot_dir(const std::string& repo, const std::string& commit) const;

  /// Makes the folders of a repository, and CACHEDIR.TAG in the cache itself if it is new. Throws Error(unavailable)
  /// with the command that gives the folder back when it belongs to somebody else.
  void prepare(const std::string& repo) const;
  /// A blob that is a regular file of that size within the cache (links are followed, but not out of it).
  std::optional<FileId> blob(const std::string& repo, const std::string& etag, int64_t size) const;
  /// Etag of a snapshot's file, from the name of the blob that it links to.
  std::optional<std::string> etag_in_snapshot(const std::string& repo, const std::string& commit,
                                              const std::string& path) const;
  /// Commit of a branch or tag, or nullopt.
  std::optional<std::string> read_ref(const std::string& repo, const std::string& name) const;
  /// 40 hex digits, no newline, atomic.
  void write_ref(const std::string& repo, const std::string& name, const std::string& commit) const;
  /// snapshots/COMMIT/PATH -> ../../blobs/ETAG; what else is there is replaced atomically.
  void link(const std::string& repo, const std::string& commit, const std::string& path, const std::string& etag) const;
  /// Known to be absent at that commit.
  void mark_absent(const std::string& repo, const std::string& commit, const std::string& path) const;
  /// A finished partial file becomes the blob: durable, readable by others as the umask allows.
  void publish(int fd, const std::string& partial, const std::string& blob) const;
  /// Locks a blob against other clients (flock on .locks/REPO/ETAG.lock, which is never removed). While somebody else
  /// holds it, `waiting` is asked every 100 ms with the seconds so far; false ends the wait with nullopt. Also nullopt
  /// where the file system has no locks.
  std::optional<UniqueFd> lock(const std::string& repo, const std::string& etag,
                               const std::function<bool(int64_t)>& waiting) const;
  /// The same blob in another folder of the cache.
  std::optional<std::string> elsewhere(const std::string& repo, const std::string& etag, int64_t size) const;
  /// Makes `to` the same content as `from`: a hard link, else a copy.
  void adopt(const std::string& from, const std::string& to) const;
  /// Whether a snapshot can be served, from its own index: every shard of the weight map and config.json must be
  /// regular files of the size that `size_of` names (negative: unknown), and every safetensors header must end where
  /// its file ends.
  Completeness check(const std::string& repo, const std::string& commit,
                     const std::function<int64_t(const std::string&)>& size_of) const;
  /// Bytes free for us where the cache is, and the size of that file system.
  struct Space {
    int64_t free = 0, total = 0;
  };
  Space space() const;

 private:
  bool within_cache(const std::string& path) const;
  std::string hub_;
  FileOps& ops_;
};

/// Whether a safetensors file is as long as its header says; nullopt when it is, else what is wrong.
std::optional<std::string> safetensors_fault(const std::string& path);
FileId file_id(const struct stat& info);

}  // namespace glm53::hub
