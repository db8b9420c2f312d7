#include "agent/sync/receiver.h"

#include <algorithm>

#include <sys/stat.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::sync {

using std::chrono::steady_clock;

Receiver::Receiver(ReceiverSettings settings, Manifest manifest, FileOps& ops)
    : settings_(std::move(settings)),
      manifest_(std::move(manifest)),
      digest_(digest_of(manifest_)),
      cache_(settings_.cache, ops),
      journal_(settings_.journal_dir),
      folder_(cache_.repo_dir(manifest_.repo)),
      bytes_total_(manifest_.bytes()) {
  for (const hub::FileEntry& f : manifest_.files) blobs_[f.etag].file = f;
  cache_.prepare(manifest_.repo);
}

Receiver::~Receiver() {
  for (auto& [etag, blob] : blobs_) {
    const std::lock_guard lock(blob.mutex);
    if (!blob.partial) continue;
    try {
      blob.partial->save();
    } catch (const std::exception& e) {
      // At most the last two seconds come once more.
      log::warn(cat("sync: ", std::string_view(e.what())));
    }
  }
}

hub::PartialFile::Layout Receiver::layout(const hub::FileEntry& file) const {
  return {settings_.segment_bytes, settings_.ranges_above, file.size > settings_.ranges_above};
}

/// The blob is there and its content was verified, now or before.
bool Receiver::present(const hub::FileEntry& file, const std::function<void()>& tick) {
  const std::string path = cache_.blob_path(manifest_.repo, file.etag);
  const auto intact = [&](const std::string& at) {
    return hub::digest_of_file(at, file.etag.size(), file.size, tick) == file.etag;
  };
  auto id = cache_.blob(manifest_.repo, file.etag, file.size);
  if (id) {
    if (journal_.is_verified(folder_, file.etag, *id)) return true;
    if (!intact(path)) return false;  // replaced by what comes
  } else {
    const auto other = cache_.elsewhere(manifest_.repo, file.etag, file.size);
    if (!other || !intact(*other)) return false;
    cache_.adopt(*other, path);
    id = cache_.blob(manifest_.repo, file.etag, file.size);
    if (!id) return false;
  }
  journal_.verified(folder_, file.etag, *id);
  return true;
}

/// Ranges that are not there, by what the journal knows of the partial file.
void Receiver::add_missing(const hub::FileEntry& file, Have& have) {
  const std::string path = cache_.partial_path(manifest_.repo, file.etag);
  const auto known = journal_.segments(folder_, file, path);
  struct stat info {};
  const bool there = known && ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_size == file.size;
  const int64_t plain = file.size > settings_.ranges_above ? settings_.segment_bytes : std::max<int64_t>(file.size, 1);
  const int64_t segment = there ? known->size : plain;
  for (int64_t begin = 0; begin < file.size; begin += segment) {
    const int64_t length = std::min(segment, file.size - begin);
    const int64_t done = there ? known->done[static_cast<size_t>(begin / segment)] : 0;
    have.bytes_done += done;
    if (done < length) have.missing.push_back({file.etag, begin + done, length - done});
  }
  // Everything has come, but it was not sealed: its last piece comes once more. So does the one of an empty file.
  const bool named = !have.missing.empty() && have.missing.back().etag == file.etag;
  if (!named) have.missing.push_back({file.etag, file.size, 0});
}

void Receiver::check_disk(const Have& have) const {
  int64_t missing = have.bytes_total - have.bytes_done;
  for (const auto& [etag, blob] : blobs_) {
    struct stat info {};
    const std::string path = cache_.partial_path(manifest_.repo, etag);
    // Partial files have their space already.
    if (!blob.complete && ::stat(path.c_str(), &info) == 0)
      missing -= std::min<int64_t>(missing, int64_t{info.st_blocks} * 512);
  }
  const hub::Cache::Space space = cache_.space();
  const int64_t reserve = settings_.disk_reserve == 0 ? 0 : std::max(settings_.disk_reserve, space.total / 100 * 3);
  if (missing <= 0 || space.free >= missing + reserve) return;
  throw Error(Code::unavailable,
              cat("E640 sync: ", cache_.hub(), " has ", human_bytes(space.free), " free; ", human_bytes(missing),
                  " are missing and ", human_bytes(reserve), " stay free"),
              cat("make room for ", human_bytes(missing + reserve - space.free),
                  ", or set hub.home or hub.disk_reserve there"));
}

