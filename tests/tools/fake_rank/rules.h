// What a fake rank does wrong, and when: fake_rank.json beside its admin socket.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/rank_contract.h"

namespace glm53::fake {

/// One misbehaviour. Unset members fit every rank and generation.
struct Rule {
  enum class Act { exit, kill, hang };
  std::optional<int> rank;
  std::vector<uint64_t> generations;
  Phase phase = Phase::ready;
  std::chrono::milliseconds after{0};
  Act act = Act::exit;
  int exit_code = 0;
};

struct Rules {
  std::chrono::milliseconds phase_time{20};  ///< how long each phase takes
  std::chrono::milliseconds token_time{3};   ///< between two tokens of an answer
  std::vector<Rule> rules;
  /// First rule for this rank, generation and phase; nullptr when it behaves.
  const Rule* find(int rank, uint64_t generation, Phase phase) const;
};

/// Throws Error(config) naming the member. A missing file is the well-behaved rank.
Rules load_rules(const std::string& path);

}  // namespace glm53::fake
