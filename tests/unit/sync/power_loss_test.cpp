// Power cuts of the worker at random moments of a copy.
#include "tests/power_loss.h"

#include <filesystem>
#include <random>

#include <doctest/doctest.h>

#include "tests/kills.h"
#include "tests/unit/sync/world.h"

using namespace glm53;
using namespace glm53::test;

TEST_CASE("sync: power lost at any moment leaves no wrong blob, and the next copy goes on") {
  std::minstd_rand random(std::random_device{}());
  int cut = 0;
  for (int round = 0; round < half_of_kills(10); ++round) {
    CAPTURE(round);
    SyncWorld w;
    {
      PowerLoss disk(1 + static_cast<int64_t>(random() % 7'000'000));
      w.ops = &disk;
      w.from.give_up_after = std::chrono::milliseconds(20);
      cut += error_of([&] { w.copy(); }).code() == Code::ok ? 0 : 1;
      w.receiver.reset();
      disk.lose();
      w.ops = &FileOps::real();
    }
    const std::string blobs = w.to.cache + "/models--org--model/blobs";
    if (std::filesystem::exists(blobs)) {
      for (const auto& entry : std::filesystem::directory_iterator(blobs)) {
        const std::string name = entry.path().filename().string();
        if (name.find('.') == std::string::npos) CHECK(etag_of(read_file(entry.path().string())) == name);
      }
    }
    w.from.give_up_after = std::chrono::milliseconds(2000);
    w.copy();
    CHECK(w.whole());
  }
  CHECK(cut > 2);
}
