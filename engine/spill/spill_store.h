// The spill tier: what the prefix cache evicts, kept in host memory and on disk under the name of its prefix.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/file.h"
#include "engine/spill/spill_disk.h"

namespace glm53::spill {

struct StoreOptions {
  uint64_t memory_bytes = 0;  ///< of payloads that stay in memory; 0 = only what waits to be written
  DiskOptions disk;           ///< bytes 0 = no disk
  /// What may wait to be written, beside memory_bytes.
  uint64_t write_queue_bytes = uint64_t{256} << 20;
  std::chrono::milliseconds pause{30000};  ///< without writes after the system refused one
};

using Payload = std::shared_ptr<const std::vector<std::byte>>;

struct Fetched {
  std::vector<Payload> payloads;  ///< in the order of the names asked for; empty when one is missing
  std::vector<Name> missing;      ///< not there, damaged, or of other tokens; forgotten
};

/// What can be asked of a store by whoever decides what is spilled and restored.
class Directory {
 public:
  virtual ~Directory() = default;
  virtual bool has(const Name& name) const = 0;
  /// Whether put() would keep something new: it is not there, or on its way out.
  virtual bool wants(const Name& name) const = 0;
  /// Class of a snapshot that is there.
  virtual std::optional<uint8_t> cls_of(const Name& name) const = 0;
};

struct StoreStats {
  uint64_t memory_records = 0, memory_bytes = 0, disk_records = 0, disk_bytes = 0;
  uint64_t put = 0, dropped = 0, written = 0, fetched = 0, missing = 0, damaged = 0, failures = 0;
  bool disk_ok = false;  ///< there is one, it has been read, and writes are not paused
  bool operator==(const StoreStats&) const = default;
};

/// One thread of its own touches files: reads before writes. All functions may be called by any thread and wait for no
/// file. Newest things win: when memory is full, what was put or fetched longest ago goes, and what is not yet written
/// is dropped only while the disk takes nothing; a full write queue drops what comes.
class Store final : public Directory {
 public:
  /// Throws Error(config) for sizes that cannot work. A disk that cannot be used is a warning in the log, and the store
  /// goes on without it.
  explicit Store(StoreOptions options, FileOps& ops = FileOps::real());
  /// Writes what waits, unless the disk refuses.
  ~Store() override;
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  bool has(const Name& name) const override;
  bool wants(const Name& name) const override;
  std::optional<uint8_t> cls_of(const Name& name) const override;
  void put(const Meta& meta, std::vector<std::byte> payload);
  /// `done` is called once, on the store's thread, and must not throw; not at all when the store ends before. Of each
  /// meta the name, position and tokens must be what is stored.
  void fetch(std::vector<Meta> wanted, std::function<void(Fetched)> done);
  /// No fetch calls back after this has returned; those that were asked for are dropped.
  void cancel_fetches();
  void erase(const Name& name);
  void clear();
  StoreStats stats() const;
  /// Waits until the files have been read and nothing waits that could be written.
  void settle();

 private:
  struct Entry {
    Meta meta;
    Payload payload;
    bool unwritten = false;
  };
  using Entries = std::list<Entry>;  // least recently used first
  struct Job {
    std::vector<Meta> wanted;
    std::function<void(Fetched)> done;
  };
  using Lock = std::unique_lock<std::mutex>;

  void loop();
  void open_disk();
  Fetched run(const Job& job);
  Payload payload_of(const Meta& wanted);
  void write_one(Lock& lock);
  bool can_write() const;
  bool expects_disk() const;
  bool make_room(uint64_t bytes);
  void drop(Entries::iterator at);

  const StoreOptions options_;
  FileOps& ops_;
  mutable std::mutex mutex_;
  std::condition_variable wake_, settled_;
  // Guarded by mutex_; the disk's files are the thread's own.
  std::unique_ptr<Disk> disk_;
  Entries entries_;
  std::unordered_map<Name, Entries::iterator, NameHash> in_memory_;
  std::deque<Job> jobs_;
  std::vector<Name> erased_;
  size_t unwritten_ = 0;
  bool clear_ = false, opened_ = false, busy_ = false, fetching_ = false, ending_ = false;
  std::optional<std::chrono::steady_clock::time_point> paused_;  // until then
  StoreStats stats_;
  std::thread thread_;
};

}  // namespace glm53::spill
