// The official `openai` client for Node.js against the real engine, for tools against a fake rank
// (openai-node/check.mjs, installed into the build folder by scripts/test.sh).
#include <filesystem>

#include <doctest/doctest.h>

#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

using namespace glm53;
using namespace glm53::e2e;

namespace {

constexpr const char* kKey = "sk-of-the-test";

class Served {
 public:
  explicit Served(bool fake_rank) : cluster_(options(dir_, fake_rank)) { cluster_.up(); }
  std::string check(const std::string& name) const {
    const std::string script = source_dir() + "/build/openai-node/check.mjs";
    if (!std::filesystem::exists(script)) return "the client is not installed; scripts/test.sh does it";
    const auto result =
        run_program({"/usr/bin/env", "node", script, name, cluster_.api_url() + "/v1", kKey}, cluster_.temp_dir());
    return result.code == 0 ? "ok" : result.output;
  }

 private:
  static ClusterOptions options(const TempDir& dir, bool fake_rank) {
    write_file(dir.path() + "/keys", cat("tester:", kKey, "\n"), 0600);
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
TEST_CASE("openai client: tools, their results, and calls in a stream") {
  const Served echo(true);  // glm53-tiny has not learnt to call; a fake rank's answer is the prompt with its calls
  CHECK(echo.check("tools") == "ok");
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
