// The unit, as the service manager reads it.
#include <unistd.h>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::e2e;

namespace {

constexpr const char* kAnalyze = "/usr/bin/systemd-analyze";

/// The unit as it is installed, with the program of this build.
std::string unit(const test::TempDir& dir) {
  std::string text = read_file(source_dir() + "/systemd/glm53-agent.service.in");
  const std::string needle = "@GLM53_BINDIR@/glm53-agent";
  for (size_t at = 0; (at = text.find(needle, at)) != std::string::npos;)
    text.replace(at, needle.size(), program("glm53-agent"));
  const std::string path = dir / "glm53-agent.service";
  write_file(path, text);
  return path;
}

bool no_analyze() {
  if (::access(kAnalyze, X_OK) == 0) return false;
  MESSAGE("no systemd-analyze here: not checked");
  return true;
}

}  // namespace

TEST_CASE("systemd finds nothing wrong with the unit") {
  if (no_analyze()) return;
  const test::TempDir dir;
  const std::string path = unit(dir);
  const ProgramResult good = run_program({kAnalyze, "verify", "--man=no", path}, dir.path(), std::chrono::seconds(60));
  CHECK(good.code == 0);
  CHECK(good.output.empty());
  // And it would: a key that is none is reported.
  write_file(path, read_file(path) + "\n[Service]\nProtectEverything=yes\n");
  CHECK(run_program({kAnalyze, "verify", "--man=no", path}, dir.path(), std::chrono::seconds(60))
            .output.find("ProtectEverything") != std::string::npos);
}

TEST_CASE("the unit is exposed to little: at most 3.5 of 10") {
  if (no_analyze()) return;
  const test::TempDir dir;
  const std::string path = unit(dir);
  const auto judge = [&](const char* threshold) {
    return run_program({kAnalyze, "security", "--offline=true", "--no-pager", cat("--threshold=", threshold), path},
                       dir.path(), std::chrono::seconds(60));
  };
  const ProgramResult result = judge("35");
  CAPTURE(result.output);
  CHECK(result.code == 0);
  CHECK(judge("5").code != 0);
}
