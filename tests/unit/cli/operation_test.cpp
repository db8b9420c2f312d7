#include "cli/operation.h"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using namespace glm53;
using namespace glm53::cli;

using Lines = std::vector<std::string>;

TEST_CASE("actions and changes of phase are lines, progress within a phase is not") {
  OperationView view;
  CHECK(view.take("action", R"({"node":"worker","kind":"start_rank","rank":1,"state":"running"})") ==
        Lines{"worker: start rank 1"});
  CHECK(view.take("action", R"({"node":"worker","kind":"start_rank","rank":1,"state":"done"})").empty());
  CHECK(view.take("action", R"({"node":"head","kind":"open_gate","rank":-1,"state":"failed","text":"no answer"})") ==
        Lines{"head: open gate failed: no answer"});
  CHECK(view.take("progress", R"({"node":"head","process":"rank0","phase":"load_target","progress":[1,4]})") ==
        Lines{"rank0 on head: load_target"});
  CHECK(view.take("progress", R"({"node":"head","process":"rank0","phase":"load_target","progress":[2,4]})").empty());
}

TEST_CASE("bars show phase, share and bytes of every process") {
  OperationView view;
  view.take("progress", R"({"node":"head","process":"rank0","phase":"load_target","progress":[1048576,4194304]})");
  view.take("progress", R"({"node":"worker","process":"rank1","phase":"rendezvous","progress":null})");
  const auto bars = view.bars(100);
  REQUIRE(bars.size() == 2);
  CHECK(bars[0].find("25%") != std::string::npos);
  CHECK(bars[0].find("1.0 MiB of 4.0 MiB") != std::string::npos);
  CHECK(bars[0].find("[#######---") != std::string::npos);
  CHECK(bars[1].find("rendezvous") != std::string::npos);
  CHECK(bars[1].find('%') == std::string::npos);
}

TEST_CASE("downloads of two nodes are two bars, which go when they are done") {
  OperationView view;
  const auto event = [](const char* node, int done) {
    return nlohmann::ordered_json{
        {"node", node}, {"process", "download"}, {"phase", "org/name"}, {"progress", {done, 4194304}}}
        .dump();
  };
  CHECK(view.take("progress", event("head", 1048576)) == Lines{"download on head: org/name"});
  CHECK(view.take("progress", event("worker", 2097152)) == Lines{"download on worker: org/name"});
  CHECK(view.take("progress", event("worker", 2097153)).empty());
  const auto bars = view.bars(100);
  REQUIRE(bars.size() == 2);
  CHECK(bars[0].find("1.0 MiB of 4.0 MiB") != std::string::npos);
  view.take("progress", event("worker", 4194304));
  CHECK(view.bars(100).size() == 1);
}

TEST_CASE("launched once rank 0 was started") {
  OperationView view;
  view.take("action", R"({"node":"worker","kind":"start_rank","rank":1,"state":"done"})");
  CHECK_FALSE(view.launched());
  view.take("action", R"({"node":"head","kind":"start_rank","rank":0,"state":"done"})");
  CHECK(view.launched());
}

TEST_CASE("the end carries state and error") {
  OperationView view;
  CHECK_FALSE(view.outcome());
  view.take("log", R"({"node":"head","process":"rank0","text":"weights are missing"})");
  view.take("done", R"({"state":"failed","error":{"code":"weights","message":"no shard","remedy":"copy it"}})");
  REQUIRE(view.outcome());
  CHECK(view.outcome()->state == "failed");
  REQUIRE(view.outcome()->error);
  CHECK(view.outcome()->error->code() == Code::weights);
  CHECK(view.log_lines() == Lines{"rank0| weights are missing"});
}

TEST_CASE("events with members missing or of other types are shown as far as they go") {
  OperationView view;
  CHECK(view.take("action", "{}").size() == 1);
  CHECK(view.take("progress", R"({"process":7})").empty());
  CHECK(view.take("progress", R"({"process":"rank0","progress":[1]})").empty());
  CHECK(view.take("unheard of", "{}").empty());
  CHECK(view.take("action", "[]").empty());
  view.take("done", R"({"state":"done","error":null})");
  CHECK_FALSE(view.outcome()->error);
}
