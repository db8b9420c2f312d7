#include "engine/loader/block_reader.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <exception>
#include <fcntl.h>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr uint64_t kAlign = 4096;  // what every file system with O_DIRECT takes, for addresses, offsets and lengths

uint64_t down(uint64_t v) {
  return v / kAlign * kAlign;
}
uint64_t up(uint64_t v) {
  return down(v + kAlign - 1);
}

/// Memory that O_DIRECT can read into.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t bytes)
      : memory_(std::make_unique_for_overwrite<std::byte[]>(bytes + kAlign)), bytes_(bytes + kAlign) {}
  std::byte* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return memory_.get() + (up(address) - address);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  size_t bytes_;
};

struct File {
  std::string path;
  UniqueFd plain, direct;
  std::atomic<bool> use_direct{false};
};

struct Slot {
  explicit Slot(size_t room) : memory(room) {}
  AlignedBytes memory;
  size_t ready = 0;  ///< number of the block that lies here, plus one
  std::span<const std::byte> bytes;
  std::exception_ptr error;
};

}  // namespace

void append_blocks(std::vector<FileBlock>& blocks, size_t file, uint64_t begin, uint64_t end,
                   const ReadOptions& options) {
  const uint64_t step = std::max<uint64_t>(options.block, 1);
  while (begin < end) {
    const uint64_t to = std::min(end, (begin / step + 1) * step);
    blocks.push_back({file, begin, to});
    begin = to;
  }
}

