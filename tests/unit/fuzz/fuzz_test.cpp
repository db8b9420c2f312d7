// Everything that comes from outside as text, damaged at random: it is taken, or refused with an Error, and nothing
// else. The sanitizer builds of scripts/test.sh --full see what goes wrong in between.
#include "tests/unit/fuzz/fuzz.h"

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "agent/api/config_file.h"
#include "agent/api/hub_models.h"
#include "agent/api/local_node.h"
#include "agent/api/preflight_run.h"
#include "agent/api/report.h"
#include "agent/hub/client.h"
#include "agent/hub/names.h"
#include "agent/preflight/check.h"
#include "agent/sync/manifest.h"
#include "cli/recipe.h"
#include "common/config.h"
#include "common/enrol.h"
#include "common/error.h"
#include "common/pki.h"
#include "common/strings.h"

using namespace glm53;
using test::fuzz;

namespace {

const std::string kDigest(64, 'a'), kCommit(40, 'b');

}  // namespace

TEST_CASE("fuzz: TOML") {
  fuzz("toml",
       {"node.role = \"head\"\n[topology]\nranks = [\"head:0\", \"worker:0\"]\n[api]\nport = 8888\n",
        "[hub]\nexclude = ['a', \"b\"]\ngive_up_after = \"500ms\"\nsegment_bytes = \"64MiB\"\n", example_config()},
       [](const std::string& text) { Config::parse(text, "f.toml"); }, {.share = 1});
}

TEST_CASE("fuzz: a recipe's .env") {
  fuzz("recipe",
       {"HEAD_IP=10.0.0.1\nexport PORT=\"9000\" # x\nGPU_MEM_UTIL=0.85\nEXTRA_ARGS='--kv-cache-memory-bytes 1000'\n"},
       [](const std::string& text) { cli::import_recipe(text, ".env", "head"); });
}

TEST_CASE("fuzz: listings and indices of a Hub") {
  fuzz("hub-tree",
       {cat(R"([{"type":"file","oid":")", kCommit, R"(","size":12,"path":"a/b.json"},{"type":"file","oid":")", kCommit,
            R"(","size":5,"lfs":{"oid":")", kDigest, R"(","size":5,"pointerSize":1},"path":"m.safetensors"}])")},
       [](const std::string& text) { hub::parse_tree(text, "here"); }, {.share = 0.5});
  fuzz("hub-index", {R"({"metadata":{"total_size":5},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})"},
       [](const std::string& text) { hub::parse_index(text, "here"); }, {.share = 0.5});
  fuzz("url", {"https://huggingface.co/api/models/a/b?x=1", "http://127.0.0.1:80/"},
       [](const std::string& text) { hub::parse_url(text); });
}

TEST_CASE("fuzz: what agents say to each other") {
  fuzz("sync-manifest",
       {cat(R"({"version":1,"repo":"org/name","commit":")", kCommit,
            R"(","refs":["main"],"files":[{"path":"a/b","etag":")", kDigest, R"(","size":5}]})")},
       [](const std::string& text) { sync::parse_manifest(text); }, {.share = 0.5});
  fuzz("command",
       {R"({"epoch":3,"kind":"stop_rank","rank":1,"generation":7,"grace_ms":1000})",
        R"({"epoch":3,"kind":"clean","generation":7})"},
       [](const std::string& text) { agent::parse_command(text); });
  fuzz(
      "report",
      {R"({"name":"w","role":"worker","processes":[{"name":"rank1","pid":5,"phase":"ready","progress":[1,2],"exit":{"code":1,"signal":0,"ms_ago":4}}],"memory":{"total":5,"available":4}})"},
      [](const std::string& text) { agent::parse_report(text); });
  fuzz(
      "node-result",
      {R"({"node":"head","checks":[{"name":"ports","code":"E214","verdict":"fail","measured":"x","remedy":"y"}],"mtu":9000,"clock":1})"},
      [](const std::string& text) { preflight::parse_node_result(text); });
  fuzz("hub-models", {R"({"models":[{"key":"model","repo":"org/name","commit":")" + kCommit + R"("}]})"},
       [](const std::string& text) { agent::parse_hub_models(text); });
  fuzz("settings", {R"({"api.port":"9000","serve.max_seqs":4})"},
       [](const std::string& text) { agent::parse_settings(text); });
}

TEST_CASE("fuzz: addresses, tokens, certificates") {
  fuzz("address", {"127.0.0.1:8890", "[::1]:8890", "worker:1"}, [](const std::string& text) { parse_host_port(text); });
  fuzz("token", {cat("glm53-", std::string(32, '0'), "-", kDigest)},
       [](const std::string& text) { JoinToken::parse(text); });
  const std::string key = pki::make_key(), ca = pki::make_ca(key, "spark", {0, 4'000'000'000});
  const std::string request = pki::make_request(key);
  fuzz("certificate", {ca}, [](const std::string& text) { pki::read_certificate(text); });
  fuzz("request", {request}, [&](const std::string& text) {
    pki::sign(key, ca, text, {"spark", "node", "w"}, {0, 4'000'000'000});
  });
}
