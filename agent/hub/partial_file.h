// A blob on its way: the partial file, how much of it is durable, and its digest, computed while it arrives.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "agent/hub/blob_hash.h"
#include "agent/hub/cache.h"
#include "agent/hub/journal.h"

namespace glm53::hub {

/// Hashes a file from its start while others write it, as far as it is told. Keeps big files out of the page cache.
class FrontierHash {
 public:
  FrontierHash(int fd, size_t digits, int64_t size, bool bypass_cache);
  ~FrontierHash();
  FrontierHash(const FrontierHash&) = delete;
  FrontierHash& operator=(const FrontierHash&) = delete;
  /// The first `frontier` bytes are there.
  void advance(int64_t frontier);
  /// Hashes the rest; the digest. Rethrows what a read failed with.
  std::string finish();

 private:
  void run(const std::stop_token& stop);
  void hash_to(int64_t frontier);
  void leave_cache();

  const int fd_;
  const int64_t size_;
  const bool bypass_cache_;
  BlobHash hash_;
  int64_t hashed_ = 0, left_ = 0, requested_ = 0;
  std::string buffer_;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  int64_t frontier_ = 0;
  std::exception_ptr failed_;
  std::jthread thread_;
};

/// blobs/ETAG.glm53.incomplete. Written at absolute offsets, a segment from its start on.
class PartialFile {
 public:
  struct Layout {
    int64_t segment_bytes, ranges_above;
    bool bypass_cache;
  };
  /// Opens it: an own, known one goes on where the journal says, anything else starts afresh. Throws
  /// Error(unavailable) E640 when the disk is full.
  PartialFile(const Cache& cache, Journal& journal, const std::string& repo, const FileEntry& file, Layout layout);
  ~PartialFile();
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  size_t segments() const { return segments_.done.size(); }
  int64_t begin(size_t segment) const { return static_cast<int64_t>(segment) * segments_.size; }
  int64_t length(size_t segment) const { return std::min(segments_.size, file_.size - begin(segment)); }
  int64_t done(size_t segment) const { return segments_.done[segment]; }
  int64_t done_bytes() const;
  bool complete() const { return done_bytes() == file_.size; }
  /// The next bytes of a segment. Throws Error(unavailable) for what does not fit the disk.
  void write(size_t segment, std::string_view data);
  /// Nothing of what is there counts any more; `single` makes it one segment.
  void restart(bool single);
  /// Makes what has arrived durable and records it.
  void save();
  /// The digest of the whole file.
  std::string digest() { return hash_->finish(); }
  /// It becomes the blob.
  FileId publish();
  /// Removes it, or keeps it as ETAG.bad-TIME.
  void discard(bool keep);

 private:
  void open();
  void start_hash();
  [[noreturn]] void fail(const std::string& what) const;
  const Cache& cache_;
  Journal& journal_;
  const std::string repo_, folder_, path_;
  const FileEntry file_;
  const Layout layout_;
  UniqueFd fd_;
  Segments segments_;
  size_t contiguous_ = 0;  ///< first segment that is not complete
  std::unique_ptr<FrontierHash> hash_;
};

/// Digest of an existing file of that size; calls `progress` now and then (it may throw).
std::string digest_of_file(const std::string& path, size_t digits, int64_t size, const std::function<void()>& progress);

}  // namespace glm53::hub
