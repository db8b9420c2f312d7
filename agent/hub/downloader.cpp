#include "agent/hub/downloader.h"

#include <algorithm>
#include <condition_variable>
#include <thread>

#include "agent/hub/blob_fetcher.h"
#include "agent/hub/blob_hash.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

constexpr const char* kIndex = "model.safetensors.index.json";
constexpr auto kTick = std::chrono::milliseconds(200);

const FileEntry* find(const std::vector<FileEntry>& files, std::string_view path) {
  const auto found = std::find_if(files.begin(), files.end(), [&](const FileEntry& f) { return f.path == path; });
  return found == files.end() ? nullptr : &*found;
}

/// What was known about a commit must still be so: a commit names content.
void check_agreement(const std::vector<FileEntry>& known, const std::vector<FileEntry>& listed, const Source& source,
                     const std::string& commit) {
  for (const FileEntry& k : known) {
    const FileEntry* const l = find(listed, k.path);
    if (l == nullptr || *l == k) continue;
    throw HubError(Action::fallback,
                   Error(Code::corrupt, cat("E611 hub: ", k.path, " at ", commit, " is listed by ", source.endpoint,
                                            " with digest ", l->etag, "; known is ", k.etag)));
  }
}

/// Rates and what follows from them.
class Meter {
 public:
  void fill(Progress& p) {
    const auto now = Clock::now();
    const double dt = std::chrono::duration<double>(now - last_).count();
    const double all = std::chrono::duration<double>(now - start_).count();
    if (dt > 0.05) {
      const double current = static_cast<double>(p.bytes_downloaded - bytes_) / dt;
      const double weight = std::min(1.0, dt / std::min(10.0, std::max(all, dt)));
      rate_ += (current - rate_) * weight;
      if (p.bytes_downloaded != bytes_) moved_ = now;
      bytes_ = p.bytes_downloaded;
      last_ = now;
    }
    p.rate = rate_;
    p.average = all > 0 ? static_cast<double>(p.bytes_downloaded) / all : 0;
    const auto left = static_cast<double>(p.bytes_total - p.bytes_done);
    p.eta_s = left <= 0 ? 0 : rate_ > 1 ? static_cast<int64_t>(std::min(left / rate_, 1e9)) : -1;
  }
  /// Once for each silence of that length.
  bool silent(Millis limit) {
    if (Clock::now() - moved_ < limit) return false;
    moved_ = Clock::now();
    return true;
  }

 private:
  Clock::time_point start_ = Clock::now(), last_ = start_, moved_ = start_;
  int64_t bytes_ = 0;
  double rate_ = 0;
};

}  // namespace

std::vector<FileEntry> select(const std::vector<FileEntry>& files, const DownloadRequest& request,
                              const std::set<std::string>& shards) {
  const auto any = [](const std::vector<std::string>& globs, const std::string& path) {
    return std::any_of(globs.begin(), globs.end(), [&](const std::string& g) { return glob_match(g, path); });
  };
  std::vector<FileEntry> chosen;
  for (const FileEntry& f : files) {
    const bool wanted = request.include.empty() || any(request.include, f.path);
    // What was asked for by name may also leave out shards; an exclude alone may not.
    const bool needed = always_needed(f.path) || (request.include.empty() && shards.contains(f.path));
    if (needed || (wanted && !any(request.exclude, f.path))) chosen.push_back(f);
  }
  return chosen;
}

/// State of one run().
struct Downloader::Run {
  Run(Downloader& owner, const DownloadRequest& wanted, OnProgress progress, OnEvent event)
      : settings(owner.settings_),
        request(wanted),
        on_progress(std::move(progress)),
        on_event(std::move(event)),
        cancelled(owner.cancelled_),
        cache(settings.cache, owner.ops_),
        journal(settings.journal_dir),
        folder(cache.repo_dir(request.repo)),
        transport([&] {
          TransportOptions o = settings.transport;
          o.cancelled = &cancelled;
          return o;
        }()),
        client({settings.token, settings.token_hosts, settings.retry, [this](const std::string& s) { report(s); },
                &cancelled},
               transport),
        shared{settings,
               cache,
               journal,
               request.repo,
               {},
               {},
               stop,
               RateLimit(settings.limit_rate),
               [this](const std::string& s) { report(s); },
               request.verify} {}