Have Receiver::have(const std::function<void()>& tick) {
  Have have;
  have.digest = digest_;
  have.bytes_total = bytes_total_;
  std::vector<Blob*> order;
  for (auto& [etag, blob] : blobs_) order.push_back(&blob);
  // Big ones first: the end is not one stream alone.
  std::stable_sort(order.begin(), order.end(),
                   [](const Blob* a, const Blob* b) { return a->file.size > b->file.size; });
  for (Blob* const blob : order) {
    const std::lock_guard lock(blob->mutex);
    if (blob->partial) {
      blob->partial->save();
      blob->partial.reset();  // opened again where the journal says
      blob->lock.reset();
    }
    blob->complete = blob->complete || present(blob->file, tick);
    if (blob->complete) {
      have.bytes_done += blob->file.size;
    } else {
      add_missing(blob->file, have);
    }
    tick();
  }
  bytes_done_ = have.bytes_done;
  check_disk(have);
  return have;
}

void Receiver::open(Blob& blob) {
  if (blob.partial) return;
  blob.lock = cache_.lock(manifest_.repo, blob.file.etag, [](int64_t) { return false; });
  if (!blob.lock) {
    throw Error(Code::busy, cat("sync: another client fetches ", blob.file.path), "it is tried again by itself");
  }
  blob.partial = std::make_unique<hub::PartialFile>(cache_, journal_, manifest_.repo, blob.file, layout(blob.file));
  blob.saved = steady_clock::now();
}

void Receiver::take(const std::string& etag, int64_t offset, std::string_view data, uint64_t checksum) {
  const auto found = blobs_.find(etag);
  if (found == blobs_.end()) throw Error(Code::usage, "sync: the piece is of no blob of this manifest");
  Blob& blob = found->second;
  const auto n = static_cast<int64_t>(data.size());
  if (data.size() > kPiece || offset < 0 || offset > blob.file.size || n > blob.file.size - offset) {
    throw Error(Code::usage, cat("sync: the piece is no part of ", blob.file.path));
  }
  if (xxh64(std::as_bytes(std::span(data))) != checksum) {
    throw Error(Code::corrupt, cat("E644 sync: a piece of ", blob.file.path, " was damaged on the way"));
  }
  const std::lock_guard lock(blob.mutex);
  if (blob.complete) return;
  open(blob);
  hub::PartialFile& partial = *blob.partial;
  if (n > 0) {
    const int64_t size = partial.segments() > 1 ? partial.begin(1) : std::max<int64_t>(blob.file.size, 1);
    const auto segment = static_cast<size_t>(offset / size);
    const int64_t next = partial.begin(segment) + partial.done(segment);
    if (offset + n > next) {
      if (offset != next || n > partial.length(segment) - partial.done(segment)) {
        throw Error(Code::busy, cat("sync: ", blob.file.path, " goes on at byte ", next, ", not at ", offset),
                    "ask again what is missing");
      }
      partial.write(segment, data);
      bytes_done_ += n;
    }
  }
  if (partial.complete()) {
    seal(blob);
  } else if (steady_clock::now() - blob.saved >= settings_.journal_period) {
    partial.save();
    blob.saved = steady_clock::now();
  }
}

void Receiver::seal(Blob& blob) {
  const auto partial = std::move(blob.partial);
  const auto lock = std::exchange(blob.lock, std::nullopt);
  if (partial->digest() != blob.file.etag) {
    bytes_done_ -= blob.file.size;
    partial->discard(settings_.keep_bad);
    throw Error(Code::corrupt, cat("E610 sync: ", blob.file.path, " does not match its digest"));
  }
  partial->publish();
  blob.complete = true;
  for (const hub::FileEntry& f : manifest_.files) {
    if (f.etag == blob.file.etag) cache_.link(manifest_.repo, manifest_.commit, f.path, f.etag);
  }
}

void Receiver::commit() {
  for (auto& [etag, blob] : blobs_) {
    const std::lock_guard lock(blob.mutex);
    if (!blob.complete) {
      throw Error(Code::busy, cat("sync: ", blob.file.path, " is not there yet"), "ask again what is missing");
    }
  }
  for (const hub::FileEntry& f : manifest_.files) cache_.link(manifest_.repo, manifest_.commit, f.path, f.etag);
  for (const std::string& ref : manifest_.refs) cache_.write_ref(manifest_.repo, ref, manifest_.commit);
  journal_.save_plan(folder_, {"sync", manifest_.repo}, manifest_.commit, manifest_.files);
  journal_.save_download(folder_, manifest_.commit, "sync", bytes_total_, bytes_total_, "done", "");
}

}  // namespace glm53::sync
