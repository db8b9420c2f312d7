// The spill tier's files: a log of records in segments, with its index in memory.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/error.h"
#include "common/file.h"
#include "engine/spill/spill_format.h"

namespace glm53::spill {

struct DiskOptions {
  std::string dir;              ///< one rank's own; made when it is not there
  std::string name_space;       ///< 64 hex digits
  uint64_t bytes = 0;           ///< never more than this, headers included
  uint64_t largest_record = 0;  ///< bytes of the largest payload
};

/// Throws Error(config) when `bytes` hold less than four of the largest records.
void check_size(const DiskOptions& options);

/// One thread reads and writes; has(), old(), find(), erase(), forget(), records() and bytes() may be called by any,
/// and wait for no file.
class Disk {
 public:
  /// Takes over what is in the folder: records of whole segments of this namespace; other segments are removed, files
  /// of other names left alone. Throws as check_size(), and Error(busy) when another process uses the folder,
  /// Error(unavailable) when it cannot be made or read.
  explicit Disk(DiskOptions options, FileOps& ops = FileOps::real());
  Disk(const Disk&) = delete;
  Disk& operator=(const Disk&) = delete;

  bool has(const Name& name) const;
  /// Whether the record will go soon: when the next segment or the one after it needs room.
  bool old(const Name& name) const;
  /// Its class; nullopt when there is none.
  std::optional<uint8_t> find(const Name& name) const;
  /// Appends; makes room by removing the oldest segments. Throws Error(unavailable) when the system refuses (disk full,
  /// I/O error); what was written before stays readable, and a later call may be tried.
  void append(const Meta& meta, std::span<const std::byte> payload);
  /// The payload, and its header's words about it. nullopt when it is not there any more, cannot be read or does not
  /// fit its checksum; then it is forgotten.
  std::optional<std::vector<std::byte>> read(const Name& name, Meta& meta);
  void erase(const Name& name);
  /// Finds nothing any more; the files stay until clear() or until there is no room.
  void forget();
  /// Removes all segments.
  void clear();

  size_t records() const;
  uint64_t bytes() const;
  uint64_t damaged() const { return damaged_; }

 private:
  struct Place {
    uint64_t segment = 0, offset = 0, bytes = 0;
    uint8_t cls = 0;
  };
  struct Segment {
    UniqueFd fd;
    uint64_t size = 0;
    std::vector<Name> names;
  };

  std::string path_of(uint64_t sequence) const;
  void recover();
  bool recover(uint64_t sequence);
  void start_segment();
  void close_segment() noexcept;
  void remove_oldest();
  void write(int fd, std::span<const std::byte> bytes, uint64_t offset);
  bool read(int fd, std::span<std::byte> bytes, uint64_t offset);
  void record(const RecordHeader& header, uint64_t sequence, uint64_t offset);
  void grow(Segment& segment, uint64_t bytes);

  const DiskOptions options_;
  FileOps& ops_;
  const uint64_t segment_bytes_;
  std::optional<UniqueFd> lock_;
  mutable std::mutex mutex_;  // of the next three where they change, and where other threads look
  std::map<uint64_t, Segment> segments_;
  std::unordered_map<Name, Place, NameHash> index_;
  uint64_t total_ = 0;
  uint64_t next_ = 1, damaged_ = 0;
  bool writing_ = false;   // the last segment may be appended to
  uint64_t unsynced_ = 0;  // bytes of it
};

}  // namespace glm53::spill