struct BlockReader::Impl {
  Impl(const std::vector<std::string>& paths, std::vector<FileBlock> list, const ReadOptions& options, Check by,
       FileOps& with)
      : files(paths.size()), blocks(std::move(list)), check(std::move(by)), ops(with), drop_pages(options.direct) {
    for (size_t i = 0; i < paths.size(); ++i) open(files[i], paths[i], options.direct);
    size_t largest = 0, total = 0;
    for (const FileBlock& block : blocks) {
      largest = std::max<size_t>(largest, block.end - block.begin);
      total += block.end - block.begin;
    }
    const size_t room = largest + 2 * kAlign;
    const size_t wanted = std::min(options.memory, total + room) / room;
    const size_t count = std::clamp<size_t>(wanted, 1, std::max<size_t>(blocks.size(), 1));
    for (size_t i = 0; i < count; ++i) slots.emplace_back(room);
    const auto workers = std::min(static_cast<size_t>(std::max(options.threads, 1)), count);
    for (size_t i = 0; i < workers && !blocks.empty(); ++i) start_worker();
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    room_free.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  /// One thread is enough to go on with.
  void start_worker() {
    try {
      threads.emplace_back([this] { work(); });
    } catch (const std::system_error& e) {
      if (threads.empty()) throw Error(Code::unavailable, cat("a reading thread cannot be started: ", e.what()));
    }
  }

  void open(File& file, const std::string& path, bool direct) const {
    file.path = path;
    file.plain = UniqueFd(ops.open(path.c_str(), O_RDONLY | O_CLOEXEC, 0));
    if (!file.plain) throw_errno(Code::unavailable, cat("cannot read '", path, "'"));
    if (!direct) return;
    file.direct = UniqueFd(ops.open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT, 0));
    file.use_direct = static_cast<bool>(file.direct);  // a refusal is no error
  }

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      room_free.wait(lock, [this] { return stop || (asked < blocks.size() && asked < given_back + slots.size()); });
      if (stop) return;
      const size_t number = asked++;
      Slot& slot = slots[number % slots.size()];
      lock.unlock();
      std::exception_ptr error;
      try {
        slot.bytes = read(blocks[number], slot.memory);
        if (check) check(number, slot.bytes);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      slot.error = error;
      slot.ready = number + 1;
      filled.notify_all();
    }
  }

  std::span<const std::byte> read(const FileBlock& block, AlignedBytes& memory) {
    File& file = files[block.file];
    if (file.use_direct && read_direct(file, block, memory.data()))
      return {memory.data() + (block.begin - down(block.begin)), block.end - block.begin};
    const auto wanted = static_cast<size_t>(block.end - block.begin);
    for (size_t got = 0; got < wanted;) {
      const ssize_t n = pread(file.plain.get(), memory.data() + got, wanted - got, block.begin + got);
      if (n < 0) failed(file);
      if (n == 0) ends_early(file, block, block.begin + got);
      got += static_cast<size_t>(n);
    }
    // Only a hint, so that a load does not leave the file in memory beside the weights.
    if (drop_pages)
      (void)posix_fadvise(file.plain.get(), static_cast<off_t>(block.begin), static_cast<off_t>(wanted),
                          POSIX_FADV_DONTNEED);
    return {memory.data(), wanted};
  }

  /// False where the file system does not do it after all; from then on the file is read plainly.
  bool read_direct(File& file, const FileBlock& block, std::byte* to) {
    const uint64_t begin = down(block.begin), size = up(block.end) - begin;
    for (uint64_t got = 0; begin + got < block.end;) {
      const ssize_t n = pread(file.direct.get(), to + got, static_cast<size_t>(size - got), begin + got);
      if (n < 0 && errno == EINVAL) return file.use_direct = false;
      if (n < 0) failed(file);
      const uint64_t now = got + static_cast<uint64_t>(n);
      if (begin + now >= block.end) break;
      if (n == 0) ends_early(file, block, begin + now);
      if (down(now) == got) return file.use_direct = false;  // the rest would begin off the alignment
      got = down(now);
    }
    return true;
  }

  ssize_t pread(int fd, std::byte* to, size_t n, uint64_t at) const {
    for (;;) {
      const ssize_t got = ops.pread(fd, to, n, static_cast<int64_t>(at));
      if (got >= 0 || errno != EINTR) return got;
    }
  }

  [[noreturn]] static void failed(const File& file) {
    throw_errno(Code::unavailable, cat("cannot read '", file.path, "'"));
  }
  [[noreturn]] static void ends_early(const File& file, const FileBlock& block, uint64_t at) {
    throw Error(Code::weights, cat("'", file.path, "' ends at byte ", at, ", before byte ", block.end),
                "the file was cut short; make or download it again");
  }

  std::vector<File> files;
  std::vector<FileBlock> blocks;
  Check check;
  FileOps& ops;
  const bool drop_pages;
  std::vector<Slot> slots;
  std::mutex mutex;
  std::condition_variable room_free, filled;
  size_t asked = 0, given_back = 0;
  bool held = false, stop = false;
  std::vector<std::thread> threads;
};

BlockReader::BlockReader(const std::vector<std::string>& files, std::vector<FileBlock> blocks,
                         const ReadOptions& options, Check check, FileOps& ops)
    : impl_(std::make_unique<Impl>(files, std::move(blocks), options, std::move(check), ops)) {}
BlockReader::~BlockReader() = default;

std::span<const std::byte> BlockReader::next() {
  Impl& i = *impl_;
  std::unique_lock lock(i.mutex);
  if (i.held) {
    ++i.given_back;
    i.held = false;
    i.room_free.notify_all();
  }
  if (i.given_back == i.blocks.size())
    throw Error(Code::internal, cat("block ", i.given_back, " of ", i.blocks.size(), " was asked for"));
  const Slot& slot = i.slots[i.given_back % i.slots.size()];
  i.filled.wait(lock, [&] { return slot.ready == i.given_back + 1; });
  if (slot.error) std::rethrow_exception(slot.error);
  i.held = true;
  return slot.bytes;
}

size_t BlockReader::memory() const {
  size_t bytes = 0;
  for (const Slot& slot : impl_->slots) bytes += slot.memory.bytes();
  return bytes;
}
size_t BlockReader::plain_files() const {
  return static_cast<size_t>(
      std::count_if(impl_->files.begin(), impl_->files.end(), [](const File& f) { return !f.use_direct; }));
}

}  // namespace glm53
