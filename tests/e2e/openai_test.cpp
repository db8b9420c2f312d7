// Real clients for Node.js against the real engine, for tools against a fake rank: `openai`, `@anthropic-ai/sdk`, `ai`,
// `@langchain/openai` (openai-node/, installed into the build folder by scripts/test.sh).
#include <filesystem>

#include <doctest/doctest.h>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

using namespace glm53;
using namespace glm53::e2e;

namespace {

constexpr const char* kKey = "sk-of-the-test";
constexpr const char* kNarrowKey = "sk-one-at-a-time";

class Served {
 public:
  explicit Served(bool fake_rank) : cluster_(options(dir_, fake_rank)) { cluster_.up(); }
  std::string check(const std::string& name, const std::string& client = "check") const {
    const std::string script = cat(source_dir(), "/build/openai-node/", client, ".mjs");
    if (!std::filesystem::exists(script)) return "the client is not installed; scripts/test.sh does it";
    const auto result = run_program(
        {"/usr/bin/env", "node", script, name, cluster_.api_url() + "/v1", kKey, kNarrowKey}, cluster_.temp_dir());
    return result.code == 0 ? "ok" : result.output;
  }

 private:
  static ClusterOptions options(const TempDir& dir, bool fake_rank) {
    write_file(dir.path() + "/keys", cat("tester:", kKey, "\nnarrow:", kNarrowKey, " concurrent=1\n"), 0600);
    ClusterOptions result;
    result.fake_rank = fake_rank;
    result.head["api.key_file"] = cat("\"", dir.path(), "/keys\"");
    return result;
  }
  TempDir dir_;
  LocalCluster cluster_;
};

/// One cluster for all cases that need the model.
const Served& served() {
  static const Served one(false);
  return one;
}

}  // namespace

TEST_CASE("openai client: chat") {
  CHECK(served().check("chat") == "ok");
}
TEST_CASE("openai client: streamed chat with usage") {
  CHECK(served().check("stream") == "ok");
}
TEST_CASE("all clients: tools, their results, and calls in a stream") {
  // glm53-tiny has not learnt to call; a fake rank's answer is the prompt with its calls.
  const Served echo(true);
  CHECK(echo.check("tools") == "ok");
  for (const char* client : {"anthropic", "ai", "langchain"}) {
    CAPTURE(client);
    CHECK(echo.check("tools", client) == "ok");
  }
}
TEST_CASE("openai client: a required call and a named one") {
  CHECK(served().check("forced") == "ok");
}
TEST_CASE("openai client: a stream that is broken off") {
  CHECK(served().check("abort") == "ok");
}
TEST_CASE("openai client: models") {
  CHECK(served().check("models") == "ok");
}
TEST_CASE("openai client: completions") {
  CHECK(served().check("completion") == "ok");
}
TEST_CASE("openai client: 401 for a wrong key") {
  CHECK(served().check("401") == "ok");
}
TEST_CASE("openai client: 404 for an unknown model") {
  CHECK(served().check("404") == "ok");
}
TEST_CASE("openai client: 400 for a bad request") {
  CHECK(served().check("400") == "ok");
}
TEST_CASE("openai client: responses, whole and streamed") {
  CHECK(served().check("responses") == "ok");
}
TEST_CASE("openai client: what is not served") {
  CHECK(served().check("unsupported") == "ok");
}
TEST_CASE("other clients: chat, stream, abort, errors, another try after 429") {
  for (const char* client : {"anthropic", "ai", "langchain"}) {
    for (const char* name : {"chat", "stream", "abort", "errors", "retry"}) {
      CAPTURE(client);
      CAPTURE(name);
      CHECK(served().check(name, client) == "ok");
    }
  }
}
