#include "engine/spill/spill_disk.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <utility>

#include "common/digest.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::spill {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kLargestSegment = uint64_t{1} << 30, kParts = 8, kSyncEvery = uint64_t{64} << 20;
constexpr uint64_t kLeastRecords = 4;

uint64_t record_bytes(uint64_t payload) {
  return kRecordHeader + payload;
}

uint64_t least_segment(const DiskOptions& o) {
  return kSegmentHeader + record_bytes(o.largest_record);
}

uint64_t segment_size(const DiskOptions& o) {
  check_size(o);
  const uint64_t least = least_segment(o);
  return std::clamp(o.bytes / kParts, least, std::max(least, kLargestSegment));
}

}  // namespace

void check_size(const DiskOptions& o) {
  const uint64_t least = kLeastRecords * least_segment(o);
  if (o.bytes < least)
    throw Error(Code::config,
                cat(human_bytes(static_cast<int64_t>(o.bytes)), " of disk are too few for records of ",
                    human_bytes(static_cast<int64_t>(o.largest_record))),
                cat("cache.spill_disk_bytes of at least ", least, ", or 0 for none"));
}

Disk::Disk(DiskOptions options, FileOps& ops)
    : options_(std::move(options)), ops_(ops), segment_bytes_(segment_size(options_)) {
  make_dirs(options_.dir, 0700);
  lock_ = try_lock(options_.dir + "/lock");
  if (!lock_)
    throw Error(Code::busy, cat("'", options_.dir, "' is used by another process"), "a folder for this rank alone");
  recover();
}

std::string Disk::path_of(uint64_t sequence) const {
  return cat(options_.dir, "/", segment_name(sequence));
}

// ---- after a restart

void Disk::recover() {
  std::error_code failed;
  std::vector<uint64_t> found;
  for (fs::directory_iterator at(options_.dir, failed), end; !failed && at != end; at.increment(failed))
    if (const auto sequence = segment_sequence(at->path().filename().string())) found.push_back(*sequence);
  if (failed) throw Error(Code::unavailable, cat("cannot read '", options_.dir, "': ", failed.message()));
  std::sort(found.begin(), found.end());
  size_t foreign = 0;
  for (const uint64_t sequence : found) {
    next_ = std::max(next_, sequence + 1);
    if (recover(sequence)) continue;
    ++foreign;
    if (ops_.unlink(path_of(sequence).c_str()) != 0)
      throw_errno(Code::unavailable, cat("cannot remove '", path_of(sequence), "'"));
  }
  if (foreign > 0)
    log::info(cat("spilled cache: removed ", foreign, " files of another model, format or version from '", options_.dir,
                  "'"));
  while (total_ > options_.bytes && !segments_.empty()) remove_oldest();  // the setting became smaller
}

/// False for a segment that is not of this namespace, or empty.
bool Disk::recover(uint64_t sequence) {
  Segment segment;
  segment.fd = UniqueFd(ops_.open(path_of(sequence).c_str(), O_RDONLY | O_CLOEXEC, 0));
  if (!segment.fd) throw_errno(Code::unavailable, cat("cannot read '", path_of(sequence), "'"));
  const int fd = segment.fd.get();
  std::error_code failed;
  const auto on_disk = fs::file_size(path_of(sequence), failed);
  if (failed) throw Error(Code::unavailable, cat("cannot read '", path_of(sequence), "': ", failed.message()));
  std::vector<std::byte> head(kSegmentHeader);
  if (!read(fd, head, 0) || decode_segment_header(head, options_.name_space) != sequence) return false;
  Segment& kept = segments_[sequence] = std::move(segment);
  head.resize(kRecordHeader);
  for (uint64_t at = kSegmentHeader; at + kRecordHeader <= on_disk;) {
    const auto header = read(fd, head, at) ? decode_record_header(head) : std::nullopt;
    if (!header || header->bytes > options_.largest_record || at + record_bytes(header->bytes) > on_disk) break;
    record(*header, sequence, at);
    at += record_bytes(header->bytes);
  }
  if (kept.names.empty()) {
    segments_.erase(sequence);
    return false;
  }
  grow(kept, on_disk);
  return true;
}

void Disk::record(const RecordHeader& header, uint64_t sequence, uint64_t offset) {
  const Meta& m = header.meta;
  const std::lock_guard lock(mutex_);
  index_[m.name] = {sequence, offset, header.bytes, m.cls};
  segments_.at(sequence).names.push_back(m.name);
}

void Disk::grow(Segment& segment, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  segment.size += bytes;
  total_ += bytes;
}

// ---- writing

void Disk::write(int fd, std::span<const std::byte> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ops_.pwrite(fd, bytes.data(), bytes.size(), static_cast<int64_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, cat("cannot write to '", options_.dir, "'"));
    if (n == 0) throw Error(Code::unavailable, cat("cannot write to '", options_.dir, "': nothing was taken"));
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
}

