#include "engine/spill/spill_store.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::spill {

Store::Store(StoreOptions options, FileOps& ops) : options_(std::move(options)), ops_(ops) {
  if (options_.disk.bytes > 0) check_size(options_.disk);
  thread_ = std::thread([this] { loop(); });
}

Store::~Store() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    jobs_.clear();
  }
  wake_.notify_all();
  thread_.join();
}

// ---- any thread

bool Store::has(const Name& name) const {
  const std::lock_guard lock(mutex_);
  return in_memory_.contains(name) || (disk_ && disk_->has(name));
}

bool Store::wants(const Name& name) const {
  const std::lock_guard lock(mutex_);
  return !in_memory_.contains(name) && !(disk_ && disk_->has(name) && !disk_->old(name));
}

std::optional<uint8_t> Store::cls_of(const Name& name) const {
  const std::lock_guard lock(mutex_);
  if (const auto at = in_memory_.find(name); at != in_memory_.end()) return at->second->meta.cls;
  return disk_ ? disk_->find(name) : std::nullopt;
}

/// Before the files have been read, it is taken for granted that they will be.
bool Store::expects_disk() const {
  return opened_ ? disk_ != nullptr : options_.disk.bytes > 0;
}

bool Store::can_write() const {
  return expects_disk() && (!paused_ || std::chrono::steady_clock::now() >= *paused_);
}

void Store::drop(Entries::iterator at) {
  stats_.memory_bytes -= at->payload->size();
  if (at->unwritten) --unwritten_;
  in_memory_.erase(at->meta.name);
  entries_.erase(at);
}

/// Drops what is written already, oldest first; what is not as well, when there is no disk that takes it.
bool Store::make_room(uint64_t bytes) {
  const bool queue = can_write();
  const uint64_t limit = options_.memory_bytes + (queue && bytes + unwritten_ > 0 ? options_.write_queue_bytes : 0);
  for (auto at = entries_.begin(); at != entries_.end() && stats_.memory_bytes + bytes > limit;) {
    const auto next = std::next(at);
    if (!at->unwritten || !queue) drop(at);
    at = next;
  }
  return stats_.memory_bytes + bytes <= limit;
}

void Store::put(const Meta& meta, std::vector<std::byte> payload) {
  const std::lock_guard lock(mutex_);
  ++stats_.put;
  if (const auto at = in_memory_.find(meta.name); at != in_memory_.end()) drop(at->second);
  if (!make_room(payload.size())) {
    ++stats_.dropped;
    return;
  }
  stats_.memory_bytes += payload.size();
  Entry entry{meta, std::make_shared<const std::vector<std::byte>>(std::move(payload)), expects_disk()};
  if (entry.unwritten) ++unwritten_;
  entries_.push_back(std::move(entry));
  in_memory_[meta.name] = std::prev(entries_.end());
  wake_.notify_all();
}

void Store::fetch(std::vector<Meta> wanted, std::function<void(Fetched)> done) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({std::move(wanted), std::move(done)});
  wake_.notify_all();
}

void Store::cancel_fetches() {
  Lock lock(mutex_);
  jobs_.clear();
  settled_.wait(lock, [this] { return !fetching_; });
}

void Store::erase(const Name& name) {
  const std::lock_guard lock(mutex_);
  if (const auto at = in_memory_.find(name); at != in_memory_.end()) drop(at->second);
  if (disk_) disk_->erase(name);
}

void Store::clear() {
  const std::lock_guard lock(mutex_);
  while (!entries_.empty()) drop(entries_.begin());
  if (!disk_) return;
  disk_->forget();
  clear_ = true;
  wake_.notify_all();
}

StoreStats Store::stats() const {
  const std::lock_guard lock(mutex_);
  StoreStats s = stats_;
  s.memory_records = entries_.size();
  s.disk_ok = disk_ && !paused_;
  if (disk_) {
    s.disk_records = disk_->records();
    s.disk_bytes = disk_->bytes();
  }
  return s;
}

void Store::settle() {
  Lock lock(mutex_);
  settled_.wait(lock,
                [this] { return opened_ && !busy_ && !clear_ && jobs_.empty() && (unwritten_ == 0 || !can_write()); });
}

