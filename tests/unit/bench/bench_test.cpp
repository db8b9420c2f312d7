// The benchmarks run, on whatever backend there is, and write what a later run can be compared with.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "bench/step_bench.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "tests/temp_dir.h"

namespace glm53 {
namespace {

StepOptions small() {
  StepOptions o;
  o.model = GLM53_SOURCE_DIR "/models/glm53-tiny";
  o.rows = {1, 12};
  o.context = 100;
  o.reps = 1;
  return o;
}

TEST_CASE("bench_step: a step of each number of rows, compared with an earlier run") {
  const test::TempDir dir;
  for (const char* dense : {"bf16", "int4"}) {
    StepOptions o = small();
    o.dense = dense;
    o.json = dir / "now.json";
    CHECK(run_step_bench(o) == 0);
    const auto json = parse_json(read_file(o.json));
    CHECK(json.at("bench") == "step");
    CHECK(json.at("dense") == dense);
    const auto& results = json.at("results");
    REQUIRE(results.size() == 2);
    CHECK(results[1].at("rows") == 12);
    CHECK(results[0].at("us").get<double>() > 0);
    CHECK(results[0].at("experts").get<double>() >= 2);  // one row chooses two of them in each sparse layer
    CHECK(results[1].at("experts").get<double>() > results[0].at("experts").get<double>());
    CHECK(results[1].at("bytes").get<double>() > results[0].at("bytes").get<double>());
    o.compare = o.json;
    CHECK(run_step_bench(o) == 0);
  }
}

TEST_CASE("bench_layer: every layer, which together read what a step reads") {
  const test::TempDir dir;
  StepOptions o = small();
  o.rows = {2};
  o.json = dir / "step.json";
  CHECK(run_step_bench(o) == 0);
  const double whole = parse_json(read_file(o.json)).at("results")[0].at("bytes").get<double>();
  o.layers = true;
  CHECK(run_step_bench(o) == 0);
  double sum = 0;
  const auto json = parse_json(read_file(o.json));
  for (const auto& layer : json.at("results")) sum += layer.at("bytes").get<double>();
  CHECK(json.at("results").size() > 3);
  CHECK(sum == doctest::Approx(whole));
}

TEST_CASE("options of the benchmarks") {
  const auto parse = [](std::vector<const char*> words) {
    words.insert(words.begin(), "bench_step");
    return parse_step_options(static_cast<int>(words.size()), const_cast<char**>(words.data()), "bench_step");
  };
  const StepOptions o = parse({"--rows", "1,8,16", "--dense", "fp8", "--tp", "1", "--graph", "0"});
  CHECK(o.rows == std::vector<int>{1, 8, 16});
  CHECK(o.dense == "fp8");
  CHECK(o.tp == 1);
  CHECK_FALSE(o.graph);
  for (const auto& wrong : {std::vector<const char*>{"--rows", "0"}, {"--dense", "fp4"}, {"--rows"}, {"--what", "1"}})
    CHECK_THROWS_AS(parse(wrong), Error);
}

}  // namespace
}  // namespace glm53
