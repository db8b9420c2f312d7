// What the tests of drafters share: passes with given taps or hidden states, without a model behind them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "engine/draft/drafter.h"
#include "tests/golden/model_harness.h"

namespace glm53::golden {

/// Runs `body` for every backend with f32 activations that has the operators of drafters, and prints which.
void for_each_drafting_backend(const std::function<void(Ops&)>& body);

/// One sequence's rows of a pass that is fed to a drafter.
struct FedPiece {
  int slot = 0;
  int position = 0;
  std::vector<int32_t> tokens{};
  std::vector<float> values{};  ///< of all rows: taps or hidden states
  Regime regime = Regime::chunk;
  std::vector<std::pair<int32_t, int32_t>> exports{};  ///< position, snapshot
};

/// Builds batches for Drafter::observe(). Blocks of a slot are its own: 1 + slot · 32 and on.
class Feeder {
 public:
  static constexpr int kBlocks = 32;
  explicit Feeder(Ops& ops) : ops_(ops) {}
  /// Window pieces first. Values are the taps, or the hidden states (post- and pre-norm alike).
  void feed(Drafter& drafter, const std::vector<FedPiece>& pieces, bool taps);
  static std::vector<BlockId> table(int slot);

 private:
  Ops& ops_;
};

/// Keeps what a drafter shows, by probe name, until it shows the same again.
class DraftWatch {
 public:
  DraftWatch(Drafter& drafter, Ops& ops);
  const Values& operator[](const std::string& name) const;

 private:
  std::map<std::string, Values> seen_;
};

}  // namespace glm53::golden