  void report(const std::string& text) {
    const std::lock_guard lock(report_mutex);
    if (on_event) on_event(text);
  }
  void show(const std::string& phase) {
    Progress p;
    p.phase = phase;
    {
      const std::lock_guard lock(queue_mutex);
      p.file = current;
    }
    p.bytes_done = shared.bytes_done;
    p.bytes_total = bytes_total;
    p.bytes_downloaded = shared.bytes_downloaded;
    p.bytes_reused = shared.bytes_reused;
    p.files_done = shared.files_done;
    p.files_total = static_cast<int64_t>(files.size());
    p.streams = shared.streams;
    p.retries = shared.retries;
    meter.fill(p);
    if (on_progress) on_progress(p);
  }

  DownloadResult offline();
  std::optional<DownloadResult> known_complete();
  void plan();
  bool plan_from(const Source& source, const std::string& revision, bool fallback);
  void check_shards();
  void check_disk();
  void transfer_all();
  void work();
  void link_all();
  DownloadResult result(const std::string& source);
  int64_t size_of(const std::string& path) const {
    const FileEntry* const f = find(listing, path);
    return f == nullptr ? -1 : f->size;
  }

  const Settings& settings;
  const DownloadRequest& request;
  OnProgress on_progress;
  OnEvent on_event;
  const std::atomic<bool>& cancelled;
  Cache cache;
  Journal journal;
  const std::string folder;
  Transport transport;
  Client client;
  std::atomic<bool> stop{false};
  Shared shared;
  std::mutex report_mutex;
  Meter meter;

  std::string commit;
  std::vector<FileEntry> listing, chosen;  ///< everything; what is wanted
  std::vector<FileEntry> files;            ///< wanted, each blob once
  int64_t bytes_total = 0;

  std::mutex queue_mutex;
  std::condition_variable idle;
  size_t next = 0, workers = 0;
  std::string current;
  std::exception_ptr failed;
};

DownloadResult Downloader::Run::offline() {
  const auto found = is_commit(request.revision) ? request.revision : cache.read_ref(request.repo, request.revision);
  if (!found) {
    throw Error(Code::not_found,
                cat("hub: offline, and ", request.repo, "@", request.revision, " is not in ", cache.hub()),
                "download it once without --offline");
  }
  commit = *found;
  listing = journal.plan(folder, commit);
  const Completeness state = cache.check(request.repo, commit, [&](const std::string& p) { return size_of(p); });
  if (!state.complete()) {
    throw Error(Code::not_found,
                cat("hub: offline, and the snapshot ", commit, " of ", request.repo, " lacks ", state.missing.size(),
                    " files: ", state.missing.front()),
                "download it without --offline");
  }
  DownloadResult r{commit, cache.snapshot_dir(request.repo, commit), "cache", state.files, state.bytes, 0, state.bytes,
                   true};
  return r;
}

/// A pinned commit whose files are all there and unchanged needs no network.
std::optional<DownloadResult> Downloader::Run::known_complete() {
  if (!is_commit(request.revision) || request.verify || request.dry_run) return std::nullopt;
  listing = journal.plan(folder, request.revision);
  if (listing.empty()) return std::nullopt;
  commit = request.revision;
  std::set<std::string> shards;
  try {
    shards = parse_index(read_file(cat(cache.snapshot_dir(request.repo, commit), "/", kIndex)), kIndex);
  } catch (const Error& e) {
    if (e.code() != Code::not_found) return std::nullopt;
  }
  chosen = select(listing, request, shards);
  for (const FileEntry& f : chosen) {
    const auto id = cache.blob(request.repo, f.etag, f.size);
    if (!id || !journal.is_verified(folder, f.etag, *id)) return std::nullopt;
    if (cache.etag_in_snapshot(request.repo, commit, f.path) != f.etag) return std::nullopt;
    shared.bytes_reused += f.size;
  }
  return result("cache");
}

