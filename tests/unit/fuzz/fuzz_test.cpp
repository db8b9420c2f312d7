// Everything that comes from outside as text, damaged at random: it is taken, or refused with an Error, and nothing
// else. The sanitizer builds of scripts/test.sh --full see what goes wrong in between. The same rounds are the same
// inputs; GLM53_FUZZ_ROUNDS sets how many (default 3000 a target).
#include <cstdint>
#include <functional>
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
#include "common/process.h"
#include "common/rank_contract.h"
#include "common/strings.h"

using namespace glm53;

namespace {

/// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  size_t below(size_t limit) {
    uint64_t z = state_ += 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return static_cast<size_t>((z ^ z >> 31) % limit);
  }

 private:
  uint64_t state_;
};

/// Pieces that parsers stumble over.
const std::vector<std::string> kPieces{"\"",
                                       "{",
                                       "}",
                                       "[",
                                       "]",
                                       ",",
                                       ":",
                                       "null",
                                       "-1",
                                       "1e999",
                                       "18446744073709551616",
                                       "9223372036854775807",
                                       "\\u0000",
                                       "\\ud800",
                                       "../",
                                       "/",
                                       "\n",
                                       "\r",
                                       "=",
                                       "'",
                                       "\"\"\"",
                                       "#",
                                       "true",
                                       "\xff\xfe",
                                       "\xc0\xaf",
                                       "$(x)",
                                       "-----BEGIN ",
                                       std::string(1, '\0'),
                                       std::string(300, '['),
                                       std::string(300, 'a'),
                                       "{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":1}}}}}}"};

std::string damage(std::string text, Random& random) {
  const size_t times = 1 + random.below(4);
  for (size_t i = 0; i < times; ++i) {
    const size_t at = random.below(text.size() + 1);
    const size_t length = random.below(std::min<size_t>(text.size() - at, 24) + 1);
    switch (random.below(6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random.below(256));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, kPieces[random.below(kPieces.size())]);
        break;
      case 3:
        text.insert(random.below(text.size() + 1), text.substr(at, length));
        break;
      case 4:
        text.resize(at);
        break;
      default:
        text.replace(at, length, kPieces[random.below(kPieces.size())]);
        break;
    }
  }
  return text;
}

size_t rounds() {
  const auto given = environment("GLM53_FUZZ_ROUNDS");
  const auto number = given ? parse_int(*given) : std::nullopt;
  return number && *number > 0 ? static_cast<size_t>(*number) : 3000;
}

std::string hex(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
    out += "0123456789abcdef"[static_cast<unsigned char>(c) & 15];
  }
  return out;
}

/// Every seed must be good as it is, or the damage would only ever meet the first check.
void fuzz(const std::vector<std::string>& seeds, const std::function<void(const std::string&)>& target) {
  Random random(53);
  size_t refused = 0;
  for (const std::string& seed : seeds) {
    CAPTURE(seed);
    CHECK_NOTHROW(target(seed));
  }
  for (size_t i = 0; i < rounds(); ++i) {
    std::string input = damage(seeds[i % seeds.size()], random);
    if (random.below(8) == 0) input = damage(std::move(input), random);
    try {
      target(input);
    } catch (const Error&) {
      ++refused;
    } catch (const std::exception& e) {
      FAIL_CHECK("hex " << hex(input) << ": " << e.what());
    }
  }
  CHECK(refused > 0);
}

const std::string kDigest(64, 'a'), kCommit(40, 'b');

}  // namespace

TEST_CASE("fuzz: TOML") {
  fuzz({"node.role = \"head\"\n[topology]\nranks = [\"head:0\", \"worker:0\"]\n[api]\nport = 8888\n",
        "[hub]\nexclude = ['a', \"b\"]\ngive_up_after = \"500ms\"\nsegment_bytes = \"64MiB\"\n", example_config()},
       [](const std::string& text) { Config::parse(text, "f.toml"); });
}

TEST_CASE("fuzz: a recipe's .env") {
  fuzz({"HEAD_IP=10.0.0.1\nexport PORT=\"9000\" # x\nGPU_MEM_UTIL=0.85\nEXTRA_ARGS='--kv-cache-memory-bytes 1000'\n"},
       [](const std::string& text) { cli::import_recipe(text, ".env", "head"); });
}

TEST_CASE("fuzz: listings and indices of a Hub") {
  fuzz({cat(R"([{"type":"file","oid":")", kCommit, R"(","size":12,"path":"a/b.json"},{"type":"file","oid":")", kCommit,
            R"(","size":5,"lfs":{"oid":")", kDigest, R"(","size":5,"pointerSize":1},"path":"m.safetensors"}])")},
       [](const std::string& text) { hub::parse_tree(text, "here"); });
  fuzz({R"({"metadata":{"total_size":5},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors"}})"},
       [](const std::string& text) { hub::parse_index(text, "here"); });
  fuzz({"https://huggingface.co/api/models/a/b?x=1", "http://127.0.0.1:80/"},
       [](const std::string& text) { hub::parse_url(text); });
}

TEST_CASE("fuzz: what agents say to each other") {
  fuzz({cat(R"({"version":1,"repo":"org/name","commit":")", kCommit,
            R"(","refs":["main"],"files":[{"path":"a/b","etag":")", kDigest, R"(","size":5}]})")},
       [](const std::string& text) { sync::parse_manifest(text); });
  fuzz({R"({"epoch":3,"kind":"stop_rank","rank":1,"generation":7,"grace_ms":1000})",
        R"({"epoch":3,"kind":"clean","generation":7})"},
       [](const std::string& text) { agent::parse_command(text); });
  fuzz(
      {R"({"name":"w","role":"worker","processes":[{"name":"rank1","pid":5,"phase":"ready","progress":[1,2],"exit":{"code":1,"signal":0,"ms_ago":4}}],"memory":{"total":5,"available":4}})"},
      [](const std::string& text) { agent::parse_report(text); });
  fuzz(
      {R"({"node":"head","checks":[{"name":"ports","code":"E214","verdict":"fail","measured":"x","remedy":"y"}],"mtu":9000,"clock":1})"},
      [](const std::string& text) { preflight::parse_node_result(text); });
  fuzz({R"({"models":[{"key":"model","repo":"org/name","commit":")" + kCommit + R"("}]})"},
       [](const std::string& text) { agent::parse_hub_models(text); });
  fuzz({R"({"api.port":"9000","serve.max_seqs":4})"}, [](const std::string& text) { agent::parse_settings(text); });
}

TEST_CASE("fuzz: notices of ranks, addresses, tokens, certificates") {
  Random random(1);
  for (size_t i = 0; i < rounds(); ++i) {
    const std::string input = damage("READY=1\nX_PHASE=load_target\nX_DONE=3\nX_TOTAL=9\nWATCHDOG=1\n", random);
    CHECK_NOTHROW(parse_notice(input));  // a rank that talks nonsense is no reason to fail
  }
  fuzz({"127.0.0.1:8890", "[::1]:8890", "worker:1"}, [](const std::string& text) { parse_host_port(text); });
  fuzz({cat("glm53-", std::string(32, '0'), "-", kDigest)}, [](const std::string& text) { JoinToken::parse(text); });
  const std::string key = pki::make_key(), ca = pki::make_ca(key, "spark", {0, 4'000'000'000});
  const std::string request = pki::make_request(key);
  fuzz({ca}, [](const std::string& text) { pki::read_certificate(text); });
  fuzz({request}, [&](const std::string& text) {
    pki::sign(key, ca, text, {"spark", "node", "w"}, {0, 4'000'000'000});
  });
}
