// The receiving side of a copy: what is missing, pieces as they come, and the snapshot at the end.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/hub/cache.h"
#include "agent/hub/journal.h"
#include "agent/hub/partial_file.h"
#include "agent/sync/manifest.h"

namespace glm53::sync {

/// Largest piece that travels at once.
constexpr size_t kPiece = size_t{1} << 20;

struct ReceiverSettings {
  std::string cache, journal_dir;
  int64_t segment_bytes = int64_t{64} << 20;
  int64_t ranges_above = int64_t{256} << 20;  ///< larger files arrive in segments and leave the page cache
  int64_t disk_reserve = int64_t{5} << 30;    ///< stays free (or 3 %, if that is more); 0 = none
  std::chrono::milliseconds journal_period{2000};
  bool keep_bad = false;
};

/// Bytes [offset, offset + length) of a blob, within one segment. They must be sent in order.
struct Range {
  std::string etag;
  int64_t offset = 0, length = 0;
  bool operator==(const Range&) const = default;
};
/// What the receiver has, and what it wants.
struct Have {
  std::string digest;  ///< of the manifest it speaks of
  int64_t bytes_total = 0, bytes_done = 0;
  std::vector<Range> missing;
};

/// One snapshot. take() may be called by several threads; everything else by one at a time.
class Receiver {
 public:
  Receiver(ReceiverSettings settings, Manifest manifest, FileOps& ops = FileOps::real());
  ~Receiver();
  Receiver(const Receiver&) = delete;
  Receiver& operator=(const Receiver&) = delete;

  /// Hashes what is there and was never verified (`tick` is called meanwhile and may throw), and looks for blobs in
  /// other folders of the cache. Throws Error(unavailable) E640 when the rest does not fit the disk.
  Have have(const std::function<void()>& tick = [] {});
  /// One piece. Idempotent. Throws Error(corrupt) when the checksum (xxh64) or, with a blob's last piece, its digest is
  /// wrong; Error(busy) for a piece that is not the next one of its segment: ask have() again; Error(usage) for one
  /// that is no part of the manifest; Error(unavailable) for a full disk.
  void take(const std::string& etag, int64_t offset, std::string_view data, uint64_t checksum);
  /// Makes links and refs. Throws Error(busy) when something is missing.
  void commit();
  int64_t bytes_done() const { return bytes_done_; }
  int64_t bytes_total() const { return bytes_total_; }
  const Manifest& manifest() const { return manifest_; }
  const std::string& digest() const { return digest_; }
  std::string snapshot() const { return cache_.snapshot_dir(manifest_.repo, manifest_.commit); }

 private:
  struct Blob {
    hub::FileEntry file;
    std::mutex mutex;  ///< guards the rest
    bool complete = false;
    std::unique_ptr<hub::PartialFile> partial;
    std::optional<UniqueFd> lock;
    std::chrono::steady_clock::time_point saved;
  };
  bool present(const hub::FileEntry& file, const std::function<void()>& tick);
  void add_missing(const hub::FileEntry& file, Have& have);
  void check_disk(const Have& have) const;
  void open(Blob& blob);
  void seal(Blob& blob);
  hub::PartialFile::Layout layout(const hub::FileEntry& file) const;

  const ReceiverSettings settings_;
  const Manifest manifest_;
  const std::string digest_;
  hub::Cache cache_;
  hub::Journal journal_;
  const std::string folder_;
  std::map<std::string, Blob> blobs_;  ///< by etag; the map itself never changes
  std::atomic<int64_t> bytes_done_{0};
  int64_t bytes_total_ = 0;
};

}  // namespace glm53::sync
