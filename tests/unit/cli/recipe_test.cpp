// The recipe's .env: read without running it, and every variable of it accounted for.
#include "cli/recipe.h"

#include <map>
#include <set>

#include <doctest/doctest.h>

#include "common/config.h"
#include "common/error.h"
#include "common/file.h"
#include "common/process.h"
#include "common/strings.h"

using namespace glm53;
using namespace glm53::cli;

namespace {

std::string line_of(const std::string& env) {
  try {
    import_recipe(env, ".env", "head");
  } catch (const Error& e) {
    CHECK(e.code() == Code::config);
    return e.what();
  }
  return "ok";
}

bool noted(const Import& import, const std::string& part) {
  for (const std::string& note : import.notes) {
    if (note.find(part) != std::string::npos) return true;
  }
  return false;
}

constexpr const char* kEnv = R"(# of the recipe
HEAD_IP=10.0.0.1
WORKER_IP=10.0.0.2 # the other one
WORKER_USER=me
PORT=9000
SERVED_MODEL_NAME='big small'
export MAX_MODEL_LEN=850000
MAX_NUM_SEQS=4
GPU_MEM_UTIL=0.85
KV_CACHE_DTYPE=fp8
EXTRA_ARGS="--kv-cache-memory-bytes 15032385536"
READY_TIMEOUT=1200
HF_HOME=/data/hf
HF_DOWNLOAD_EXCLUDE="docs/**,scripts/**"
MODEL=org/name
MODEL_REVISION=25a44fdbf16862a46b7cc9921142c6c81350af2f
VLLM_API_KEY=sk-very-secret
HF_TOKEN="hf_secret"
SPEC_METHOD=dflash
MY_OWN_THING=1
PROT=1
DEFAULT_MAX_NEW_TOKENS=
)";

}  // namespace

TEST_CASE("recipe: every variable is named once, with a key that there is or a reason") {
  std::set<std::string_view> names, keys;
  for (const ConfigKey& key : config_keys()) keys.insert(key.name);
  for (const Knob& knob : knobs()) {
    CAPTURE(std::string(knob.name));
    CHECK(names.insert(knob.name).second);
    if (knob.key.empty()) {
      CHECK_FALSE(knob.note.empty());
    } else {
      CHECK(keys.contains(knob.key));
      CHECK_FALSE(knob.secret);
    }
  }
  CHECK(find_knob("PORT")->key == "api.port");
  CHECK(find_knob("port") == nullptr);
}

TEST_CASE("recipe: docs/from-the-recipe.md is the table") {
  const std::string path = GLM53_SOURCE_DIR "/docs/from-the-recipe.md";
  if (environment("GLM53_UPDATE")) write_file(path, recipe_page());
  CHECK(read_file(path) == recipe_page());
}

TEST_CASE("recipe: lines as a shell reads them, without running any") {
  const auto lines = parse_env("# one\n\n A=1\nexport B=\"two words\" # why\nC='costs $5'\nD=\r\nE=a'b'\"c\"\n", "f");
  REQUIRE(lines.size() == 5);
  CHECK(lines[0].value == "1");
  CHECK(lines[1].name == "B");
  CHECK(lines[1].value == "two words");
  CHECK(lines[1].line == 4);
  CHECK(lines[2].value == "costs $5");
  CHECK(lines[3].value.empty());
  CHECK(lines[4].value == "abc");
}

