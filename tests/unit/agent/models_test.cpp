// The reconciler's tables of models that are named by repository: fetched from a Hub, copied from the head.
#include <doctest/doctest.h>

#include "tests/unit/agent/world.h"

using namespace glm53;
using namespace glm53::reconcile;
using namespace std::chrono_literals;

TEST_CASE("models that are named by repository are fetched before anything needs them") {
  using S = ClusterState;
  const auto hub = [](World x, Weights head, Weights worker) {
    return x.with([&](World& y) {
      y.w.from_hub = true;
      y.o.nodes[0].weights = head;
      y.o.nodes[1].weights = worker;
      for (auto& n : y.o.nodes) {
        if (n.weights == Weights::failed) n.weights_text = "E640 hub: no space";
        if (n.weights == Weights::fetching) n.weights_text = "org/name: 4 %";
      }
    });
  };
  const auto restart = [](World x) { return x.with([](World& y) { y.w.min_generation = 2; }); };
  using enum Weights;
  check({
      {"both lack it", hub(World().no_api(), none, none), "head:download worker:download", S::preparing},
      {"one lacks it", hub(World().no_api(), present, none), "worker:download", S::preparing},
      {"on its way", hub(World().no_api(), fetching, fetching), "", S::preparing},
      {"one is there", hub(World().no_api(), present, fetching), "", S::preparing},
      {"both have it", hub(World().no_api(), present, present), "head:start_api", S::preparing},
      {"one failed: nothing further begins", hub(World().no_api(), none, failed), "", S::failed},
      {"the other one may end its own", hub(World().no_api(), fetching, failed), "", S::failed},
      {"checks first", hub(World().no_api(), none, none).with([](World& x) { x.o.preflight = Preflight::none; }),
       "head:preflight", S::preparing},
      {"a worker that does not answer is waited for",
       hub(World().no_api(), none, none).with([](World& x) { x.o.nodes[1].reachable = false; }), "head:download",
       S::preparing},
      {"a worker without a rank needs none",
       hub(World().no_api(), present, none).with([](World& x) { x.w.ranks = {"head"}; }), "head:start_api",
       S::preparing},
      {"a model by its path needs none", World().no_api(), "head:start_api", S::preparing},
      {"what serves is not asked", hub(World().up(), none, none), "", S::up},
      {"a restart fetches while the old generation serves", hub(restart(World().up()), none, none),
       "head:download worker:download", S::up},
      {"and goes on serving", hub(restart(World().up()), fetching, present), "", S::up},
      {"and when it failed", hub(restart(World().up()), present, failed), "", S::up},
      {"then it restarts", hub(restart(World().up()), present, present), "head:drain", S::draining},
      {"stop ends it", hub(World().no_api().stopped(), fetching, fetching), "head:end_download worker:end_download",
       S::draining},
      {"stopping comes first", hub(World().up().stopped(), fetching, present), "head:drain", S::draining},
      {"then nothing is left", hub(World().no_api().stopped(), none, none), "", S::down},
      {"a dead rank is looked after meanwhile",
       hub(restart(World().up()), fetching, fetching).with([](World& x) { x.dead(1, {}, 9); }), "head:stop_rank0",
       S::preparing},
  });
  CHECK(cluster_view(hub(World().no_api(), present, failed).w, hub(World().no_api(), present, failed).o, kNow).reason ==
        "worker: E640 hub: no space");
  CHECK(cluster_view(hub(World(), present, fetching).w, hub(World(), present, fetching).o, kNow).reason ==
        "worker: org/name: 4 %");
  // A worker that gets its models from the head.
  const auto copies = [&](Weights head, Weights worker, Weights copy) {
    return hub(World().no_api(), head, worker).with([&](World& x) {
      x.w.copies = true;
      x.o.nodes[1].copy = copy;
    });
  };
  check({
      {"the head first", copies(none, none, none), "head:download", S::preparing},
      {"the head fetches", copies(fetching, none, none), "", S::preparing},
      {"then the worker's copy", copies(present, none, none), "worker:copy", S::preparing},
      {"it is on its way", copies(present, none, fetching), "", S::preparing},
      {"it failed", copies(present, none, failed), "", S::failed},
      {"it is done: the worker looks", copies(present, none, present), "worker:download", S::preparing},
      {"and has it", copies(present, present, present), "head:start_api", S::preparing},
      {"it had it before", copies(present, present, none), "head:start_api", S::preparing},
      {"stop ends it", copies(present, none, fetching).stopped(), "worker:end_download", S::draining},
  });
  for (const Weights w : {none, fetching, present, failed}) CHECK(parse_weights(name(w)) == w);
  CHECK(parse_weights("flying") == none);
}
