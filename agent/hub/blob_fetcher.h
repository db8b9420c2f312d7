// One blob from wherever it can be had into the cache. One object a thread.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "agent/hub/downloader.h"
#include "agent/hub/partial_file.h"

namespace glm53::hub {

/// A source together with the commit that holds the files there.
struct PlacedSource {
  Source source;
  std::string commit;
};

/// What the threads of a download share.
struct Shared {
  const Settings& settings;
  const Cache& cache;
  Journal& journal;
  std::string repo;                   ///< whose folder is filled
  std::vector<PlacedSource> sources;  ///< in order of preference
  std::string commit;                 ///< whose snapshot is filled
  const std::atomic<bool>& stop;      ///< cancelled, or another thread failed
  RateLimit limit;
  std::function<void(const std::string&)> report;  ///< thread-safe
  bool verify = false;
  std::atomic<int64_t> bytes_done{0}, bytes_downloaded{0}, bytes_reused{0}, files_done{0}, streams{0}, retries{0};
  std::atomic<bool> other_source{false};  ///< something did not come from the first source
};

class BlobFetcher {
 public:
  explicit BlobFetcher(Shared& shared);
  /// Returns when the blob is in the cache, verified.
  void fetch(const FileEntry& file);

 private:
  struct Segment {
    size_t index;
    int64_t received = 0;  ///< by this transfer
  };
  bool reuse(const FileEntry& file);
  bool intact(const FileEntry& file, const std::string& path);
  void transfer(const FileEntry& file);
  void from_some_source(const FileEntry& file, PartialFile& partial, size_t first_source);
  void from_source(const FileEntry& file, PartialFile& partial, const PlacedSource& source);
  void run_segments(const FileEntry& file, PartialFile& partial, const PlacedSource& source, const Location& location);
  void start_segment(const FileEntry& file, PartialFile& partial, const PlacedSource& source, const Location& location,
                     size_t index);
  void finish_segment(const FileEntry& file, PartialFile& partial, const std::shared_ptr<Transfer>& transfer);
  void judge_head(const FileEntry& file, const PartialFile& partial, const PlacedSource& source,
                  const Location& location, const Request& request, size_t index, const Head& head);
  void take_body(const FileEntry& file, PartialFile& partial, Segment& segment, std::string_view data);
  void restart(PartialFile& partial, bool single);
  void save_if_due(PartialFile& partial);
  void drop_transfers();
  bool ranged(const PartialFile& partial, size_t index) const;

  Shared& shared_;
  Transport transport_;
  Client client_;
  // Of the file at work:
  std::map<const Transfer*, std::shared_ptr<Segment>> running_;
  std::deque<size_t> pending_;
  std::exception_ptr failure_;
  std::string if_range_;
  int streams_ = 1;
  Clock::time_point saved_ = Clock::now();
};

}  // namespace glm53::hub
