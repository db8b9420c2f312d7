// Copies between two caches: whole, resumed, damaged, out of space.
#include <cerrno>
#include <filesystem>

#include <doctest/doctest.h>

#include "common/digest.h"
#include "tests/unit/sync/world.h"

using namespace glm53;
using namespace glm53::sync;
using namespace glm53::test;
namespace fs = std::filesystem;

namespace {

uint64_t checksum(std::string_view data) {
  return xxh64(std::as_bytes(std::span(data)));
}

/// Writes fail with an error after so many bytes.
class FullDisk final : public FileOps {
 public:
  explicit FullDisk(int error) : error_(error) {}
  ssize_t pwrite(int fd, const void* data, size_t n, int64_t offset) override {
    if (left < static_cast<int64_t>(n)) {
      errno = error_;
      return -1;
    }
    left -= static_cast<int64_t>(n);
    return FileOps::pwrite(fd, data, n, offset);
  }
  std::atomic<int64_t> left{2'000'000};

 private:
  const int error_;
};

}  // namespace

TEST_CASE("a copy is the same snapshot, and a second one sends nothing") {
  SyncWorld w;
  const SendResult first = w.copy();
  CHECK(w.whole());
  CHECK(first.bytes == first.bytes_sent);
  CHECK(first.digest == digest_of(w.manifest()));
  CHECK(w.copy().bytes_sent == 0);
  CHECK(w.whole());
}

