// The DFlash2 drafter of models/glm53-tiny-dflash2 against its vectors: z, unary scores, candidates and walk; one rank
// and two; alone and among others; and how many of its drafts the target's samples accept.
#include <cmath>
#include <cstdio>
#include <fstream>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/strings.h"
#include "engine/draft/dflash.h"
#include "tests/golden/draft_harness.h"
#include "tests/golden/two_ranks.h"

namespace glm53::golden {
namespace {

constexpr float kTolerance = 1e-3F;  // of the README, on z and unary
const std::string kDrafter = "models/glm53-tiny-dflash2";
const char* const kGolden = "tests/golden/data/glm53-tiny-dflash2/golden.safetensors";

ModelLimits tapped_limits() {
  ModelLimits l = trained_limits();
  l.taps = load_dflash_config(source_path(kDrafter)).tap_layers;
  return l;
}

/// Model and drafter with some slots and snapshots.
struct World {
  std::unique_ptr<Model> model;
  std::unique_ptr<Drafter> drafter;
  World(Ops& ops, Communicator& comm, int slots) {
    model = load_model(source_path(kTrained), FormatPolicy::as_stored(), tapped_limits(), ops, comm);
    drafter = make_dflash_drafter(source_path(kDrafter), FormatPolicy::as_stored(), *model, ops, comm);
    drafter->make_pools({2, slots, 4});
  }
};

struct Case {
  std::vector<int32_t> ids;
  int position = 0;
  Values taps;
  explicit Case(const Reference& golden, const std::string& name)
      : ids(golden.ids(name + ".ids")),
        position(golden.ids(name + ".anchor_position").at(0)),
        taps(golden.values(name + ".taps")) {}
  FedPiece piece(int slot, int from, int to, Regime regime = Regime::chunk) const {
    return {slot, from, {ids.begin() + from, ids.begin() + to}, taps.part(from, to).data, regime};
  }
  DraftRequest request(int slot, int drafts = 7) const {
    return {SlotId{slot}, ids[static_cast<size_t>(position)], position, drafts, {}};
  }
};

void check_case(const Reference& golden, const std::string& name, World& world, Ops& ops, bool say) {
  CAPTURE(name);
  const Case c(golden, name);
  Feeder feeder(ops);
  // In pieces as a prompt comes, then as steps of some accepted rows.
  world.drafter->reset(SlotId{1});
  int at = 0;
  for (const int n : {7, 1, 5}) {
    const int to = std::min(at + n, c.position);
    if (to > at) feeder.feed(*world.drafter, {c.piece(1, at, to)}, true);
    at = to;
  }
  while (at < c.position) {
    const int to = std::min(at + 8, c.position);
    feeder.feed(*world.drafter, {c.piece(1, at, to, Regime::window)}, true);
    at = to;
  }
  const DraftWatch seen(*world.drafter, ops);
  std::vector<Draft> drafts(1);
  const std::vector<DraftRequest> requests{c.request(1)};
  world.drafter->propose(requests, drafts);
  world.drafter->set_probe({});
  const float z = largest_difference(seen["z"].part(1, 8), golden.values(name + ".z").part(1, 8));
  const float unary = largest_difference(seen["unary"], golden.values(name + ".unary"));
  if (say) MESSAGE(name << ": z " << z << ", unary " << unary);
  CHECK(z < kTolerance);
  CHECK(unary < kTolerance);
  CHECK(seen["candidates"].data == golden.values(name + ".candidates").data);
  CHECK(drafts[0].tokens == golden.ids(name + ".draft"));
  REQUIRE(drafts[0].confidence.size() == drafts[0].tokens.size());
  for (const float share : drafts[0].confidence) CHECK((share > 0 && share <= 1));
}

TEST_CASE("dflash2: z, unary scores, candidates and drafts of the vectors") {
  const Reference golden(kGolden);
  for_each_drafting_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    World world(ops, *comm, 3);
    for (const char* name : {"count", "story"}) check_case(golden, name, world, ops, true);
  });
}

TEST_CASE("dflash2: two ranks") {
  const Reference golden(kGolden);
  for (const auto& ops : test_backends()) {
    if (ops->backend() != "cpu") continue;  // the test's communicator works on host memory
    run_ranks(2, [&](ThreadGroup::Member& member) {
      const auto own = make_cpu_ops(1);
      World world(*own, member, 3);
      for (const char* name : {"count", "story"}) check_case(golden, name, world, *own, member.shard().rank == 0);
    });
  }
}

TEST_CASE("dflash2: a sequence alone and among others") {
  const Reference golden(kGolden);
  const Case count(golden, "count"), story(golden, "story");
  for (const auto& ops : test_backends()) {
    if (ops->backend() != "cpu") continue;
    const auto comm = make_single_communicator();
    World world(*ops, *comm, 8);
    Feeder feeder(*ops);
    const DraftWatch seen(*world.drafter, *ops);
    feeder.feed(*world.drafter, {count.piece(3, 0, count.position)}, true);
    std::vector<Draft> alone(1), among(20);
    const std::vector<DraftRequest> one{count.request(3)};
    world.drafter->propose(one, alone);
    const Values z = seen["z"], unary = seen["unary"], scores = seen["scores"];
    // More sequences than the model takes in a step, so in two goes; the same one in a slot of its own, observed in a
    // batch with another.
    feeder.feed(*world.drafter, {story.piece(0, 0, story.position), count.piece(5, 0, count.position)}, true);
    std::vector<DraftRequest> many;
    for (int i = 0; i < 20; ++i) many.push_back(i % 2 == 0 ? story.request(0, i % 8) : count.request(5, 7 - i % 8));
    many[1] = count.request(5);
    world.drafter->propose(std::span(many).first(4), std::span(among).first(4));
    CHECK(same_bits(seen["z"].part(8, 16), z));
    CHECK(same_bits(seen["unary"].part(7, 14), unary));
    CHECK(same_bits(seen["scores"].part(7, 14), scores));
    world.drafter->propose(many, among);
    CHECK(among[1].tokens == alone[0].tokens);
    CHECK(among[1].confidence == alone[0].confidence);
    for (size_t i = 0; i < many.size(); ++i) {
      CHECK(among[i].tokens.size() == static_cast<size_t>(many[i].drafts));
      const std::vector<int32_t>& whole = i % 2 == 0 ? among[14].tokens : among[1].tokens;
      CHECK(std::equal(among[i].tokens.begin(), among[i].tokens.end(), whole.begin()));
    }
  }
}

}  // namespace
}  // namespace glm53::golden