// ---- the thread

void Store::open_disk() {
  if (options_.disk.bytes == 0) return;
  try {
    auto disk = std::make_unique<Disk>(options_.disk, ops_);
    log::info(cat("spilled cache: ", disk->records(), " records, ", human_bytes(static_cast<int64_t>(disk->bytes())),
                  " in '", options_.disk.dir, "'"));
    const std::lock_guard lock(mutex_);
    disk_ = std::move(disk);
  } catch (const std::exception& e) {
    log::warn(cat("spilled cache: nothing is kept on disk: ", e.what()));
    const std::lock_guard lock(mutex_);
    ++stats_.failures;
    for (Entry& entry : entries_) entry.unwritten = false;
    unwritten_ = 0;
  }
}

Payload Store::payload_of(const Meta& wanted) {
  Meta found;
  Payload payload;
  {
    const std::lock_guard lock(mutex_);
    if (const auto at = in_memory_.find(wanted.name); at != in_memory_.end()) {
      entries_.splice(entries_.end(), entries_, at->second);
      found = at->second->meta;
      payload = at->second->payload;
    }
  }
  if (!payload && disk_) {
    if (auto read = disk_->read(wanted.name, found))
      payload = std::make_shared<const std::vector<std::byte>>(std::move(*read));
  }
  const bool same = payload && found.position == wanted.position && found.tokens == wanted.tokens;
  return same ? payload : nullptr;
}

Fetched Store::run(const Job& job) {
  Fetched out;
  for (const Meta& wanted : job.wanted) {
    Payload payload = payload_of(wanted);
    if (payload)
      out.payloads.push_back(std::move(payload));
    else
      out.missing.push_back(wanted.name);
  }
  if (!out.missing.empty()) out.payloads.clear();
  for (const Name& name : out.missing) erase(name);
  const std::lock_guard lock(mutex_);
  stats_.fetched += out.payloads.size();
  stats_.missing += out.missing.size();
  if (disk_) stats_.damaged = disk_->damaged();
  return out;
}

/// The oldest that waits. A disk that refuses is left alone for a while.
void Store::write_one(Lock& lock) {
  const auto at = std::find_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.unwritten; });
  if (at == entries_.end()) return;
  const Meta meta = at->meta;
  const Payload payload = at->payload;
  const bool retried = paused_.has_value();
  lock.unlock();
  std::optional<std::string> failure;
  try {
    disk_->append(meta, *payload);
  } catch (const std::exception& e) {
    failure = e.what();
  }
  lock.lock();
  if (failure) {
    ++stats_.failures;
    paused_ = std::chrono::steady_clock::now() + options_.pause;
    if (!retried) log::warn(cat("spilled cache: writing to disk pauses: ", *failure));
    make_room(0);
    return;
  }
  if (retried) log::info("spilled cache: writing to disk goes on");
  paused_.reset();
  ++stats_.written;
  // It may have been dropped, or replaced, meanwhile.
  const auto now = in_memory_.find(meta.name);
  if (now != in_memory_.end() && now->second->payload == payload) {
    now->second->unwritten = false;
    --unwritten_;
  }
  make_room(0);
}

void Store::loop() {
  open_disk();
  Lock lock(mutex_);
  opened_ = true;
  make_room(0);
  for (;;) {
    busy_ = false;
    settled_.notify_all();
    const auto work = [this] { return ending_ || clear_ || !jobs_.empty() || (unwritten_ > 0 && can_write()); };
    if (unwritten_ > 0 && paused_ && !work())
      wake_.wait_until(lock, *paused_, work);
    else
      wake_.wait(lock, work);
    busy_ = true;
    if (std::exchange(clear_, false)) {
      lock.unlock();
      try {
        disk_->clear();
      } catch (const std::exception& e) {
        log::warn(cat("spilled cache: ", e.what()));
      }
      lock.lock();
    } else if (!jobs_.empty()) {
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      fetching_ = true;
      lock.unlock();
      job.done(run(job));
      lock.lock();
      fetching_ = false;
    } else if (unwritten_ > 0 && can_write()) {
      write_one(lock);
    } else if (ending_) {
      return;
    }
  }
}

}  // namespace glm53::spill