TEST_CASE("blobs that are there already are verified and used: from this folder, and from another one") {
  SyncWorld w;
  const hub::Cache cache(w.to.cache);
  cache.prepare(kRepo);
  write_file(cache.blob_path(kRepo, etag_of(w.files[1].second)), w.files[1].second);
  cache.prepare("org/other");
  write_file(cache.blob_path("org/other", etag_of(w.files[2].second)), w.files[2].second);
  CHECK(w.copy().bytes_sent == 70'000 + 2);
  CHECK(w.whole());
}

TEST_CASE("a blob with the right name and size but other content is replaced") {
  SyncWorld w;
  std::string bad = w.files[1].second;
  bad[1000] = static_cast<char>(bad[1000] ^ 4);
  const hub::Cache cache(w.to.cache);
  cache.prepare(kRepo);
  write_file(cache.blob_path(kRepo, etag_of(w.files[1].second)), bad);
  w.copy();
  CHECK(w.whole());
}

TEST_CASE("lost connections, lost answers and restarts cost pieces, not the copy") {
  for (auto fault : {&SyncWorld::cut, &SyncWorld::lose, &SyncWorld::forget, &SyncWorld::damage}) {
    SyncWorld w;
    w.*fault = 2;
    const SendResult result = w.copy();
    CHECK(w.whole());
    CHECK_FALSE(w.events.empty());
    // Each interruption may cost every stream one piece.
    CHECK(w.bytes <= result.bytes + 2 * 3 * static_cast<int64_t>(kPiece));
  }
}

TEST_CASE("a receiver that stays away ends the copy with E643, and the next one goes on") {
  SyncWorld w;
  w.from.streams = 1;
  w.cut = -1;
  const Error e = error_of([&] { w.copy(); });
  CHECK(e.code() == Code::unavailable);
  CHECK(std::string(e.what()).find("E643") != std::string::npos);
  w.cut = 0;
  w.copy();
  CHECK(w.whole());
}

TEST_CASE("what was journaled before the receiver was killed is not sent again") {
  SyncWorld w;
  {
    Receiver killed(w.to, w.manifest());
    const Have have = killed.have();
    int64_t left = 3'000'000;
    for (const Range& r : have.missing) {
      const std::string content = r.etag == etag_of(w.files[1].second) ? w.files[1].second : std::string();
      for (int64_t at = r.offset; !content.empty() && at < r.offset + r.length && left > 0;) {
        const int64_t n = std::min<int64_t>(static_cast<int64_t>(kPiece), r.offset + r.length - at);
        const std::string piece = content.substr(static_cast<size_t>(at), static_cast<size_t>(n));
        killed.take(r.etag, at, piece, checksum(piece));
        at += n;
        left -= n;
      }
    }
  }
  const SendResult result = w.copy();
  CHECK(w.whole());
  CHECK(result.bytes_sent <= result.bytes - 3'000'000);
}

TEST_CASE("a damaged source is not copied") {
  SyncWorld w;
  std::string bad = w.files[1].second;
  bad[5'000'000] = static_cast<char>(bad[5'000'000] ^ 1);
  write_file(hub::Cache(w.source()).blob_path(kRepo, etag_of(w.files[1].second)), bad);
  const Error e = error_of([&] { w.copy(); });
  CHECK(e.code() == Code::weights);
  CHECK(std::string(e.what()).find("E610") != std::string::npos);
  CHECK_FALSE(fs::exists(w.target("model-1.safetensors")));
}

TEST_CASE("a source whose damage the journal does not know is found by the receiver") {
  SyncWorld w;
  w.from.journal_dir = w.dir / "from-journal";
  const std::string path = hub::Cache(w.source()).blob_path(kRepo, etag_of(w.files[2].second));
  std::string bad = w.files[2].second;
  bad[100] = static_cast<char>(bad[100] ^ 1);
  write_file(path, bad);
  // The journal takes it for verified.
  const auto id = hub::Cache(w.source()).blob(kRepo, etag_of(w.files[2].second), static_cast<int64_t>(bad.size()));
  hub::Journal(w.from.journal_dir).verified(hub::Cache(w.source()).repo_dir(kRepo), etag_of(w.files[2].second), *id);
  const Error e = error_of([&] { w.copy(); });
  CHECK(e.code() == Code::corrupt);
  CHECK_FALSE(fs::exists(w.target("model-2.safetensors")));
  CHECK_FALSE(fs::exists(hub::Cache(w.to.cache).blob_path(kRepo, etag_of(w.files[2].second))));
}

TEST_CASE("a full disk or a used-up quota ends the copy with E640 at once; with room it goes on") {
  for (const int error : {ENOSPC, EDQUOT}) {
    SyncWorld w;
    FullDisk disk(error);
    w.ops = &disk;
    const Error e = error_of([&] { w.copy(); });
    CHECK(std::string(e.what()).find("E640") != std::string::npos);
    CHECK_FALSE(fs::exists(w.target("model-1.safetensors")));
    disk.left = int64_t{1} << 40;
    const int64_t before = w.bytes;
    w.copy();
    CHECK(w.whole());
    CHECK(w.bytes - before < w.manifest().bytes());
  }
}

TEST_CASE("too little space is said before the first byte") {
  SyncWorld w;
  w.to.disk_reserve = int64_t{1} << 60;
  const Error e = error_of([&] { w.copy(); });
  CHECK(std::string(e.what()).find("E640") != std::string::npos);
  CHECK_FALSE(e.remedy().empty());
  CHECK(w.pieces == 0);
}

TEST_CASE("pieces out of place are refused and change nothing") {
  SyncWorld w;
  Receiver r(w.to, w.manifest());
  r.have();
  const std::string& big = w.files[1].second;
  const std::string etag = etag_of(big);
  const auto code = [&](const std::string& blob, int64_t offset, const std::string& data, uint64_t sum) {
    return error_of([&] { r.take(blob, offset, data, sum); }).code();
  };
  const std::string piece = big.substr(0, 1000);
  CHECK(code(std::string(64, '0'), 0, piece, checksum(piece)) == Code::usage);
  CHECK(code("../../x", 0, piece, checksum(piece)) == Code::usage);
  CHECK(code(etag, -1, piece, checksum(piece)) == Code::usage);
  CHECK(code(etag, static_cast<int64_t>(big.size()) - 10, piece, checksum(piece)) == Code::usage);
  CHECK(code(etag, INT64_MAX, piece, checksum(piece)) == Code::usage);
  CHECK(code(etag, 0, std::string(kPiece + 1, 'x'), 0) == Code::usage);
  CHECK(code(etag, 0, piece, checksum(piece) ^ 1) == Code::corrupt);
  CHECK(code(etag, 500, piece, checksum(piece)) == Code::busy);
  // Across the end of a segment.
  CHECK(code(etag, 0, piece, checksum(piece)) == Code::ok);
  CHECK(code(etag, 0, piece, checksum(piece)) == Code::ok);  // again
  CHECK(error_of([&] { r.commit(); }).code() == Code::busy);
  CHECK(r.bytes_done() == 1000);
}

TEST_CASE("a folder of the snapshot that leads out of the cache gets nothing") {
  SyncWorld w;
  make_dirs(w.dir / "elsewhere");
  make_dirs(cat(w.to.cache, "/models--org--model/snapshots/", kCommit));
  fs::create_directory_symlink(w.dir / "elsewhere", w.target("sub"));
  CHECK(error_of([&] { w.copy(); }).code() == Code::corrupt);
  CHECK(fs::is_empty(w.dir / "elsewhere"));
}
