// Power cuts at random moments of a download: no blob with its name and other bytes, and the next run brings the rest.
#include "tests/power_loss.h"

#include <filesystem>
#include <random>

#include <doctest/doctest.h>

#include "agent/hub/blob_hash.h"
#include "fixture.h"
#include "tests/kills.h"

using namespace glm53;
using namespace glm53::test;

TEST_CASE("download: power lost at any moment leaves no wrong blob, and the next run goes on") {
  std::minstd_rand random(std::random_device{}());
  int cut = 0;
  for (int round = 0; round < half_of_kills(15); ++round) {
    Fixture f;
    CAPTURE(round);
    f.settings.journal_period = hub::Millis(0);
    {
      PowerLoss disk(1 + static_cast<int64_t>(random() % 450'000));
      {
        f.settings.retry.give_up_after = hub::Millis(20);
        hub::Downloader downloader(f.settings, disk);
        const Error e = error_of([&] { downloader.run(f.request); });
        cut += e.code() == Code::ok ? 0 : 1;
      }
      disk.lose();
    }
    const std::string blobs = f.repo_dir() + "/blobs";
    if (std::filesystem::exists(blobs)) {
      for (const auto& entry : std::filesystem::directory_iterator(blobs)) {
        const std::string name = entry.path().filename().string();
        if (name.find('.') != std::string::npos) continue;
        CHECK(hub::hash_of(read_file(entry.path().string()), name.size()) == name);
      }
    }
    const bool ref = std::filesystem::exists(f.repo_dir() + "/refs/main");
    CHECK((!ref || f.whole()));
    f.settings.retry.give_up_after = hub::Millis(5000);
    f.run();
    CHECK(f.whole());
    CHECK_FALSE(f.event("E610"));  // nothing that the journal counts on was lost
  }
  CHECK(cut > 2);
}
