// Downloads of whole snapshots: plan, parallel transfers, verification, links.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/hub/cache.h"
#include "agent/hub/client.h"
#include "agent/hub/journal.h"

namespace glm53::hub {

struct Settings {
  std::string cache;        ///< the hub cache: holds models--… folders
  std::string journal_dir;  ///< of the journal's database
  std::string endpoint = "https://huggingface.co";
  std::vector<std::string> mirrors;      ///< endpoints that hold the same repositories
  std::string token;                     ///< "" = none
  std::vector<std::string> token_hosts;  ///< besides the endpoint's
  int parallel_files = 4, parallel_ranges = 4;
  int64_t segment_bytes = int64_t{64} << 20;
  int64_t ranges_above = int64_t{256} << 20;  ///< larger files are fetched in segments and leave the page cache
  int64_t limit_rate = 0;                     ///< bytes a second; 0 = none
  int64_t disk_reserve = int64_t{5} << 30;    ///< stays free (or 3 %, if that is more); 0 = none
  bool offline = false, keep_bad = false;
  Millis journal_period{2000};
  Millis silence{120000};  ///< a report after that long without a byte
  TransportOptions transport;
  RetryOptions retry;
};

struct DownloadRequest {
  std::string repo, revision = "main";
  std::string fallback_repo, fallback_revision;  ///< "" = none
  std::vector<std::string> include, exclude;     ///< globs; no include = everything
  bool configured = false;  ///< the revision of the configuration: becomes refs/main if there is none
  bool verify = false;      ///< hash what is there again
  bool dry_run = false;     ///< only the plan
};

struct Progress {
  std::string phase;  ///< planning, transferring, done
  std::string file;   ///< one that is on its way
  int64_t bytes_done = 0, bytes_total = 0;
  int64_t bytes_downloaded = 0, bytes_reused = 0;  ///< reused: already in the cache, or of an earlier run
  int64_t files_done = 0, files_total = 0;
  double rate = 0, average = 0;  ///< bytes a second: over the last 10 s, over the whole run
  int64_t eta_s = -1;            ///< -1 = unknown
  int64_t streams = 0, retries = 0;
};

struct DownloadResult {
  std::string commit, snapshot;  ///< path of the snapshot's folder
  std::string source;            ///< "https://huggingface.co/org/name", or "cache"
  int64_t files = 0, bytes = 0;
  int64_t bytes_downloaded = 0, bytes_reused = 0;
  bool complete = false;  ///< every file of the model is there (a selection may lack some)
};

/// Errors: those of client.h, Error(corrupt) for content that does not match its digest, Error(unavailable) E640 for
/// a full disk, Error(not_found) when offline and something is missing, Error(cancelled).
class Downloader {
 public:
  using OnProgress = std::function<void(const Progress&)>;  ///< called by run()'s thread, a few times a second
  using OnEvent = std::function<void(const std::string&)>;  ///< one line; from any thread, one at a time
  explicit Downloader(Settings settings, FileOps& ops = FileOps::real());
  ~Downloader();
  DownloadResult run(const DownloadRequest& request, OnProgress on_progress = {}, OnEvent on_event = {});
  /// Any thread or signal handler: run() ends soon, with Error(cancelled); what has arrived is kept.
  void cancel() { cancelled_.store(true); }

 private:
  struct Run;
  const Settings settings_;
  FileOps& ops_;
  std::atomic<bool> cancelled_{false};
};

/// The files that a request wants, of a listing.
std::vector<FileEntry> select(const std::vector<FileEntry>& files, const DownloadRequest& request,
                              const std::set<std::string>& shards);

}  // namespace glm53::hub
