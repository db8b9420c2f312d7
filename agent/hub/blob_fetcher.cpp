#include "agent/hub/blob_fetcher.h"

#include <algorithm>

#include "common/strings.h"

namespace glm53::hub {
namespace {

/// The server sends the whole file whatever part is asked for.
class RangeIgnored : public std::exception {};

TransportOptions transport_options(const Shared& shared) {
  TransportOptions options = shared.settings.transport;
  options.cancelled = &shared.stop;
  return options;
}

Client::Options client_options(const Shared& shared) {
  Client::Options options;
  options.token = shared.settings.token;
  options.token_hosts = shared.settings.token_hosts;
  options.retry = shared.settings.retry;
  options.cancelled = &shared.stop;
  options.report = shared.report;
  return options;
}

/// "bytes 0-99/1234" for exactly that part.
bool is_range(std::string_view header, int64_t first, int64_t last, int64_t total) {
  return trim(header) == cat("bytes ", first, "-", last, "/", total);
}

HubError bad_answer(const std::string& text) {
  return {Action::refetch, Error(Code::unavailable, cat("E616 hub: ", text))};
}

}  // namespace

BlobFetcher::BlobFetcher(Shared& shared)
    : shared_(shared), transport_(transport_options(shared)), client_(client_options(shared), transport_) {}

bool BlobFetcher::intact(const FileEntry& file, const std::string& path) {
  return digest_of_file(path, file.etag.size(), file.size, [&] {
           if (shared_.stop) throw_cancelled();
         }) == file.etag;
}

bool BlobFetcher::reuse(const FileEntry& file) {
  const std::string folder = shared_.cache.repo_dir(shared_.repo);
  const std::string path = shared_.cache.blob_path(shared_.repo, file.etag);
  if (const auto id = shared_.cache.blob(shared_.repo, file.etag, file.size)) {
    if (!shared_.verify && shared_.journal.is_verified(folder, file.etag, *id)) return true;
    if (intact(file, path)) {
      shared_.journal.verified(folder, file.etag, *id);
      return true;
    }
    shared_.report(cat("E610 hub: ", file.path, " in the cache does not match its digest; fetching it again"));
    return false;
  }
  if (const auto other = shared_.cache.elsewhere(shared_.repo, file.etag, file.size)) {
    if (!intact(file, *other)) return false;
    shared_.cache.adopt(*other, path);
    if (const auto id = shared_.cache.blob(shared_.repo, file.etag, file.size)) {
      shared_.journal.verified(folder, file.etag, *id);
      return true;
    }
  }
  return false;
}

void BlobFetcher::fetch(const FileEntry& file) {
  bool present = reuse(file);
  if (!present) {
    int64_t told = 0;
    const auto lock = shared_.cache.lock(shared_.repo, file.etag, [&](int64_t seconds) {
      if (shared_.stop) throw_cancelled();
      if (seconds >= told + 10) {
        told = seconds;
        shared_.report(cat("waiting for another client that holds the lock of ", file.path, " (", seconds, " s)"));
      }
      // The other client may have finished it.
      return !shared_.cache.blob(shared_.repo, file.etag, file.size).has_value();
    });
    present = reuse(file);
    if (!present) transfer(file);
  }
  if (present) {
    shared_.bytes_done += file.size;
    shared_.bytes_reused += file.size;
  }
  ++shared_.files_done;
}

void BlobFetcher::transfer(const FileEntry& file) {
  const PartialFile::Layout layout{shared_.settings.segment_bytes, shared_.settings.ranges_above,
                                   file.size > shared_.settings.ranges_above};
  std::string got;
  for (size_t attempt = 0; attempt < 2; ++attempt) {
    PartialFile partial(shared_.cache, shared_.journal, shared_.repo, file, layout);
    const int64_t known = partial.done_bytes();
    shared_.bytes_done += known;
    shared_.bytes_reused += known;
    streams_ = shared_.settings.parallel_ranges;
    if_range_.clear();
    try {
      from_some_source(file, partial, attempt);
      got = partial.digest();
      if (got == file.etag) {
        partial.publish();
        return;
      }
    } catch (const std::exception& e) {
      drop_transfers();
      // Known to be absent: other clients look there before they ask.
      if (std::string_view(e.what()).starts_with("E625")) {
        shared_.cache.mark_absent(shared_.repo, shared_.commit, file.path);
      }
      try {
        partial.save();
      } catch (const Error&) {
        // The first error says more; what is not saved is fetched again.
      }
      throw;
    }
    shared_.bytes_done -= partial.done_bytes();
    shared_.bytes_reused -= known;
    partial.discard(shared_.settings.keep_bad);
    shared_.report(cat("E610 hub: ", file.path, " arrived with digest ", got, " instead of ", file.etag));
    ++shared_.retries;
  }
  throw Error(Code::corrupt, cat("E610 hub: ", file.path, " has digest ", got, " instead of ", file.etag, ", twice"),
              "the server or something on the way damages it: try another source (hub.mirrors)");
}

void BlobFetcher::from_some_source(const FileEntry& file, PartialFile& partial, size_t first_source) {
  if (partial.complete()) return;
  const auto& sources = shared_.sources;
  for (size_t i = 0; i < sources.size(); ++i) {
    const size_t which = (first_source + i) % sources.size();
    try {
      from_source(file, partial, sources[which]);
      if (which != 0) shared_.other_source = true;
      return;
    } catch (const Error& e) {
      drop_transfers();
      const bool last = i + 1 == sources.size();
      if (last || action_of(e) == Action::give_up) throw;
      shared_.report(cat(e.what(), "; trying ", sources[which == sources.size() - 1 ? 0 : which + 1].source.endpoint));
    }
  }
}

void BlobFetcher::from_source(const FileEntry& file, PartialFile& partial, const PlacedSource& source) {
  Retry attempts = client_.retry();
  int64_t best = partial.done_bytes();
  bool refused = false;
  while (true) {
    try {
      const Location location = client_.locate(source.source, source.commit, file);
      run_segments(file, partial, source, location);
      return;
    } catch (const RangeIgnored&) {
      drop_transfers();
      restart(partial, true);
    } catch (const Error& e) {
      drop_transfers();
      if (shared_.stop) throw_cancelled();
      save_if_due(partial);
      ++shared_.retries;
      // Progress is what goes beyond the best so far: a server that ignores ranges and cuts makes none.
      const bool progressed = partial.done_bytes() > best;
      best = std::max(best, partial.done_bytes());
      if (progressed) attempts.progress();
      if (action_of(e) == Action::refetch) {
        if (refused && !progressed) {
          throw HubError(Action::fallback, Error(e.code(), cat(e.what(), ", again with a new one"), e.remedy()));
        }
        refused = true;
        shared_.report(cat(e.what(), "; asking again where it is"));
        continue;
      }
      refused = false;
      attempts.after(e);
    }
  }
}

void BlobFetcher::drop_transfers() {
  shared_.streams -= static_cast<int64_t>(running_.size());
  transport_.clear();
  running_.clear();
  pending_.clear();
  failure_ = nullptr;
}

void BlobFetcher::restart(PartialFile& partial, bool single) {
  shared_.bytes_done -= partial.done_bytes();
  partial.restart(single);
}

void BlobFetcher::save_if_due(PartialFile& partial) {
  if (Clock::now() - saved_ < shared_.settings.journal_period) return;
  partial.save();
  saved_ = Clock::now();
}

bool BlobFetcher::ranged(const PartialFile& partial, size_t index) const {
  return partial.segments() > 1 || partial.done(index) > 0;
}

void BlobFetcher::run_segments(const FileEntry& file, PartialFile& partial, const PlacedSource& source,
                               const Location& location) {
  for (size_t i = 0; i < partial.segments(); ++i) {
    if (partial.done(i) < partial.length(i)) pending_.push_back(i);
  }
  while (true) {
    while (!failure_ && !pending_.empty() && running_.size() < static_cast<size_t>(streams_)) {
      const size_t index = pending_.front();
      pending_.pop_front();
      start_segment(file, partial, source, location, index);
    }
    if (running_.empty()) break;
    if (const auto ended = transport_.wait(std::min(shared_.settings.journal_period, Millis(500)))) {
      finish_segment(file, partial, ended);
    }
    if (shared_.stop) throw_cancelled();
    save_if_due(partial);
  }
  if (failure_) std::rethrow_exception(failure_);
}

void BlobFetcher::start_segment(const FileEntry& file, PartialFile& partial, const PlacedSource& source,
                                const Location& location, size_t index) {
  const auto transfer = std::make_shared<Transfer>();
  const auto segment = std::make_shared<Segment>(Segment{index});
  transfer->request.url = location.url;
  transfer->request.token = location.token;
  if (ranged(partial, index)) {
    transfer->request.range = {partial.begin(index) + partial.done(index),
                               partial.begin(index) + partial.length(index) - 1};
    transfer->request.if_range = if_range_;
  }
  transfer->limit = shared_.limit.limited() ? &shared_.limit : nullptr;
  const Transfer* const raw = transfer.get();
  transfer->on_head = [=, this, &file, &partial, &source, &location](const Head& head) {
    judge_head(file, partial, source, location, raw->request, index, head);
  };
  transfer->on_body = [=, this, &file, &partial](std::string_view data) { take_body(file, partial, *segment, data); };
  transport_.start(transfer);
  running_.emplace(raw, segment);
  ++shared_.streams;
}

void BlobFetcher::judge_head(const FileEntry& file, const PartialFile& partial, const PlacedSource& source,
                             const Location& location, const Request& request, size_t index, const Head& head) {
  const std::string host = location.url.authority();
  if (head.status == 206 && request.range) {
    if (!is_range(head.header("Content-Range"), request.range->first, request.range->second, file.size)) {
      throw bad_answer(cat(host, " answered with another part of ", file.path, " than was asked for (",
                           head.header("Content-Range").substr(0, 80), ")"));
    }
    const std::string_view etag = head.header("ETag");
    if (etag.starts_with('"')) if_range_ = std::string(etag);
    return;
  }
  if (head.status == 200) {
    const std::string_view length = head.header("Content-Length");
    if (!length.empty() && parse_int(length) != file.size) {
      throw bad_answer(cat(host, " answered with ", length.substr(0, 20), " bytes of ",
                           head.header("Content-Type").substr(0, 40), " instead of ", file.path));
    }
    if (partial.segments() == 1 && partial.done(index) == 0) return;
    throw RangeIgnored();
  }
  if (head.status == 416 || head.status == 206 || (head.status >= 200 && head.status < 400)) {
    throw bad_answer(cat(host, " answered ", head.status, " for ", file.path));
  }
  const bool hub_itself = location.url.authority() == parse_url(source.source.endpoint).authority();
  throw refusal(head, {}, source.source, cat(file.path, " from ", host), hub_itself);
}

void BlobFetcher::take_body(const FileEntry& file, PartialFile& partial, Segment& segment, std::string_view data) {
  const auto n = static_cast<int64_t>(data.size());
  if (partial.done(segment.index) + n > partial.length(segment.index)) {
    throw bad_answer(cat("more bytes arrived than were asked for (", file.path, ")"));
  }
  partial.write(segment.index, data);
  segment.received += n;
  shared_.bytes_done += n;
  shared_.bytes_downloaded += n;
}

void BlobFetcher::finish_segment(const FileEntry& file, PartialFile& partial,
                                 const std::shared_ptr<Transfer>& transfer) {
  const auto found = running_.find(transfer.get());
  const std::shared_ptr<Segment> segment = found->second;
  running_.erase(found);
  --shared_.streams;
  const size_t index = segment->index;
  try {
    if (transfer->failed) std::rethrow_exception(transfer->failed);
    if (partial.done(index) != partial.length(index)) {
      throw HubError(Action::retry, Error(Code::unavailable, cat("E635 hub: ", transfer->request.url.authority(),
                                                                 " ended early within ", file.path)));
    }
    streams_ = std::min(streams_ + 1, shared_.settings.parallel_ranges);
  } catch (const RangeIgnored&) {
    throw;
  } catch (const Error& e) {
    streams_ = std::max(1, streams_ / 2);
    pending_.push_front(index);
    // A connection that was cut while bytes came is simply made again, at the same byte.
    const bool cut = action_of(e) == Action::retry && segment->received > 0 && !running_.empty();
    if (cut) {
      ++shared_.retries;
    } else if (!failure_) {
      failure_ = std::current_exception();
    }
  }
}

}  // namespace glm53::hub