/// False when this source does not have it and another may.
bool Downloader::Run::plan_from(const Source& source, const std::string& revision, bool fallback) {
  try {
    const std::string found = client.resolve(source, revision);
    auto listed = client.tree(source, found);
    // A commit is only the same name on the same repository.
    const std::string here = fallback && is_commit(request.revision) ? request.revision : found;
    const auto known = journal.plan(folder, here);
    if (fallback && known.empty() && !is_commit(revision)) {
      throw HubError(
          Action::fallback,
          Error(Code::corrupt, cat("hub: nothing says that ", source.repo, " holds the same bytes as ", request.repo),
                "pin it: model.fallback_revision"));
    }
    check_agreement(known, listed, source, here);
    if (commit.empty()) {
      commit = here;
      listing = std::move(listed);
    }
    shared.sources.push_back({source, found});
    return true;
  } catch (const Error& e) {
    const Action action = action_of(e);
    if (action == Action::give_up) throw;
    if (!failed) failed = std::current_exception();
    report(e.what());
    return false;
  }
}

void Downloader::Run::plan() {
  std::vector<std::string> endpoints{settings.endpoint};
  endpoints.insert(endpoints.end(), settings.mirrors.begin(), settings.mirrors.end());
  for (const std::string& endpoint : endpoints) {
    if (!shared.sources.empty()) {
      shared.sources.push_back({{endpoint, request.repo}, commit});  // content is addressed by digest
    } else {
      plan_from({endpoint, request.repo}, request.revision, false);
    }
  }
  if (shared.sources.empty() && !request.fallback_repo.empty()) {
    const std::string& r = request.fallback_revision;
    plan_from({settings.endpoint, request.fallback_repo}, r.empty() ? "main" : r, true);
  }
  if (shared.sources.empty()) std::rethrow_exception(failed);
  failed = nullptr;
  if (!request.dry_run) {
    cache.prepare(request.repo);
    journal.save_plan(folder, shared.sources.front().source, commit, listing);
  }
  shared.commit = commit;
  check_shards();
  std::set<std::string> blobs;
  for (const FileEntry& f : chosen) {
    if (blobs.insert(f.etag).second) files.push_back(f);
  }
  // Big ones first: the end is not one stream alone.
  std::stable_sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.size > b.size; });
  for (const FileEntry& f : files) bytes_total += f.size;
}

/// Every shard of the index must be in the listing before 164 GiB are fetched.
void Downloader::Run::check_shards() {
  std::set<std::string> shards;
  if (const FileEntry* const index = find(listing, kIndex)) {
    std::string text;
    if (cache.blob(request.repo, index->etag, index->size)) {
      text = read_file(cache.blob_path(request.repo, index->etag));
      if (hash_of(text, index->etag.size()) != index->etag) text.clear();
    }
    for (size_t i = 0; text.empty(); ++i) {
      const PlacedSource& s = shared.sources[i];
      try {
        text = client.small_file(s.source, s.commit, *index);
      } catch (const Error& e) {
        if (i + 1 == shared.sources.size() || action_of(e) == Action::give_up) throw;
        report(e.what());
      }
    }
    shards = parse_index(text, kIndex);
    for (const std::string& shard : shards) {
      if (size_of(shard) > 0) continue;
      throw Error(Code::weights,
                  cat("E617 hub: ", request.repo, "@", commit, " is incomplete: its index names ", shard,
                      size_of(shard) == 0 ? ", which is empty" : ", which is not there"),
                  "wait until its owner has uploaded it, or pin another revision");
    }
  }
  chosen = select(listing, request, shards);
  if (chosen.empty()) throw Error(Code::usage, "hub: no file matches", "check --include and --exclude");
}

void Downloader::Run::check_disk() {
  int64_t missing = 0;
  for (const FileEntry& f : files) {
    if (cache.blob(request.repo, f.etag, f.size)) continue;
    struct stat info {};
    // Partial files have their space already.
    if (::stat(cache.partial_path(request.repo, f.etag).c_str(), &info) == 0) {
      missing += std::max<int64_t>(0, f.size - int64_t{info.st_blocks} * 512);
    } else {
      missing += f.size;
    }
  }
  const Cache::Space space = cache.space();
  const int64_t reserve = settings.disk_reserve == 0 ? 0 : std::max(settings.disk_reserve, space.total / 100 * 3);
  if (missing == 0 || space.free >= missing + reserve) return;
  throw Error(
      Code::unavailable,
      cat("E640 hub: ", cache.hub(), " has ", human_bytes(space.free), " free; ", human_bytes(missing),
          " are missing and ", human_bytes(reserve), " stay free"),
      cat("make room for ", human_bytes(missing + reserve - space.free), ", or set hub.home or hub.disk_reserve"));
}

