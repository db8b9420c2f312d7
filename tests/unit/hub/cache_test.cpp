#include "agent/hub/cache.h"

#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include <doctest/doctest.h>
#include <sys/file.h>

#include "fixture.h"

using namespace glm53;
using namespace glm53::hub;
using namespace glm53::test;
namespace fs = std::filesystem;

namespace {

const std::string kEtag(64, 'a'), kCommit(40, 'c');

}  // namespace

TEST_CASE("hub cache: names, links and refs are those of the documented layout") {
  const TempDir dir;
  const Cache cache(dir / "hub");
  cache.prepare("org/model");
  CHECK(fs::exists(dir / "hub/CACHEDIR.TAG"));
  write_file(cache.blob_path("org/model", kEtag), "content");
  cache.link("org/model", kCommit, "a/b/file.bin", kEtag);
  cache.link("org/model", kCommit, "top", kEtag);
  const std::string snapshot = dir / ("hub/models--org--model/snapshots/" + kCommit);
  CHECK(fs::read_symlink(snapshot + "/top").string() == "../../blobs/" + kEtag);
  CHECK(fs::read_symlink(snapshot + "/a/b/file.bin").string() == "../../../../blobs/" + kEtag);
  CHECK(read_file(snapshot + "/a/b/file.bin") == "content");
  cache.write_ref("org/model", "main", kCommit);
  cache.write_ref("org/model", "refs/pr/1", kCommit);
  CHECK(read_file(dir / "hub/models--org--model/refs/main") == kCommit);
  CHECK(read_file(dir / "hub/models--org--model/refs/refs/pr/1") == kCommit);
  CHECK(cache.read_ref("org/model", "main") == kCommit);
  CHECK_FALSE(cache.read_ref("org/model", "other"));
  cache.mark_absent("org/model", kCommit, "x/y.json");
  CHECK(fs::file_size(dir / ("hub/models--org--model/.no_exist/" + kCommit + "/x/y.json")) == 0);
}

TEST_CASE("hub cache: a wrong or dangling link is replaced") {
  const TempDir dir;
  const Cache cache(dir / "hub");
  cache.prepare("org/model");
  write_file(cache.blob_path("org/model", kEtag), "content");
  const std::string at = cache.snapshot_dir("org/model", kCommit) + "/f";
  make_dirs(cache.snapshot_dir("org/model", kCommit));
  fs::create_symlink("../../blobs/nowhere", at);
  cache.link("org/model", kCommit, "f", kEtag);
  CHECK(read_file(at) == "content");
  fs::remove(at);
  write_file(at, "a plain file");
  cache.link("org/model", kCommit, "f", kEtag);
  CHECK(fs::is_symlink(at));
}

TEST_CASE("hub cache: a snapshot folder that leads out of the cache is not followed") {
  const TempDir dir;
  const Cache cache(dir / "hub");
  cache.prepare("org/model");
  make_dirs(dir / "outside");
  make_dirs(cache.snapshot_dir("org/model", kCommit));
  fs::create_directory_symlink(dir / "outside", cache.snapshot_dir("org/model", kCommit) + "/sub");
  CHECK(error_of([&] { cache.link("org/model", kCommit, "sub/f", kEtag); }).code() == Code::corrupt);
  CHECK(fs::is_empty(dir / "outside"));
}

TEST_CASE("hub cache: blobs may be links into a store of the cache, not out of it") {
  const TempDir dir;
  const Cache cache(dir / "hub");
  cache.prepare("org/model");
  make_dirs(dir / "hub/blobs/ab");
  write_file(dir / "hub/blobs/ab/xet", "12345");
  write_file(dir / "elsewhere", "12345");
  const std::string blob = cache.blob_path("org/model", kEtag);
  fs::create_symlink("../../blobs/ab/xet", blob);
  CHECK(cache.blob("org/model", kEtag, 5));
  CHECK_FALSE(cache.blob("org/model", kEtag, 6));
  fs::remove(blob);
  fs::create_symlink(dir / "elsewhere", blob);
  CHECK_FALSE(cache.blob("org/model", kEtag, 5));
  fs::remove(blob);
  make_dirs(blob);
  CHECK_FALSE(cache.blob("org/model", kEtag, 5));
}

TEST_CASE("hub cache: locks are flock, wait for each other and are never removed") {
  const TempDir dir;
  const Cache cache(dir / "hub");
  cache.prepare("org/model");
  const std::string path = dir / ("hub/.locks/models--org--model/" + kEtag + ".lock");
  {
    const auto lock = cache.lock("org/model", kEtag, [](int64_t) { return false; });
    REQUIRE(lock);
    const UniqueFd other(::open(path.c_str(), O_RDWR));
    CHECK(::flock(other.get(), LOCK_EX | LOCK_NB) != 0);
    int asked = 0;
    CHECK_FALSE(cache.lock("org/model", kEtag, [&](int64_t) { return ++asked < 3; }));
    CHECK(asked == 3);
  }
  CHECK(fs::exists(path));
  CHECK(cache.lock("org/model", kEtag, [](int64_t) { return false; }));
}

TEST_CASE("hub cache: completeness comes from the index and the headers, not from counting") {
  const TempDir dir;
  const Cache cache(dir / "hub");
  const std::string snapshot = cache.snapshot_dir("org/model", kCommit);
  make_dirs(snapshot);
  const auto unknown = [](const std::string&) { return int64_t{-1}; };
  CHECK(cache.check("org/model", kCommit, unknown).missing.size() == 2);  // config.json, model.safetensors
  write_file(snapshot + "/config.json", "{}");
  write_file(snapshot + "/model.safetensors.index.json",
             R"({"weight_map":{"x":"s1.safetensors","y":"s2.safetensors"}})");
  write_file(snapshot + "/s1.safetensors", safetensors("x", 100, 1));
  write_file(snapshot + "/stray.safetensors", safetensors("z", 100, 1));
  auto state = cache.check("org/model", kCommit, unknown);
  REQUIRE(state.missing.size() == 1);
  CHECK(state.missing[0] == "s2.safetensors: is missing");
  write_file(snapshot + "/s2.safetensors", safetensors("y", 100, 1));
  CHECK(cache.check("org/model", kCommit, unknown).complete());
  state = cache.check("org/model", kCommit, [](const std::string& f) { return f == "s1.safetensors" ? 5 : -1; });
  CHECK(state.missing.size() == 1);

  const std::string whole = safetensors("y", 100, 1);
  for (const std::string& bad : {whole.substr(0, whole.size() - 1), whole + "x", std::string(500, '\0'),
                                 std::string("abc"), std::string(8, '\xff') + whole, std::string()}) {
    write_file(snapshot + "/s2.safetensors", bad);
    CHECK_FALSE(cache.check("org/model", kCommit, unknown).complete());
  }
  write_file(snapshot + "/s2.safetensors", whole);
  for (const char* index :
       {"{}", "[]", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":\"../../x\"}}", "{\"weight_map\":{}}", "x"}) {
    write_file(snapshot + "/model.safetensors.index.json", index);
    CHECK_FALSE(cache.check("org/model", kCommit, unknown).complete());
  }
}
