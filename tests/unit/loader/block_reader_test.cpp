// Blocks of any size and place arrive in order and unchanged, whatever the file system does.
#include "engine/loader/block_reader.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <random>
#include <set>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::TempDir;

std::string content(size_t bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::string out(bytes, '\0');
  for (char& c : out) c = static_cast<char>(random());
  return out;
}

/// What a file system may do to a reader.
class OddFiles final : public FileOps {
 public:
  bool refuse_open = false;  ///< O_DIRECT is refused when the file is opened
  bool refuse_read = false;  ///< or only when it is read
  size_t most = SIZE_MAX;    ///< bytes a read gives
  int fail_at = -1;          ///< number of the read that fails
  int open(const char* path, int flags, int mode) override {
    if ((flags & O_DIRECT) == 0) return FileOps::open(path, flags, mode);
    if (refuse_open) {
      errno = EINVAL;
      return -1;
    }
    const int fd = FileOps::open(path, flags & ~O_DIRECT, mode);  // rules of O_DIRECT are checked here, on any disk
    const std::lock_guard lock(mutex_);
    direct_.insert(fd);
    return fd;
  }
  ssize_t pread(int fd, void* data, size_t n, int64_t offset) override {
    bool direct = false;
    {
      const std::lock_guard lock(mutex_);
      direct = direct_.contains(fd);
      ++reads;
      direct_reads += direct;
      if (fail_at >= 0 && reads > fail_at) {
        errno = EIO;
        return -1;
      }
      if (reads % 5 == 0) {
        errno = EINTR;
        return -1;
      }
    }
    if (direct &&
        (refuse_read || offset % 4096 != 0 || n % 4096 != 0 || reinterpret_cast<uintptr_t>(data) % 4096 != 0)) {
      errno = EINVAL;
      return -1;
    }
    return FileOps::pread(fd, data, std::min(n, most), offset);
  }
  int reads = 0, direct_reads = 0;

 private:
  std::mutex mutex_;
  std::set<int> direct_;
};

struct Fixture {
  TempDir dir;
  std::vector<std::string> paths, contents;
  explicit Fixture(const std::vector<size_t>& sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      paths.push_back(dir / ("file" + std::to_string(i)));
      contents.push_back(content(sizes[i], static_cast<uint32_t>(i)));
      testing::write_text(paths.back(), contents.back());
    }
  }
  /// Blocks all over the files, in no order, some overlapping, some empty of whole pages.
  std::vector<FileBlock> blocks(int count, size_t longest) const {
    std::mt19937 random(9);
    std::vector<FileBlock> out;
    while (static_cast<int>(out.size()) < count) {
      const size_t file = random() % paths.size(), size = contents[file].size();
      const uint64_t begin = random() % size;
      out.push_back({file, begin, std::min<uint64_t>(size, begin + 1 + random() % longest)});
    }
    for (size_t f = 0; f < paths.size(); ++f) out.push_back({f, contents[f].size() - 1, contents[f].size()});
    return out;
  }
  void expect(BlockReader& reader, const std::vector<FileBlock>& blocks) const {
    for (const FileBlock& b : blocks) {
      const auto bytes = reader.next();
      REQUIRE(bytes.size() == b.end - b.begin);
      REQUIRE(std::memcmp(bytes.data(), contents[b.file].data() + b.begin, bytes.size()) == 0);
    }
  }
};

TEST_CASE("blocks of odd sizes and places, read ahead") {
  const Fixture files({1, 4095, 4096, 4097, 70'001, 131'072});
  const auto blocks = files.blocks(200, 9000);
  for (const int threads : {1, 8})
    for (const size_t memory : {size_t{1}, size_t{100'000}, size_t{1} << 24})
      for (const bool direct : {false, true}) {
        CAPTURE(threads);
        CAPTURE(memory);
        CAPTURE(direct);
        OddFiles odd;
        BlockReader reader(files.paths, blocks, {.threads = threads, .memory = memory, .direct = direct}, {}, odd);
        files.expect(reader, blocks);
        CHECK(reader.memory() <= std::max<size_t>(memory, 9000 + 2 * 4096) + 32 * 4096);
        CHECK((odd.direct_reads > 0) == direct);
        CHECK(reader.plain_files() == (direct ? 0 : files.paths.size()));
        CHECK(caught([&] { (void)reader.next(); }).says("was asked for"));
      }
}

TEST_CASE("a file system without O_DIRECT, and one that says so only when read") {
  const Fixture files({50'000, 4096, 7});
  const auto blocks = files.blocks(60, 20'000);
  for (const bool at_open : {true, false}) {
    OddFiles odd;
    (at_open ? odd.refuse_open : odd.refuse_read) = true;
    BlockReader reader(files.paths, blocks, {}, {}, odd);
    files.expect(reader, blocks);
    CHECK(reader.plain_files() == 3);
  }
  BlockReader real(files.paths, blocks, {});  // whatever this machine's disk is
  files.expect(real, blocks);
}

TEST_CASE("short reads are continued") {
  const Fixture files({90'001});
  const auto blocks = files.blocks(40, 30'000);
  for (const size_t most : {size_t{1000}, size_t{4096}, size_t{5000}})
    for (const bool direct : {false, true}) {
      OddFiles odd;
      odd.most = most;
      BlockReader reader(files.paths, blocks, {.direct = direct}, {}, odd);
      files.expect(reader, blocks);
    }
}

TEST_CASE("what cannot be read is told by the block's turn") {
  const Fixture files({20'000});
  const std::vector<FileBlock> blocks = {{0, 0, 100}, {0, 19'000, 20'001}, {0, 5, 6}};
  for (const bool direct : {false, true}) {
    BlockReader reader(files.paths, blocks, {.direct = direct});
    CHECK(reader.next().size() == 100);
    const auto cut = caught([&] { (void)reader.next(); });
    CHECK(cut.code == Code::weights);
    CHECK(cut.says("ends at byte 20000, before byte 20001"));
  }
  CHECK(caught([&] { BlockReader({files.dir / "none"}, blocks, {}); }).code == Code::unavailable);
  OddFiles odd;
  odd.fail_at = 0;
  BlockReader broken(files.paths, blocks, {}, {}, odd);
  CHECK(caught([&] { (void)broken.next(); }).says("cannot read"));
  BlockReader refused(files.paths, blocks, {}, [](size_t number, std::span<const std::byte>) {
    if (number == 0) throw Error(Code::weights, "not as written");
  });
  CHECK(caught([&] { (void)refused.next(); }).says("not as written"));
  const BlockReader unread(files.paths, blocks, {.threads = 3});  // goes away with reads in flight
  BlockReader nothing({}, {}, {});
  CHECK(caught([&] { (void)nothing.next(); }).code == Code::internal);
}

TEST_CASE("blocks end on multiples") {
  std::vector<FileBlock> blocks;
  append_blocks(blocks, 3, 10, 35, {.block = 16});
  REQUIRE(blocks.size() == 3);
  CHECK(blocks[0].end == 16);
  CHECK(blocks[1].end == 32);
  CHECK(blocks[2].end == 35);
  CHECK(blocks[2].file == 3);
  append_blocks(blocks, 0, 5, 5, {.block = 16});
  CHECK(blocks.size() == 3);
}

}  // namespace
}  // namespace glm53