TEST_CASE("recipe: a whole .env becomes a file for the head and one for the worker") {
  const Import head = import_recipe(kEnv, ".env", "head");
  const Config config = Config::parse(head.toml, "head.toml");
  CHECK(config.text("node.role") == "head");
  CHECK(config.text("head.fabric_address") == "10.0.0.1");
  CHECK(config.text("admin.listen") == "10.0.0.1:8890");
  CHECK(config.text("worker.admin") == "10.0.0.2:8890");
  CHECK(config.integer("api.port") == 9000);
  CHECK(config.text("api.model_name") == "big");
  CHECK(config.integer("serve.max_context") == 850000);
  CHECK(config.integer("memory.reserve") == int64_t{18278} << 20);
  CHECK(config.integer("memory.kv_bytes") == 15032385536);
  CHECK(config.text("serve.kv_format") == "fp8_c528");
  CHECK(config.duration("ranks.ready_timeout") == std::chrono::seconds(1200));
  CHECK(config.list("hub.exclude") == std::vector<std::string>{"docs/**", "scripts/**"});
  CHECK(config.text("hub.home") == "/data/hf");
  for (const std::string secret : {"sk-very-secret", "hf_secret"}) {
    CHECK(head.toml.find(secret) == std::string::npos);
    CHECK_FALSE(noted(head, secret));
  }
  CHECK(noted(head, ".env:17: VLLM_API_KEY: write it to a file of mode 0600"));
  CHECK(config.text("draft.kind") == "auto");
  CHECK(noted(head, "MY_OWN_THING: is no variable of the recipe"));
  CHECK(noted(head, "PROT: is no variable of the recipe; did you mean PORT?"));

  const Import worker = import_recipe(kEnv, ".env", "worker");
  const Config other = Config::parse(worker.toml, "worker.toml");
  CHECK(other.text("node.role") == "worker");
  CHECK(other.text("admin.listen") == "10.0.0.2:8890");
  CHECK(worker.toml.find("api.port") == std::string::npos);
  CHECK(other.text("hub.home").empty());
}

TEST_CASE("recipe: what a shell would run or expand is refused with its line") {
  CHECK(line_of("A=1\nPORT=$(cat port)\n") == ".env:2: '$' would be expanded by a shell");
  CHECK(line_of("HF_HOME=\"$HOME/hf\"") == ".env:1: '$' would be expanded by a shell");
  CHECK(line_of("HF_HOME=`pwd`") == ".env:1: '`' would be expanded by a shell");
  CHECK(line_of("PORT=1; rm -rf /") == ".env:1: ';' means something to a shell");
  CHECK(line_of("PORT=1 2") == ".env:1: a value with spaces needs quotes");
  CHECK(line_of("PORT=\"1") == ".env:1: the quote \" is not closed");
  CHECK(line_of("if true; then") == ".env:1: this is no NAME=value");
  CHECK(line_of("2X=1") == ".env:1: this is no NAME=value");
  CHECK(line_of(std::string("A=\0", 3)) == ".env is no text");
  CHECK(line_of("A=\xff") == ".env is no text");
  CHECK(line_of("C='it costs $5'\nB=\"two \\\"words\\\"\" # why\n\n# only this\n") == "ok");
}

TEST_CASE("recipe: values that cannot be are named with their line") {
  CHECK(line_of("\nPORT=99999").starts_with(".env:2: "));
  CHECK(line_of("GPU_MEM_UTIL=1.5").starts_with(".env:1: GPU_MEM_UTIL: '1.5' is no share"));
  CHECK(line_of("EXTRA_ARGS='--enforce-eager --x'").find("have no meaning here: --enforce-eager --x") !=
        std::string::npos);
  CHECK(line_of("KV_CACHE_DTYPE=int3").starts_with(".env:1: KV_CACHE_DTYPE"));
  CHECK(line_of("PORT=99999\nPORT=8000") == "ok");  // a shell keeps the last one
}

TEST_CASE("recipe: variables of the environment become settings of the cluster, nothing else does") {
  const std::map<std::string, std::string> given{{"PORT", "9000"},        {"HF_HOME", "/x"},     {"TP", "4"},
                                                 {"READY_TIMEOUT", "60"}, {"VLLM_API_KEY", "k"}, {"PATH", "/bin"}};
  const auto overrides = recipe_overrides([&](const char* name) -> std::optional<std::string> {
    const auto it = given.find(name);
    return it == given.end() ? std::nullopt : std::optional(it->second);
  });
  REQUIRE(overrides.size() == 2);
  CHECK(overrides[0].setting == "api.port=9000");
  CHECK(overrides[1].setting == "ranks.ready_timeout=60s");
  const auto bad = [](const char* name) {
    return std::string_view(name) == "GPU_MEM_UTIL" ? std::optional<std::string>("x") : std::nullopt;
  };
  CHECK_THROWS_WITH_AS(recipe_overrides(bad), doctest::Contains("environment variable GPU_MEM_UTIL"), Error);
}
