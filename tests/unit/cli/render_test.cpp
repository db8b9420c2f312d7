#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal.h"

using namespace glm53::cli;
using Json = nlohmann::ordered_json;

namespace {

const char* kStatus = R"({
  "cluster":{"name":"glm53","state":"up","state_since":100000,"reason":"rank1 was killed by signal 9","wanted":"running",
             "generation":8,"restarts":1,"operation":null},
  "api":{"url":"http://127.0.0.1:8888","pid":11,"ready":true,"healthy":true,"model":"glm53-tiny","requests_running":2,
         "requests_waiting":1,"tokens_per_second":61.25,"tokens_total":1234,"restarts":0},
  "model":{"path":"models/glm53-tiny","name":"glm53-tiny","digest":"0123456789abcdef"},
  "config":{"hash_running":"a","hash_file":"b","drift":["api.port: 8888 runs, 8889 in the file"]},
  "nodes":[
    {"name":"head","role":"head","address":"127.0.0.1","reachable":true,
     "agent":{"version":"0.1.0","pid":10,"uptime_s":125,"memory_bytes":20971520},
     "memory":{"total":4294967296,"available":2147483648},
     "processes":[{"name":"api","pid":11,"generation":0,"state":"running","phase":"","progress":[0,0],"exit":null,
                   "restarts":0,"memory_bytes":31457280,"last_error":""},
                  {"name":"rank0","pid":12,"generation":8,"state":"ready","phase":"ready","progress":[0,0],"exit":null,
                   "restarts":1,"memory_bytes":104857600,"last_error":""}]},
    {"name":"worker","role":"worker","address":"127.0.0.2","reachable":false,"agent":null,"memory":null,
     "processes":[{"name":"rank1","pid":13,"generation":8,"state":"starting","phase":"load_target","progress":[1,4],
                   "restarts":1,"memory_bytes":0,"last_error":"told to exit"}]}],
  "warnings":[{"name":"memlock","severity":"warning","text":"limit is low","remedy":"raise it"}],
  "last_events":[{"at":159000,"text":"generation 8 is ready"}]})";

bool has(const std::string& page, const std::string& text) {
  INFO("looking for: ", text, "\nin:\n", page);
  return page.find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("status shows cluster, api, model, nodes, processes, reason and warnings") {
  const std::string page = render_status(Json::parse(kStatus), 160000, false);
  for (const char* text :
       {"glm53  up for 1 min 0 s, generation 8, wanted running, 1 restart", "rank1 was killed by signal 9",
        "http://127.0.0.1:8888", "ready, healthy", "2 running, 1 waiting", "61.3 tokens/s, 1234 in all", "glm53-tiny",
        "0123456789ab", "rank0", "rank1", "load_target 25%", "100.0 MiB", "unreachable", "told to exit",
        "2.0 GiB of 4.0 GiB memory free", "memlock: limit is low (raise it)", "api.port: 8888 runs",
        "1 s ago: generation 8 is ready"}) {
    CHECK(has(page, text));
  }
  CHECK(page.find('\033') == std::string::npos);
  CHECK(render_status(Json::parse(kStatus), 160000, true).find("\033[32m") != std::string::npos);
}

TEST_CASE("status of a worker, of an empty answer and of odd types is still a page") {
  CHECK(has(render_status(Json::parse(R"({"cluster":null,"nodes":[]})"), 0, false), "shown on the head"));
  CHECK_FALSE(render_status(Json::object(), 0, false).empty());
  CHECK_FALSE(
      render_status(Json::parse(R"({"cluster":{"generation":"x","state":5},"nodes":[{"processes":[{}]}]})"), 0, false)
          .empty());
}

TEST_CASE("tables align their columns by what is seen") {
  CHECK(render_table({{"a", "b"}, {"long", "c"}}) == "a     b\nlong  c\n");
  CHECK(render_table({{paint("a", Colour::red, true), "b"}, {"é€", "c"}}) == "\033[31ma\033[0m   b\né€  c\n");
  CHECK(render_table({{"a", ""}, {}}) == "a\n\n");
}

TEST_CASE("bars and times") {
  CHECK(render_bar(0, 4) == "[----]");
  CHECK(render_bar(0.5, 4) == "[##--]");
  CHECK(render_bar(7, 4) == "[####]");
  CHECK(human_time(59'999) == "59 s");
  CHECK(human_time(61'000) == "1 min 1 s");
  CHECK(human_time(3'660'000) == "1 h 1 min");
  CHECK(human_time(90'000'000) == "1 d 1 h");
  CHECK(human_time(-5) == "0 s");
}
