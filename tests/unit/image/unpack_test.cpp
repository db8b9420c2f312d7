#include "agent/image/unpack.h"

#include <filesystem>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/file.h"
#include "tests/unit/image/fixture.h"

namespace glm53::image::test {
namespace {

namespace fs = std::filesystem;

/// Unpacks into a folder of its own; nothing may appear beside it, whatever happens.
std::string unpack(const std::string& tar, Packing packing = Packing::tar, UnpackLimits limits = {}) {
  const TempDir dir;
  make_dirs(dir / "root");
  write_file(dir / "layer", tar);
  std::string error;
  try {
    Unpacker(dir / "root", limits).layer(dir / "layer", packing);
  } catch (const Error& e) {
    error = e.what();
  }
  size_t beside = 0;
  for ([[maybe_unused]] const auto& item : fs::directory_iterator(dir.path())) ++beside;
  CHECK(beside == 2);
  return error;
}

void refused(const std::vector<Member>& members) {
  CAPTURE(members.back().name);
  CHECK(unpack(make_tar(members)).find("E653") != std::string::npos);
}

TEST_CASE("unpack: the root itself, as tar writes it") {
  CHECK(unpack(make_tar({{"./", {}, '5'}, {"./d/", {}, '5'}, {"./d/f", "x"}})).empty());
}

TEST_CASE("unpack: names that leave the folder") {
  for (const char* name : {"../x", "/x", "a/../../x", "a/..", "a//b", "a/./b", "..", "a\\b", "a\nb", "\xff"}) {
    refused({{name, "x"}});
  }
  refused({{std::string(100, 'a') + "x", "x"}, {"../" + std::string(90, 'b'), "x"}});
}

TEST_CASE("unpack: links that leave the folder, and paths through links") {
  for (const char* target : {"/etc", "..", "../x", "a/../../x", "a/..", ""}) refused({{"l", {}, '2', target}});
  refused({{"d/l", {}, '2', "../.."}});
  refused({{"d", {}, '5'}, {"l", {}, '2', "d"}, {"l/x", "x"}});
  refused({{"f", "x"}, {"f/x", "x"}});
  for (const char* target : {"/etc/passwd", "../x", "absent", "d", "l"}) {
    refused({{"d", {}, '5'}, {"s", "x"}, {"l", {}, '2', "s"}, {"h", {}, '1', target}});
  }
  CHECK(unpack(make_tar({{"d/e/l", {}, '2', "../../f"}, {"f", "x"}, {"h", {}, '1', "f"}})).empty());
  CHECK(link_stays_inside("a/b", "../c/d"));
  CHECK_FALSE(link_stays_inside("a/b", "../c/../d"));
}

TEST_CASE("unpack: devices, pipes and setuid files") {
  for (const char type : {'3', '4', '6'}) refused({{"x", {}, type}});
  refused({{"x", "x", '0', {}, 04755}});
  refused({{"x", "x", '0', {}, 02755}});
}

TEST_CASE("unpack: one name twice, a file over a folder") {
  refused({{"x", "1"}, {"x", "2"}});
  refused({{"x", {}, '5'}, {"x", "2"}});
  refused({{".wh...", ""}});
}

TEST_CASE("unpack: limits") {
  const std::string big(100 << 10, 'z');
  CHECK(unpack(make_tar({{"x", big}}), Packing::tar, {.bytes = 50 << 10}).find("E653") != std::string::npos);
  CHECK(unpack(make_tar({{"x", "1"}, {"y", "2"}}), Packing::tar, {.entries = 1}).find("E653") != std::string::npos);
  // 70 MiB out of some 70 KiB.
  const std::string bomb = gzip(make_tar({{"x", std::string(size_t{70} << 20, '\0')}}));
  CHECK(unpack(bomb, Packing::gzip, {.ratio = 2}).find("expands too much") != std::string::npos);
}

TEST_CASE("unpack: damaged and mislabelled layers") {
  const std::string tar = make_tar({{"x", std::string(5000, 'q')}});
  const std::string packed = gzip(tar);
  CHECK(unpack(packed, Packing::gzip).empty());
  CHECK_FALSE(unpack(packed.substr(0, packed.size() / 2), Packing::gzip).empty());
  CHECK_FALSE(unpack(tar.substr(0, 1024), Packing::tar).empty());
  CHECK_FALSE(unpack(tar, Packing::gzip).empty());
  CHECK_FALSE(unpack(packed, Packing::tar).empty());
  CHECK_FALSE(unpack("", Packing::gzip).empty());
  CHECK_FALSE(unpack(std::string(2000, 'x'), Packing::tar).empty());
}

}  // namespace
}  // namespace glm53::image::test
