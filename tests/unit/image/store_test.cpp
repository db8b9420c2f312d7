#include "agent/image/store.h"

#include <filesystem>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/file.h"
#include "tests/unit/image/fixture.h"

namespace glm53::image::test {
namespace {

namespace fs = std::filesystem;

TEST_CASE("store: install, use, rollback, gc, verify") {
  const TempDir dir;
  Store store({.dir = dir.path()});
  CHECK_FALSE(active_program(dir.path()));
  std::vector<std::string> digests;
  for (const char* version : {"1.0", "2.0", "3.0"}) {
    const Made image = make_image({engine_tar(version)});
    put(store, image);
    const Bundle b = store.install(image.digest, "r.example/x@" + image.digest);
    CHECK(b.digest == image.digest);
    CHECK(b.version == version);
    CHECK(read_file(b.path + "/lib/libx.so") == std::string("content of ") + version);
    CHECK(fs::hard_link_count(b.path + "/lib/libx.so.1") == 2);
    CHECK(fs::read_symlink(b.path + "/lib/libx.so") == "libx.so.1");
    digests.push_back(image.digest);
  }
  CHECK_THROWS_WITH_AS(store.rollback(), doctest::Contains("E657"), Error);
  CHECK(store.use(digests[0]).active);
  CHECK(store.use(digests[1].substr(0, 20)).active);
  CHECK(active_program(dir.path()) == dir / ("bundles/" + hex_of(digests[1]) + "/glm53-engine"));
  CHECK(store.rollback().digest == digests[0]);
  CHECK(store.rollback().digest == digests[1]);
  CHECK(store.use(digests[1]).active);  // once more changes nothing
  CHECK(store.find(digests[0]).previous);
  CHECK(store.verify("").empty());
  CHECK(store.gc() > 0);
  CHECK(store.list().size() == 2);
  CHECK_THROWS_AS(store.find(digests[2]), Error);
  CHECK_FALSE(fs::exists(store.blob_path(digests[2])));
  CHECK(store.gc() == 0);
  CHECK(store.verify("").empty());

  write_file(dir / ("bundles/" + hex_of(digests[0]) + "/lib/libx.so.1"), "changed");
  const auto found = store.verify(digests[0]);
  REQUIRE_FALSE(found.empty());
  CHECK(store.verify(digests[1]).empty());
}

TEST_CASE("store: one at a time") {
  const TempDir dir;
  const Store store({.dir = dir.path()});
  CHECK_THROWS_WITH_AS(Store({.dir = dir.path()}), doctest::Contains("E655"), Error);
}

TEST_CASE("store: what does not run here is not installed") {
  const TempDir dir;
  Store store({.dir = dir.path()});
  const std::string dead = make_tar({{"glm53-engine", "#!/bin/sh\nexit 3\n", '0', {}, 0755}});
  const std::string mute = make_tar({{"glm53-engine", "#!/bin/sh\necho hello\n", '0', {}, 0755}});
  const std::string none = make_tar({{"readme", "text"}});
  for (const std::string& tar : {dead, mute, none}) {
    const Made image = make_image({tar});
    put(store, image);
    CHECK_THROWS_WITH_AS(store.install(image.digest, ""), doctest::Contains("E654"), Error);
  }
  const Made other = make_image({engine_tar("1")}, true, "s390x");
  put(store, other);
  CHECK_THROWS_WITH_AS(store.install(other.digest, ""), doctest::Contains("E652"), Error);
  CHECK(store.list().empty());
  CHECK(fs::is_empty(dir / "bundles"));
}

TEST_CASE("store: layers, whiteouts and damage") {
  const TempDir dir;
  Store store({.dir = dir.path()});
  const std::string upper =
      make_tar({{"lib/.wh.libx.so", ""}, {"lib/libx.so.1", "newer"}, {"data/a", "1"}, {"data/.wh..wh..opq", ""}});
  const Made image = make_image({engine_tar("1"), make_tar({{"data/old", "x"}}), upper}, false);
  put(store, image);
  const Bundle b = store.install(image.digest, "");
  CHECK(read_file(b.path + "/lib/libx.so.1") == "newer");
  CHECK(read_file(b.path + "/lib/again") == "content of 1");  // the old file's other name
  CHECK_FALSE(fs::exists(b.path + "/lib/libx.so"));
  CHECK_FALSE(fs::exists(b.path + "/data/old"));
  CHECK(fs::exists(b.path + "/data/a"));

  Made damaged = make_image({engine_tar("2")});
  damaged.blobs[0].second[30] = static_cast<char>(damaged.blobs[0].second[30] ^ 1);
  put(store, damaged);
  CHECK_THROWS_AS(store.install(damaged.digest, ""), Error);
  Made lying = make_image({engine_tar("3")});
  lying.blobs.back().second += " ";
  put(store, lying);
  CHECK_THROWS_WITH_AS(store.install(lying.digest, ""), doctest::Contains("E650"), Error);
  CHECK(store.list().size() == 1);
}

TEST_CASE("store: export and import") {
  const TempDir one, two;
  Store from({.dir = one.path()});
  const Made image = make_image({engine_tar("7")});
  put(from, image);
  (void)from.install(image.digest, "");
  const std::string tar = two / "bundle.tar";
  from.export_tar(image.digest, tar);
  Store to({.dir = two / "store"});
  CHECK(to.import_tar(tar) == image.digest);
  CHECK(to.install(image.digest, "").version == "7");

  std::string bytes = read_file(tar);
  const size_t at = bytes.find("content of");
  CHECK(at == std::string::npos);  // packed
  write_file(two / "half.tar", bytes.substr(0, 2600));
  CHECK_THROWS_AS(to.import_tar(two / "half.tar"), Error);
  write_file(two / "wrong.tar", make_tar({{"blobs/sha256/" + std::string(64, 'a'), "x"}}));
  CHECK_THROWS_WITH_AS(to.import_tar(two / "wrong.tar"), doctest::Contains("E650"), Error);
  write_file(two / "slip.tar", make_tar({{"blobs/sha256/../../../x", "x"}}));
  CHECK_THROWS_WITH_AS(to.import_tar(two / "slip.tar"), doctest::Contains("E653"), Error);
  write_file(two / "empty.tar", make_tar({{"other", "x"}}));
  CHECK_THROWS_WITH_AS(to.import_tar(two / "empty.tar"), doctest::Contains("E651"), Error);
}

}  // namespace
}  // namespace glm53::image::test
