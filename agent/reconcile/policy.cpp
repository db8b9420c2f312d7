#include "agent/reconcile/policy.h"

#include <algorithm>
#include <array>

#include "common/strings.h"

namespace glm53::reconcile {
namespace {

constexpr auto kHour = std::chrono::hours(1);
constexpr auto kStable = std::chrono::hours(2);

bool is_echo(const ObservedProcess& p) {
  return p.end && p.end->signal == 0 && p.end->code == static_cast<int>(RankExit::peer_lost);
}

Reason reason_of(const ObservedProcess& p) {
  Reason reason;
  const std::string who = cat("rank", p.rank);
  if (p.end->signal != 0) {
    reason = {Cause::killed, 0, cat(who, " ", describe_exit(0, p.end->signal))};
  } else if (!p.end->code) {
    reason = {Cause::lost, 0, cat(who, " ended while nobody watched it")};
  } else {
    reason = {Cause::exited, *p.end->code,
              cat(who, " exited with ", *p.end->code, " (", describe_exit(*p.end->code, 0), ")")};
  }
  if (!p.last_error.empty()) reason.text += ": " + p.last_error;
  return reason;
}

}  // namespace

bool is_final(int exit_code) {
  return exit_code == static_cast<int>(RankExit::config) || exit_code == static_cast<int>(RankExit::weights);
}

Ms restart_delay(int failures_in_series) {
  constexpr std::array<std::chrono::seconds, 4> kLadder{std::chrono::seconds(0), std::chrono::seconds(30),
                                                        std::chrono::seconds(120), std::chrono::seconds(600)};
  const auto index = static_cast<size_t>(std::clamp(failures_in_series - 1, 0, 3));
  return kLadder[index];
}

Verdict judge(std::span<const PastEnd> ends, Time changed_at, int max_restarts) {
  std::vector<const PastEnd*> failures;  // newest first
  for (auto it = ends.rbegin(); it != ends.rend() && it->at >= changed_at; ++it) {
    if (it->cause != Cause::requested) failures.push_back(&*it);
  }
  Verdict verdict;
  if (failures.empty()) return verdict;
  verdict.automatic = true;
  const PastEnd& last = *failures.front();
  if (last.cause == Cause::exited && is_final(last.exit_code)) {
    verdict.blocked = true;
    verdict.reason = last.reason;
    return verdict;
  }
  if (last.cause == Cause::canary && failures.size() > 1 && failures[1]->cause == Cause::canary) {
    verdict.blocked = true;
    verdict.reason = cat("the canary failed twice: ", last.reason);
    return verdict;
  }
  const auto within =
      std::count_if(failures.begin(), failures.end(), [&](const PastEnd* e) { return e->at > last.at - kHour; });
  if (within > max_restarts) {
    verdict.blocked = true;
    verdict.reason = cat("crash loop, ", static_cast<int64_t>(within), " ends within an hour: ", last.reason);
    return verdict;
  }
  int series = 0;
  for (const PastEnd* end : failures) {
    ++series;
    if (end->up_for >= kStable) break;
  }
  const bool echo = last.cause == Cause::exited && last.exit_code == static_cast<int>(RankExit::peer_lost);
  const Ms delay = echo ? Ms(0) : restart_delay(series);
  if (delay.count() > 0) verdict.not_before = last.at + delay;
  verdict.reason = last.reason;
  return verdict;
}

std::optional<Reason> earliest_reason(std::span<const ObservedProcess> ended) {
  const ObservedProcess* best = nullptr;
  for (const ObservedProcess& p : ended) {
    if (!p.end || p.stop_requested) continue;
    const bool better = best == nullptr || (is_echo(*best) && !is_echo(p)) ||
                        (is_echo(*best) == is_echo(p) && p.end->at < best->end->at);
    if (better) best = &p;
  }
  if (best == nullptr) return std::nullopt;
  return reason_of(*best);
}

}  // namespace glm53::reconcile