void Disk::start_segment() {
  close_segment();
  const uint64_t sequence = next_++;
  const std::string path = path_of(sequence);
  Segment segment;
  segment.fd = UniqueFd(ops_.open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!segment.fd) throw_errno(Code::unavailable, cat("cannot make '", path, "'"));
  try {
    write(segment.fd.get(), encode_segment_header(options_.name_space, sequence), 0);
  } catch (const Error&) {
    ops_.unlink(path.c_str());  // what is left of it would be taken for another version's
    throw;
  }
  {
    const std::lock_guard lock(mutex_);
    segments_[sequence] = std::move(segment);
  }
  grow(segments_.at(sequence), kSegmentHeader);
  writing_ = true;
  unsynced_ = 0;
}

/// Its pages are not needed in memory any more. That it could not be made durable shows when it is read.
void Disk::close_segment() noexcept {
  if (!std::exchange(writing_, false)) return;
  const int fd = segments_.rbegin()->second.fd.get();
  if (ops_.fdatasync(fd) == 0) ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

void Disk::remove_oldest() {
  std::string path;
  {
    const std::lock_guard lock(mutex_);
    const auto oldest = segments_.begin();
    if (segments_.size() == 1) writing_ = false;
    for (const Name& name : oldest->second.names)
      if (const auto at = index_.find(name); at != index_.end() && at->second.segment == oldest->first)
        index_.erase(at);
    total_ -= oldest->second.size;
    path = path_of(oldest->first);
    segments_.erase(oldest);
  }
  if (ops_.unlink(path.c_str()) != 0 && errno != ENOENT)
    throw_errno(Code::unavailable, cat("cannot remove '", path, "'"));
}

void Disk::append(const Meta& meta, std::span<const std::byte> payload) {
  if (payload.size() > options_.largest_record)
    throw Error(Code::internal, cat("spill: a record of ", payload.size(), " bytes"));
  const uint64_t more = record_bytes(payload.size());
  if (writing_ && segments_.rbegin()->second.size + more > segment_bytes_) close_segment();
  while (total_ + more + (writing_ ? 0 : kSegmentHeader) > options_.bytes) remove_oldest();
  if (!writing_) start_segment();
  const uint64_t sequence = segments_.rbegin()->first;
  Segment& segment = segments_.rbegin()->second;
  const RecordHeader header{meta, payload.size(), xxh64(payload)};
  try {
    write(segment.fd.get(), encode_record_header(header), segment.size);
    write(segment.fd.get(), payload, segment.size + kRecordHeader);
    unsynced_ += more;
    if (unsynced_ >= kSyncEvery) {
      if (ops_.fdatasync(segment.fd.get()) != 0)
        throw_errno(Code::unavailable, cat("cannot write to '", options_.dir, "'"));
      ::posix_fadvise(segment.fd.get(), 0, 0, POSIX_FADV_DONTNEED);
      unsynced_ = 0;
    }
  } catch (const Error&) {
    // Nothing is found behind a record that is cut off, so nothing may be written there. What it takes counts.
    writing_ = false;
    grow(segment, more);
    throw;
  }
  record(header, sequence, segment.size);
  grow(segment, more);
}

void Disk::clear() {
  while (!segments_.empty()) remove_oldest();
  writing_ = false;
}

// ---- reading

bool Disk::read(int fd, std::span<std::byte> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = ops_.pread(fd, bytes.data(), bytes.size(), static_cast<int64_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return true;
}

std::optional<std::vector<std::byte>> Disk::read(const Name& name, Meta& meta) {
  const auto at = index_.find(name);
  if (at == index_.end()) return std::nullopt;
  const Place place = at->second;
  const int fd = segments_.at(place.segment).fd.get();
  std::vector<std::byte> head(kRecordHeader), payload(place.bytes);
  if (read(fd, head, place.offset) && read(fd, payload, place.offset + kRecordHeader)) {
    const auto header = decode_record_header(head);
    if (header && header->meta.name == name && header->bytes == place.bytes && header->checksum == xxh64(payload)) {
      meta = header->meta;
      return payload;
    }
  }
  ++damaged_;
  erase(name);
  return std::nullopt;
}

// ---- what other threads ask

bool Disk::has(const Name& name) const {
  const std::lock_guard lock(mutex_);
  return index_.contains(name);
}

bool Disk::old(const Name& name) const {
  const std::lock_guard lock(mutex_);
  const auto at = index_.find(name);
  return at != index_.end() && segments_.size() > 1 && total_ + 2 * segment_bytes_ > options_.bytes &&
         at->second.segment == segments_.begin()->first;
}

std::optional<uint8_t> Disk::find(const Name& name) const {
  const std::lock_guard lock(mutex_);
  const auto at = index_.find(name);
  return at == index_.end() ? std::nullopt : std::optional(at->second.cls);
}

void Disk::erase(const Name& name) {
  const std::lock_guard lock(mutex_);
  index_.erase(name);
}

void Disk::forget() {
  const std::lock_guard lock(mutex_);
  index_.clear();
}

size_t Disk::records() const {
  const std::lock_guard lock(mutex_);
  return index_.size();
}

uint64_t Disk::bytes() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

}  // namespace glm53::spill
