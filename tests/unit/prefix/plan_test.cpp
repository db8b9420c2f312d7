#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "engine/prefix/snapshot_plan.h"

namespace glm53::prefix {
namespace {

std::string text_of(const std::vector<Export>& plan) {
  static constexpr const char* kNames[] = {"head", "turn", "output", "interval", "divergence"};
  std::string out;
  for (const Export& e : plan) out += cat(out.empty() ? "" : " ", e.position, ":", kNames[static_cast<size_t>(e.cls)]);
  return out;
}

TEST_CASE("snapshots of a prompt") {
  struct Row {
    const char* what;
    int32_t prompt;
    std::vector<int32_t> boundaries;
    int32_t hit, matched, interval;
    const char* expected;
  };
  const Row rows[] = {
      {"nothing to save", 50, {}, 0, 0, 8192, ""},
      {"head and turn, rounded down", 1000, {300, 990}, 0, 0, 8192, "256:head 960:turn"},
      {"a boundary on the grid stays", 1024, {256, 1024}, 0, 0, 8192, "256:head 1024:turn"},
      {"one boundary is a turn", 1000, {990}, 0, 0, 8192, "960:turn"},
      {"no head (0): the other is still a turn", 1000, {0, 990}, 0, 0, 8192, "960:turn"},
      {"further boundaries are turns", 1000, {200, 500, 990}, 0, 0, 8192, "192:head 448:turn 960:turn"},
      {"same block twice: the heavier class", 130, {128, 129}, 0, 0, 8192, "128:head"},
      {"in front of the first block end", 130, {10, 129}, 0, 0, 8192, "128:turn"},
      {"outside the prompt", 100, {-5, 101}, 0, 0, 8192, ""},
      {"interval", 20000, {}, 0, 0, 8192, "8192:interval 16384:interval"},
      {"interval meets a turn", 8192, {8192}, 0, 0, 8192, "8192:turn"},
      {"no interval", 20000, {}, 0, 0, 0, ""},
      {"nothing up to the hit", 20000, {300, 19990}, 8192, 8192, 8192, "16384:interval 19968:turn"},
      {"divergence", 5000, {}, 0, 3000, 0, "2944:divergence"},
      {"divergence near the hit", 5000, {}, 2000, 3024, 0, ""},
      {"divergence far enough from the hit", 5000, {}, 2000, 3025, 0, "3008:divergence"},
      {"divergence and interval at one place", 9000, {}, 0, 8200, 8192, "8192:divergence"},
      {"matched more than there is", 2000, {}, 0, 9000, 0, "1984:divergence"},
  };
  for (const Row& r : rows) {
    CAPTURE(r.what);
    ExportRequest request;
    request.prompt = r.prompt;
    request.boundaries = r.boundaries;
    request.hit = r.hit;
    request.matched = r.matched;
    request.interval = r.interval;
    CHECK(text_of(plan_exports(request)) == r.expected);
  }
}

TEST_CASE("exact positions on request, refused nonsense") {
  ExportRequest request;
  const std::vector<int32_t> boundaries{300, 990};
  request.prompt = 1000;
  request.boundaries = boundaries;
  request.align = 1;
  CHECK(text_of(plan_exports(request)) == "300:head 990:turn");
  request.align = 0;
  CHECK_THROWS_AS(plan_exports(request), Error);
  request.align = 64;
  request.hit = -1;
  CHECK_THROWS_AS(plan_exports(request), Error);
}

TEST_CASE("the end of the position range does not overflow") {
  ExportRequest request;
  request.prompt = INT32_MAX;
  request.interval = 1 << 30;
  CHECK(text_of(plan_exports(request)) == "1073741824:interval");
}

TEST_CASE("at most two in a piece: the heaviest, then the deepest") {
  const std::vector<Export> plan{{64, SnapClass::interval},
                                 {128, SnapClass::head},
                                 {192, SnapClass::interval},
                                 {256, SnapClass::turn},
                                 {320, SnapClass::divergence}};
  CHECK(text_of(exports_of_piece(plan, 0, 64)) == "64:interval");
  CHECK(text_of(exports_of_piece(plan, 64, 64)) == "");
  CHECK(text_of(exports_of_piece(plan, 0, 192)) == "128:head 192:interval");
  CHECK(text_of(exports_of_piece(plan, 0, 320)) == "128:head 256:turn");
  CHECK(text_of(exports_of_piece(plan, 128, 320)) == "256:turn 320:divergence");
  CHECK(text_of(exports_of_piece(plan, 0, 320, 1)) == "128:head");
}

TEST_CASE("thinning keeps the newest two, then doubles the spacing, and never regrets") {
  const auto kept = [](int32_t newest) {
    std::string out;
    for (int32_t k = 1; k <= newest; ++k)
      if (keep_interval(k * 512, newest * 512, 512)) out += cat(out.empty() ? "" : " ", k);
    return out;
  };
  CHECK(kept(1) == "1");
  CHECK(kept(2) == "1 2");
  CHECK(kept(4) == "2 3 4");
  CHECK(kept(16) == "8 12 14 15 16");
  CHECK(kept(21) == "8 16 18 20 21");
  for (int32_t newest = 2; newest < 300; ++newest)
    for (int32_t k = 1; k < newest; ++k)
      if (!keep_interval(k * 64, (newest - 1) * 64, 64)) REQUIRE(!keep_interval(k * 64, newest * 64, 64));
  CHECK(keep_interval(64, 6400, 0));
}

TEST_CASE("value: class, uses, age, tokens saved") {
  using std::chrono::minutes;
  CHECK(value(SnapClass::divergence, 1, Time(0), 640) == doctest::Approx(640));
  CHECK(value(SnapClass::output, 3, Time(0), 640) == doctest::Approx(1920));
  CHECK(value(SnapClass::head, 1, minutes(30), 640) == doctest::Approx(8 * 320));
  CHECK(value(SnapClass::turn, 1, minutes(60), 640) == doctest::Approx(2 * 160));
  CHECK(value(SnapClass::interval, 1, minutes(10), 640, minutes(10)) == doctest::Approx(160));
}

}  // namespace
}  // namespace glm53::prefix
