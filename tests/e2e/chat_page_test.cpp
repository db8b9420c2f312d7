// The chat page in headless Chromium against the real engine (tests/page/browser.mjs). Not in a tier: scripts/test.sh
// --full runs it where there is a Chromium.
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
  Served() : cluster_(options(dir_)) { cluster_.up(); }
  std::string check(const std::string& name) const {
    const auto result = run_program({"/usr/bin/env", "node", source_dir() + "/tests/page/browser.mjs", name,
                                     cluster_.api_url() + "/", kKey, cluster_.temp_dir()},
                                    cluster_.temp_dir(), std::chrono::seconds(240));
    return result.code == 0 ? "ok" : result.output;
  }

 private:
  static ClusterOptions options(const TempDir& dir) {
    write_file(dir.path() + "/keys", cat("tester:", kKey, "\n"), 0600);
    ClusterOptions result;
    result.fake_rank = false;
    result.head["api.key_file"] = cat("\"", dir.path(), "/keys\"");
    return result;
  }
  TempDir dir_;
  LocalCluster cluster_;
};

const Served& served() {
  static const Served one;
  return one;
}

}  // namespace

TEST_CASE("chat page: a wrong key, the right one, an answer with its figures, regenerate, edit, reload, new chat") {
  CHECK(served().check("chat") == "ok");
}
TEST_CASE("chat page: thinking stands in a fold") {
  CHECK(served().check("thinking") == "ok");
}
TEST_CASE("chat page: Esc stops, what came stays, and the next message is answered") {
  CHECK(served().check("stop") == "ok");
}
TEST_CASE("chat page: a refused image is told in the server's words, and the message can be mended") {
  CHECK(served().check("image") == "ok");
}
TEST_CASE("chat page: a server that is loading is asked again when it says") {
  CHECK(served().check("retry") == "ok");
}
TEST_CASE("chat page: focus order, names of controls, line breaks, the switch of colours") {
  CHECK(served().check("keyboard") == "ok");
}
TEST_CASE("chat page: light, dark and narrow look as they did") {
  CHECK(served().check("pictures") == "ok");
}
TEST_CASE("chat page: a tool call, its result, and calls that follow") {
  CHECK(served().check("tools") == "ok");
}
TEST_CASE("chat page: hostile answers are text") {
  CHECK(served().check("hostile") == "ok");
}
