// kill -9 at random moments: the final bytes are right, and little is fetched twice.
#include <chrono>
#include <csignal>
#include <random>
#include <thread>

#include <doctest/doctest.h>

#include "common/process.h"
#include "common/strings.h"
#include "fixture.h"

using namespace glm53;
using namespace glm53::test;

namespace {

/// How often in all: five times, or what GLM53_KILLS says.
int kills_wanted() {
  const auto given = environment("GLM53_KILLS");
  const auto number = given ? parse_int(*given) : std::nullopt;
  return number && *number > 0 ? static_cast<int>(*number) : 5;
}

/// A download that is killed five times.
void download_with_kills(std::minstd_rand& random) {
  Fixture f(12 << 20);
  f.hub.faults.bytes_per_s = 3 << 20;
  const auto spawn_child = [&] {
    SpawnOptions options;
    options.argv = {std::string(GLM53_BINARY_DIR) + "/tests/glm53-test-download", f.settings.cache,
                    f.settings.journal_dir, f.settings.endpoint, Fixture::kRepo};
    options.env = {{"PATH", "/usr/bin:/bin"}};
    return spawn(options);
  };
  for (int i = 0; i < 5; ++i) {
    const Child child = spawn_child();
    // By bytes, not by time: each life brings something.
    const int64_t enough = f.hub.body_bytes + (200 << 10) + static_cast<int64_t>(random() % (1500u << 10));
    while (f.hub.body_bytes < enough && identify(child.id.pid))
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ::kill(child.id.pid, SIGKILL);
    while (!try_wait(child.id.pid)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  f.hub.faults.bytes_per_s = 0;
  const Child last = spawn_child();
  std::optional<ExitStatus> status;
  while (!(status = try_wait(last.id.pid))) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(status->code == 0);
  CHECK(f.whole());
  const int64_t again = f.hub.body_bytes - f.payload();
  MESSAGE("fetched again: ", again, " of ", f.payload(), " bytes in 5 kills");
  // A life loses at most what came since the journal's last entry: no more than one segment a stream.
  CHECK(again <= 5 * (8 * (int64_t{64} << 10) + (int64_t{1} << 20)));
}

}  // namespace

TEST_CASE("download: killed five times, it ends with the right bytes and fetches little again") {
  std::minstd_rand random(std::random_device{}());
  for (int done = 0; done < kills_wanted(); done += 5) download_with_kills(random);
}
