// Logs that their writers keep open while they are rotated.
#include "agent/supervise/log_file.h"

#include <unistd.h>

#include <doctest/doctest.h>

#include "common/file.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::supervise;

namespace {

void put(const UniqueFd& fd, const std::string& text) {
  REQUIRE(::write(fd.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

}  // namespace

TEST_CASE("rotation keeps eight pieces and the writer's descriptor") {
  const test::TempDir dir;
  const std::string path = log_path(dir.path(), "rank0", 3);
  const UniqueFd writer = open_log(path);
  CHECK_FALSE(rotate_log(path, 10));
  for (int i = 0; i < 12; ++i) {
    put(writer, cat("piece ", i, " of the log\n"));
    CHECK(rotate_log(path, 10));
    CHECK(log_size(path) == 0);
  }
  CHECK(read_file(path + ".1") == "piece 11 of the log\n");
  CHECK(read_file(path + ".8") == "piece 4 of the log\n");
  CHECK_FALSE(std::filesystem::exists(path + ".9"));
  put(writer, "after\n");
  CHECK(read_file(path) == "after\n");
}

TEST_CASE("tail reads back through rotated pieces") {
  const test::TempDir dir;
  const std::string path = log_path(dir.path(), "rank0", 1);
  const UniqueFd writer = open_log(path);
  put(writer, "a\nb\n");
  REQUIRE(rotate_log(path, 1));
  put(writer, "c\nd\n");
  REQUIRE(rotate_log(path, 1));
  put(writer, "e\nunfinished");
  LogReader reader(path);
  CHECK(reader.tail(2) == "d\ne\n");
  CHECK(LogReader(path).tail(1) == "e\n");
  CHECK(LogReader(path).tail(4) == "b\nc\nd\ne\n");
  CHECK(LogReader(path).tail(100) == "a\nb\nc\nd\ne\n");
  CHECK(LogReader(path).tail(0).empty());
  put(writer, " line\nf\n");
  CHECK(reader.read_new() == "unfinished line\nf\n");
  CHECK(reader.read_new().empty());
}

TEST_CASE("a follower loses nothing over a rotation") {
  const test::TempDir dir;
  const std::string path = log_path(dir.path(), "api", 1);
  const UniqueFd writer = open_log(path);
  put(writer, "a\n");
  LogReader reader(path);
  CHECK(reader.tail(10) == "a\n");
  put(writer, "bbbbbb\n");
  REQUIRE(rotate_log(path, 1));
  put(writer, "c\n");
  CHECK(reader.read_new() == "bbbbbb\nc\n");
  CHECK(LogReader(dir / "missing.log").tail(5).empty());
}

TEST_CASE("only the newest generations are kept") {
  const test::TempDir dir;
  for (const uint64_t n : {1u, 2u, 9u, 10u, 11u}) {
    const std::string path = log_path(dir.path(), "rank1", n);
    put(open_log(path), "x\ny\n");
    rotate_log(path, 1);
  }
  CHECK(log_generations(dir.path(), "rank1") == std::vector<uint64_t>{1, 2, 9, 10, 11});
  prune_logs(dir.path(), "rank1", 2);
  CHECK(log_generations(dir.path(), "rank1") == std::vector<uint64_t>{10, 11});
  CHECK_FALSE(std::filesystem::exists(log_path(dir.path(), "rank1", 9) + ".1"));
  CHECK(log_generations(dir.path(), "nobody").empty());
}
