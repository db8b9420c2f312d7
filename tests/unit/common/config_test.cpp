#include "common/config.h"

#include <cstdlib>
#include <random>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace std::chrono_literals;

namespace {

/// The text of the error that `body` throws, with its remedy; "" when it throws none.
template <class Body>
std::string error_of(Body body, Code code) {
  try {
    body();
  } catch (const Error& e) {
    CHECK(name(e.code()) == name(code));
    return e.line();
  }
  return "";
}

std::string parse_error(std::string_view toml) {
  return error_of([&] { Config::parse(toml, "c.toml"); }, Code::config);
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("config: every key has a valid default") {
  const Config config;
  for (const auto& key : config_keys()) {
    CAPTURE(std::string(key.name));
    CHECK(config.source(key.name) == "default");
    CHECK(key.name.find('.') != std::string_view::npos);
    CHECK_FALSE(key.doc.empty());
  }
  // Through the checks of values given by people.
  const Config again = Config::from_json(config.to_json(), "json");
  CHECK(again.to_json() == config.to_json());
  CHECK(again.hash() == config.hash());
}

TEST_CASE("config: values of a file, their sources and the hash of the cluster keys") {
  const Config config = Config::parse(
      "[serve]\nmax_seqs = 3\n[ranks]\nwatchdog = \"1m\"\n[memory]\nkv_bytes = \"1.5GiB\"\nreserve = 1024\n"
      "[api]\nmetrics_open = true\naliases = [\"a\", \"b\"]\n[node]\nname = 'n1'\n",
      "c.toml");
  CHECK(config.integer("serve.max_seqs") == 3);
  CHECK(config.duration("ranks.watchdog") == 60s);
  CHECK(config.integer("memory.kv_bytes") == 1610612736);
  CHECK(config.integer("memory.reserve") == 1024);
  CHECK(config.boolean("api.metrics_open"));
  CHECK(config.list("api.aliases") == std::vector<std::string>{"a", "b"});
  CHECK(config.source("serve.max_seqs") == "c.toml:2");
  CHECK(config.source("api.aliases") == "c.toml:10");
  const auto cluster = config.to_json(true);
  CHECK_FALSE(cluster.contains("node.name"));
  CHECK(cluster.at("memory.kv_bytes") == 1610612736);
  Config same = Config::from_json(cluster, "head");
  CHECK(same.hash() == config.hash());
  same.set("node.name", "other", "--set");
  same.set("ranks.watchdog", "60s", "--set");
  CHECK(same.hash() == config.hash());
  same.set("serve.max_seqs", "4", "--set");
  CHECK(same.hash() != config.hash());
}

TEST_CASE("config: mistakes in a file are named with line, key and what would be right") {
  CHECK(has(parse_error("[serve]\n\nmax_seq = 1\n"),
            "c.toml:3: unknown key 'serve.max_seq' — did you mean 'serve.max_seqs'?"));
  CHECK(has(parse_error("zzzzzzzzzzz = 1\n"), "config.toml.example"));
  CHECK(has(parse_error("[serve]\nmax_seqs = \"8\"\n"), "c.toml:2: 'serve.max_seqs' must be an integer, not text"));
  CHECK(has(parse_error("[serve]\nmax_seqs = 1.5\n"), "a number with a fraction"));
  CHECK(has(parse_error("[serve]\nmax_seqs = 0\n"), "'serve.max_seqs' is 0 — a value from 1 to 4096"));
  CHECK(has(parse_error("[ranks]\nwatchdog = 30\n"), "must be a duration such as"));
  CHECK(has(parse_error("[ranks]\nwatchdog = \"30 parsecs\"\n"), "not '30 parsecs'"));
  CHECK(has(parse_error("[ranks]\nwatchdog = \"1ms\"\n"), "from 1000ms to 3600000ms"));
  CHECK(has(parse_error("[memory]\nkv_bytes = \"lots\"\n"), "must be a size"));
  CHECK(has(parse_error("[memory]\nkv_bytes = -1\n"), "'memory.kv_bytes'"));
  CHECK(has(parse_error("[api]\nmetrics_open = 1\n"), "must be true or false, not an integer"));
  CHECK(has(parse_error("[api]\naliases = \"a\"\n"), "must be a list of texts, not text"));
  CHECK(has(parse_error("[api]\naliases = [1]\n"), "must be a list of texts"));
  CHECK(has(parse_error("[api]\naliases = [\"\"]\n"), "empty element"));
  CHECK(has(parse_error("[log]\nlevel = \"loud\"\n"), "'log.level' is 'loud' — one of debug, info, warn, error"));
  CHECK(has(parse_error("[log]\nlevel = 1979-05-27\n"), "not a date or time"));
  CHECK(has(parse_error("[log]\nlevel = \"a\\u0000b\"\n"), "not valid UTF-8"));
  CHECK(has(parse_error("[serve]\nmax_seqs = \n"), "c.toml:2: invalid TOML: "));
  CHECK(has(parse_error("[serve]\nmax_seqs = 1\nmax_seqs = 2\n"), "c.toml:3: invalid TOML: "));
}

TEST_CASE("config: arbitrary bytes are refused or read, never worse") {
  std::mt19937 random(7);
  const std::string good = "[serve]\nmax_seqs = 3\n[api]\naliases = [\"a\", \"b\"]\nport = 1\n";
  for (int round = 0; round < 500; ++round) {
    std::string text = good;
    for (int i = 0; i < 4; ++i) text[random() % text.size()] = static_cast<char>(random());
    try {
      Config::parse(text, "fuzz");
    } catch (const Error& e) {
      CHECK(e.code() == Code::config);
    }
  }
}

TEST_CASE("config: --set") {
  Config config;
  config.set("serve.max_seqs", " 5 ", "--set");
  config.set("api.aliases", "x, y", "--set");
  config.set("memory.reserve", "2GiB", "--set");
  CHECK(config.integer("serve.max_seqs") == 5);
  CHECK(config.list("api.aliases") == std::vector<std::string>{"x", "y"});
  CHECK(config.integer("memory.reserve") == int64_t{2} << 30);
  CHECK(config.source("api.aliases") == "--set");
  config.set("api.aliases", "", "--set");
  CHECK(config.list("api.aliases").empty());
  CHECK(has(error_of([&] { config.set("api.prt", "1", "--set"); }, Code::usage), "did you mean 'api.port'"));
  CHECK(has(error_of([&] { config.set("api.port", "x", "--set"); }, Code::usage), "must be an integer, not 'x'"));
  CHECK(has(error_of([&] { config.set("api.port", "70000", "--set"); }, Code::usage), "from 1 to 65535"));
  CHECK(has(error_of([&] { config.set("api.aliases", "a,,b", "--set"); }, Code::usage), "empty element"));
  CHECK(config.integer("api.port") == 8888);  // unchanged by what was refused
}

TEST_CASE("config: asking for an unknown key or as another type is a fault of the program") {
  const Config config;
  error_of([&] { config.text("no.such"); }, Code::internal);
  CHECK_THROWS_AS(config.text("no.such"), Error);
  CHECK_THROWS_AS(config.text("api.port"), Error);
  CHECK_THROWS_AS(config.integer("api.bind"), Error);
  CHECK_THROWS_AS(config.duration("api.bind"), Error);
  CHECK_THROWS_AS(config.list("api.bind"), Error);
  CHECK_THROWS_AS(config.source("no.such"), Error);
}

TEST_CASE("config: from_json refuses unknown keys and wrong shapes") {
  CHECK(has(error_of([] { Config::from_json(parse_json("{\"api.prt\":1}"), "head"); }, Code::config),
            "head: unknown key 'api.prt'"));
  error_of([] { Config::from_json(parse_json("[1]"), "head"); }, Code::config);
  CHECK_THROWS_AS(Config::from_json(parse_json("[1]"), "head"), Error);
  CHECK_THROWS_AS(Config::from_json(parse_json("{\"api.port\":null}"), "head"), Error);
}

TEST_CASE("config: files, relative paths") {
  const test::TempDir folder;
  write_file(folder / "c.toml", "[model]\npath = \"models/x\"\n[draft]\npath = \"/abs\"\n");
  const Config config = Config::load(folder / "c.toml");
  CHECK(config.base_dir() == folder.path());
  CHECK(config.path("model.path") == folder / "models/x");
  CHECK(config.path("draft.path") == "/abs");
  CHECK(config.path("api.key_file").empty());
  CHECK(config.source("model.path") == cat(folder / "c.toml", ":2"));
  CHECK(has(error_of([&] { Config::load(folder / "none.toml"); }, Code::config), "none.toml"));
}

// After a change of the table: GLM53_UPDATE=1 unit_common -tc="config: config.toml.example*"
TEST_CASE("config: config.toml.example is the table") {
  const std::string path = std::string(GLM53_SOURCE_DIR) + "/config.toml.example";
  if (std::getenv("GLM53_UPDATE") != nullptr) write_file(path, example_config());
  CHECK(read_file(path) == example_config());
  CHECK(Config::parse(example_config(), "example").to_json() == Config().to_json());
}

TEST_CASE("config: ranks") {
  Config config;
  config.set("topology.ranks", "head:0,worker:1", "--set");
  const auto ranks = parse_ranks(config);
  REQUIRE(ranks.size() == 2);
  CHECK(ranks[1].node == "worker");
  CHECK(ranks[1].device == 1);
  for (const char* bad : {"", "worker:0", "head", "head:", "head:x", "head:-1", "head:0,node:0", "head:99999999999"}) {
    CAPTURE(bad);
    config.set("topology.ranks", bad, "--set");
    CHECK(has(error_of([&] { parse_ranks(config); }, Code::config), "--set: 'topology.ranks'"));
  }
}

TEST_CASE("config: addresses with ports") {
  CHECK(parse_host_port("127.0.0.1:8890").host == "127.0.0.1");
  CHECK(parse_host_port("[::1]:8890").host == "::1");
  CHECK(parse_host_port("host-1:0").port == 0);
  CHECK(parse_host_port("h:65535").port == 65535);
  for (const char* bad :
       {"", ":", "h", "h:", "h:x", "h:65536", "h:-1", ":80", "::1:80", "[]:80", "[::1]", "a b:1", "h/x:1"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(parse_host_port(bad), Error);
  }
}
