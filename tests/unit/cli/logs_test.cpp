#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "common/error.h"

using namespace glm53::cli;
using Json = nlohmann::ordered_json;

namespace {

const Json& two_nodes() {
  static const Json status = Json::parse(R"({"nodes":[
    {"name":"spark-a","role":"head","processes":[{"name":"api"},{"name":"rank0"}]},
    {"name":"spark-b","role":"worker","processes":[{"name":"rank1"}]}]})");
  return status;
}

std::vector<std::string> tags(std::string_view which) {
  std::vector<std::string> out;
  for (const auto& source : log_sources(two_nodes(), which))
    out.push_back(source.tag + source.process + "@" + source.node);
  return out;
}

using Lines = std::vector<std::string>;

}  // namespace

TEST_CASE("which logs a word means") {
  CHECK(tags("both") == Lines{"spark-a| agent@spark-a", "api| api@spark-a", "rank0| rank0@spark-a",
                              "spark-b| agent@spark-b", "rank1| rank1@spark-b"});
  CHECK(tags("worker") == Lines{"spark-b| agent@spark-b", "rank1| rank1@spark-b"});
  CHECK(tags("spark-b") == tags("worker"));
  CHECK(tags("rank0") == Lines{"rank0@spark-a"});
  CHECK(tags("agent") == Lines{"spark-a| agent@spark-a", "spark-b| agent@spark-b"});
  CHECK(log_sources(Json::object(), "rank1").front().process == "rank1");
  CHECK_THROWS_AS(log_sources(two_nodes(), "rang0"), glm53::Error);
}

TEST_CASE("logs are merged by time; lines without one stay in place") {
  const auto merged =
      merge_logs({{"a| ", {"2026-01-01T00:00:00.100Z one", "  more of one", "2026-01-01T00:00:00.300Z three"}},
                  {"b| ", {"no time yet", "2026-01-01T00:00:00.200Z two"}}});
  CHECK(merged == Lines{"b| no time yet", "a| 2026-01-01T00:00:00.100Z one", "a|   more of one",
                        "b| 2026-01-01T00:00:00.200Z two", "a| 2026-01-01T00:00:00.300Z three"});
  CHECK(merge_logs({}).empty());
}
