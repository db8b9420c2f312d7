// Rules about restarts, from the history of ended generations alone. Being functions of the history they are the same
// after the agent's own end.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "agent/reconcile/reconcile.h"

namespace glm53::reconcile {

/// An exit code (configuration, weights) after which only a person can help.
bool is_final(int exit_code);

/// Delay before restart n of a series: at once, 30 s, 2 min, then 10 min.
Ms restart_delay(int failures_in_series);

struct Verdict {
  bool blocked = false;  ///< somebody has to act
  std::string reason;
  std::optional<Time> not_before;  ///< start no generation before this time
  bool automatic = false;          ///< the next generation is an automatic restart
};
/// Only failures since `changed_at` count. Blocked: last exit was config or weights; two canaries failed in a row; more
/// failures than `max_restarts` within an hour of the last one. A generation that was up for two hours starts a new
/// series.
Verdict judge(std::span<const PastEnd> ends, Time changed_at, int max_restarts);

/// What ended a generation, from the ends of its ranks: the earliest one nobody asked for; "peer lost" is the echo of
/// another and comes last.
struct Reason {
  Cause cause = Cause::none;
  int exit_code = 0;
  std::string text;
};
std::optional<Reason> earliest_reason(std::span<const ObservedProcess> ended);

}  // namespace glm53::reconcile