void Downloader::Run::work() {
  try {
    BlobFetcher fetcher(shared);
    while (true) {
      const FileEntry* file = nullptr;
      {
        const std::lock_guard lock(queue_mutex);
        if (stop || next == files.size()) break;
        file = &files[next++];
        current = file->path;
      }
      fetcher.fetch(*file);
      for (const FileEntry& f : chosen) {
        if (f.etag == file->etag) cache.link(request.repo, commit, f.path, f.etag);
      }
    }
  } catch (...) {
    const std::lock_guard lock(queue_mutex);
    if (!failed) failed = std::current_exception();
    stop = true;
  }
  const std::lock_guard lock(queue_mutex);
  --workers;
  idle.notify_all();
}

void Downloader::Run::transfer_all() {
  std::vector<std::jthread> threads;
  workers = std::min<size_t>(static_cast<size_t>(settings.parallel_files), files.size());
  const size_t count = workers;
  for (size_t i = 0; i < count; ++i) threads.emplace_back([this] { work(); });
  std::unique_lock lock(queue_mutex);
  while (workers > 0) {
    idle.wait_for(lock, kTick);
    lock.unlock();
    if (cancelled) stop = true;
    show("transferring");
    if (meter.silent(settings.silence)) {
      report(
          cat("no byte has arrived for ", settings.silence.count() / 1000, " s (", shared.streams.load(), " streams)"));
    }
    lock.lock();
  }
  lock.unlock();
  threads.clear();
  if (cancelled) throw_cancelled();
  if (failed) std::rethrow_exception(failed);
}

DownloadResult Downloader::Run::result(const std::string& source) {
  DownloadResult r;
  r.commit = commit;
  r.snapshot = cache.snapshot_dir(request.repo, commit);
  r.source = source;
  r.files = static_cast<int64_t>(chosen.size());
  for (const FileEntry& f : chosen) r.bytes += f.size;
  r.bytes_downloaded = shared.bytes_downloaded;
  r.bytes_reused = shared.bytes_reused;
  if (!request.dry_run) {
    const auto size = [&](const std::string& p) { return size_of(p); };
    r.complete = cache.check(request.repo, commit, size).complete();
  }
  return r;
}

Downloader::Downloader(Settings settings, FileOps& ops)
    : settings_([&] {
        settings.token_hosts.push_back(parse_url(settings.endpoint).authority());
        return std::move(settings);
      }()),
      ops_(ops) {}

Downloader::~Downloader() = default;

DownloadResult Downloader::run(const DownloadRequest& request, OnProgress on_progress, OnEvent on_event) {
  check_repo_id(request.repo);
  check_revision(request.revision);
  if (!request.fallback_repo.empty()) check_repo_id(request.fallback_repo);
  Run run(*this, request, std::move(on_progress), std::move(on_event));
  run.show("planning");
  if (settings_.offline) return run.offline();
  if (auto known = run.known_complete()) return *known;
  run.commit.clear();
  run.listing.clear();
  run.shared.bytes_reused = 0;
  run.plan();
  const PlacedSource& first = run.shared.sources.front();
  const std::string source = cat(first.source.endpoint, "/", first.source.repo);
  if (request.dry_run) return run.result(source);
  try {
    run.check_disk();
    run.transfer_all();
  } catch (const Error& e) {
    run.journal.save_download(run.folder, run.commit, source, run.bytes_total, run.shared.bytes_done, "failed",
                              e.what());
    throw;
  }
  if (!is_commit(request.revision)) {
    run.cache.write_ref(request.repo, request.revision, run.commit);
  } else if (request.configured && !run.cache.read_ref(request.repo, "main")) {
    run.cache.write_ref(request.repo, "main", run.commit);
  }
  run.journal.save_download(run.folder, run.commit, source, run.bytes_total, run.shared.bytes_done, "done", "");
  run.show("done");
  return run.result(source);
}

}  // namespace glm53::hub
