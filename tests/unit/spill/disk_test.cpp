#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "engine/spill/spill_disk.h"
#include "tests/temp_dir.h"
#include "tests/unit/spill/faulty.h"

using namespace glm53;
using namespace glm53::spill;
using namespace glm53::spill::test;
using glm53::test::TempDir;
namespace fs = std::filesystem;

namespace {

constexpr uint64_t kPayload = 40, kRecord = kRecordHeader + kPayload;

bool reads(Disk& disk, int number, size_t bytes = kPayload, Kind kind = Kind::block) {
  Meta m;
  const auto payload = disk.read(meta_of(number, kind).name, m);
  if (!payload) return false;
  CHECK(*payload == payload_of(number, bytes));
  CHECK(m == meta_of(number, kind));
  return true;
}

void fill(Disk& disk, int from, int to) {
  for (int i = from; i < to; ++i) disk.append(meta_of(i), payload_of(i, kPayload));
}

uint64_t bytes_in(const std::string& dir) {
  uint64_t sum = 0;
  for (const auto& e : fs::directory_iterator(dir)) sum += fs::file_size(e.path());
  return sum;
}

std::vector<std::string> segments(const std::string& dir) {
  std::vector<std::string> out;
  for (const auto& e : fs::directory_iterator(dir))
    if (segment_sequence(e.path().filename().string())) out.push_back(e.path().string());
  std::sort(out.begin(), out.end());
  return out;
}

/// Thousands of them: not made durable.
void write_quickly(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

/// A folder with one segment of three records, and its content.
struct Written {
  TempDir dir;
  std::string path, content;
  Written() {
    Disk disk(disk_options(dir.path(), 1 << 20, kPayload));
    fill(disk, 0, 3);
    path = segments(dir.path()).at(0);
    content = read_file(path);
    REQUIRE(content.size() == kSegmentHeader + 3 * kRecord);
  }
};

}  // namespace

TEST_CASE("spill files: what was written is read, also by the next process") {
  TempDir dir;
  const auto options = disk_options(dir.path(), 1 << 20, 5000);
  for (const bool again : {false, true}) {
    Disk disk(options);
    if (!again) {
      CHECK_FALSE(disk.has(meta_of(0).name));
      fill(disk, 0, 20);
      disk.append(meta_of(0, Kind::snapshot), payload_of(0, 5000));
      disk.append(meta_of(21), {});
    }
    CHECK(disk.records() == 22);
    for (int i = 0; i < 20; ++i) CHECK(reads(disk, i));
    CHECK(reads(disk, 0, 5000, Kind::snapshot));
    CHECK(reads(disk, 21, 0));
    CHECK(disk.find(meta_of(0, Kind::snapshot).name) == 3);
    CHECK_FALSE(disk.find(meta_of(77).name));
    CHECK(disk.damaged() == 0);
  }
}

TEST_CASE("spill files: of two records of a name the newer counts; nothing is found after clear") {
  TempDir dir;
  const auto options = disk_options(dir.path(), 1 << 20, kPayload);
  {
    Disk disk(options);
    disk.append(meta_of(1), payload_of(9, kPayload));
    disk.append(meta_of(1), payload_of(1, kPayload));
    CHECK(reads(disk, 1));
  }
  {
    Disk disk(options);
    CHECK(disk.records() == 1);
    CHECK(reads(disk, 1));
    disk.clear();
    CHECK(disk.records() == 0);
    CHECK(disk.bytes() == 0);
    fill(disk, 2, 3);
  }
  Disk disk(options);
  CHECK(disk.records() == 1);
  CHECK(reads(disk, 2));
}

TEST_CASE("spill files: cut off anywhere, the whole records in front are found and nothing else") {
  const Written w;
  for (size_t size = 0; size < w.content.size(); ++size) {
    CAPTURE(size);
    write_quickly(w.path, w.content.substr(0, size));
    Disk disk(disk_options(w.dir.path(), 1 << 20, kPayload));
    const size_t whole = size < kSegmentHeader ? 0 : (size - kSegmentHeader) / kRecord;
    REQUIRE(disk.records() == whole);
    for (size_t i = 0; i < whole; ++i) REQUIRE(reads(disk, static_cast<int>(i)));
    // A segment without a record is of no use; and writing goes on beside the others.
    REQUIRE(fs::exists(w.path) == (whole > 0));
    fill(disk, 5, 6);
    REQUIRE(reads(disk, 5));
    disk.clear();
  }
}

TEST_CASE("spill files: a changed byte is never served") {
  const Written w;
  for (size_t at = 0; at < w.content.size(); ++at) {
    CAPTURE(at);
    std::string changed = w.content;
    changed[at] = static_cast<char>(changed[at] ^ 0x20);
    write_quickly(w.path, changed);
    Disk disk(disk_options(w.dir.path(), 1 << 20, kPayload));
    const int record = at < kSegmentHeader ? -1 : static_cast<int>((at - kSegmentHeader) / kRecord);
    const bool in_header = record >= 0 && (at - kSegmentHeader) % kRecord < kRecordHeader;
    for (int i = 0; i < 3; ++i) {
      const bool good = record >= 0 && (in_header ? i < record : i != record);
      REQUIRE(reads(disk, i) == good);
      REQUIRE(disk.has(meta_of(i).name) == good);
    }
    REQUIRE(disk.damaged() == (record >= 0 && !in_header ? 1 : 0));
    disk.clear();
  }
}

TEST_CASE("spill files: blocks that a power cut left empty are never served") {
  const Written w;
  std::string zeroed = w.content;
  const size_t second = kSegmentHeader + kRecord;
  zeroed.replace(second + kRecordHeader, kPayload, kPayload, '\0');
  write_quickly(w.path, zeroed);
  {
    Disk disk(disk_options(w.dir.path(), 1 << 20, kPayload));
    CHECK(reads(disk, 0));
    CHECK_FALSE(reads(disk, 1));
    CHECK(reads(disk, 2));
    disk.clear();
  }
  zeroed.replace(second, kRecord, kRecord, '\0');
  write_quickly(w.path, zeroed);
  Disk disk(disk_options(w.dir.path(), 1 << 20, kPayload));
  CHECK(disk.records() == 1);
  CHECK(reads(disk, 0));
}

TEST_CASE("spill files: another model's segments are removed, others' files stay") {
  const Written w;
  write_file(w.dir / "segment-1.spill", "not one of ours");
  write_file(w.dir / "notes", "of the operator");
  auto options = disk_options(w.dir.path(), 1 << 20, kPayload);
  options.name_space = sha256_hex("another model");
  {
    Disk disk(options);
    CHECK(disk.records() == 0);
    CHECK(segments(w.dir.path()).empty());
    fill(disk, 0, 1);
  }
  CHECK(read_file(w.dir / "segment-1.spill") == "not one of ours");
  CHECK(read_file(w.dir / "notes") == "of the operator");
  // Under the name of another segment it is none.
  const std::string path = segments(w.dir.path()).at(0);
  fs::rename(path, w.dir / segment_name(77));
  Disk disk(options);
  CHECK(disk.records() == 0);
}

TEST_CASE("spill files: never more than the bound, oldest segments first") {
  TempDir dir;
  const uint64_t bound = 20 * kRecord + 2000;
  {
    Disk disk(disk_options(dir.path(), bound, kPayload));
    for (int i = 0; i < 200; ++i) {
      fill(disk, i, i + 1);
      REQUIRE(disk.bytes() <= bound);
      REQUIRE(bytes_in(dir.path()) == disk.bytes());
      REQUIRE(reads(disk, i));
    }
    CHECK(disk.records() >= 14);
    CHECK_FALSE(disk.has(meta_of(0).name));
    // What goes next says so.
    int first = 0;
    while (!disk.has(meta_of(first).name)) ++first;
    CHECK(disk.old(meta_of(first).name));
    CHECK_FALSE(disk.old(meta_of(199).name));
    for (int i = first; i < 200; ++i) CHECK(reads(disk, i));
  }
  // A smaller bound holds from the start.
  const uint64_t smaller = 8 * kRecord;
  Disk disk(disk_options(dir.path(), smaller, kPayload));
  CHECK(disk.bytes() <= smaller);
  CHECK(bytes_in(dir.path()) == disk.bytes());
  CHECK(disk.records() > 0);
  CHECK(reads(disk, 199));
}

TEST_CASE("spill files: a folder belongs to one process, and has room for a few records") {
  TempDir dir;
  const auto options = disk_options(dir / "deep/er", 1 << 20, kPayload);
  const auto code_of = [](const DiskOptions& o) {
    try {
      const Disk disk(o);
    } catch (const Error& e) {
      return e.code();
    }
    return Code::ok;
  };
  {
    const Disk disk(options);
    CHECK(code_of(options) == Code::busy);
  }
  CHECK(code_of(options) == Code::ok);
  CHECK(code_of(disk_options(dir / "small", 3 * kRecord, kPayload)) == Code::config);
  write_file(dir / "file", "");
  CHECK(code_of(disk_options(dir / "file", 1 << 20, kPayload)) == Code::unavailable);
}

TEST_CASE("spill files: a disk that is full anywhere in a record keeps what was written, and later takes more") {
  for (int64_t room = 0; room <= static_cast<int64_t>(kSegmentHeader + 2 * kRecord); ++room) {
    CAPTURE(room);
    TempDir dir;
    Faulty ops;
    ops.most = 100;
    const auto options = disk_options(dir.path(), 1 << 20, kPayload);
    const int fit = room < static_cast<int64_t>(kSegmentHeader)
                        ? 0
                        : static_cast<int>((room - static_cast<int64_t>(kSegmentHeader)) / kRecord);
    {
      Disk disk(options, ops);
      ops.room = room;
      for (int i = 0; i < fit; ++i) disk.append(meta_of(i), payload_of(i, kPayload));
      REQUIRE_THROWS_AS(disk.append(meta_of(8), payload_of(8, kPayload)), Error);
      REQUIRE_FALSE(disk.has(meta_of(8).name));
      for (int i = 0; i < fit; ++i) REQUIRE(reads(disk, i));
      ops.room = 1 << 20;
      disk.append(meta_of(9), payload_of(9, kPayload));
      REQUIRE(reads(disk, 9));
    }
    Disk disk(options);
    REQUIRE(disk.records() == static_cast<size_t>(fit) + 1);
    for (int i = 0; i < fit; ++i) REQUIRE(reads(disk, i));
    REQUIRE(reads(disk, 9));
  }
}

TEST_CASE("spill files: a disk that cannot be read, or made durable") {
  TempDir dir;
  Faulty ops;
  Disk disk(disk_options(dir.path(), uint64_t{1} << 30, 33 << 20), ops);
  fill(disk, 0, 2);
  ops.read_error = EIO;
  CHECK_FALSE(reads(disk, 0));
  CHECK_FALSE(disk.has(meta_of(0).name));
  ops.read_error = 0;
  CHECK(reads(disk, 1));
  // After 64 MiB at the latest the system is asked whether it keeps them.
  ops.sync_error = EIO;
  disk.append(meta_of(3), payload_of(3, 33 << 20));
  CHECK_THROWS_AS(disk.append(meta_of(4), payload_of(4, 33 << 20)), Error);
  CHECK_FALSE(disk.has(meta_of(4).name));
  ops.sync_error = 0;
  fill(disk, 5, 6);
  CHECK(reads(disk, 5));
}
