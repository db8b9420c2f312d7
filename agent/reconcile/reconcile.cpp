#include "agent/reconcile/reconcile.h"

#include <algorithm>
#include <array>

#include "agent/reconcile/policy.h"
#include "common/strings.h"

namespace glm53::reconcile {
namespace {

constexpr std::array<std::string_view, 15> kActions{"none",       "backoff", "preflight", "download", "end_download",
                                                    "copy",       "clean",   "start_api", "stop_api", "start_rank",
                                                    "wait_ready", "warm_up", "open_gate", "drain",    "stop_rank"};
constexpr std::array<std::string_view, 4> kWeights{"none", "fetching", "present", "failed"};
constexpr std::array<std::string_view, 8> kCauses{"none",    "exited",  "killed", "lost",
                                                  "stalled", "timeout", "canary", "requested"};
constexpr std::array<std::string_view, 7> kStates{"down", "preparing", "loading", "warming",
                                                  "up",   "draining",  "failed"};

/// More starts of the API process than this within a minute, and further ones wait.
constexpr int kApiBurst = 5;
constexpr Ms kApiDelay{5000};

/// What is known about one rank of the current generation.
enum class RankState { not_started, starting, ready, ended, unknown };
struct RankView {
  RankState state = RankState::not_started;
  const ObservedProcess* process = nullptr;
  const ObservedNode* node = nullptr;
};

/// One call of next_actions or cluster_view.
class Planner {
 public:
  Planner(const Wanted& wanted, const Observed& observed, Time now) : w_(wanted), o_(observed), now_(now) {
    for (size_t r = 0; r < w_.ranks.size(); ++r) ranks_.push_back(view(static_cast<int>(r)));
  }

  std::vector<NodeAction> actions() {
    if (o_.nodes.empty()) return {};
    stop_leftovers();
    if (check_first()) return std::move(out_);
    if (!o_.generation && must_fetch()) {
      fetch();
      return std::move(out_);
    }
    keep_api();
    if (o_.generation) {
      with_generation();
    } else {
      without_generation();
    }
    if (must_fetch()) fetch();  // for a restart; what serves is looked after first
    end_downloads();
    return std::move(out_);
  }

  ClusterView cluster() const {
    const Verdict verdict = judge(o_.ends, w_.changed_at, w_.limits.max_restarts);
    if (!o_.generation) return cluster_without_generation(verdict);
    if (const auto reason = ending_reason()) {
      const bool drains = reason->cause == Cause::requested;
      return {drains ? ClusterState::draining : ClusterState::preparing,
              drains ? reason->text : cat("generation ", o_.generation->n, " ends: ", reason->text)};
    }
    if (!all(RankState::ready)) return {any_loading() ? ClusterState::loading : ClusterState::preparing, waiting_for()};
    if (api_failed_for_good()) return {ClusterState::failed, api_end_text()};
    if (!o_.gate_open) {
      return {ClusterState::warming, o_.canary == Canary::running ? "waiting for the canary" : "opening the gate"};
    }
    const std::string lost = unreachable_text();
    return {ClusterState::up, lost.empty() ? fetch_text() : lost};
  }

 private:
  // ---- observation ----
  const ObservedNode* node_named(const std::string& name) const {
    const auto it =
        std::find_if(o_.nodes.begin(), o_.nodes.end(), [&](const ObservedNode& n) { return n.name == name; });
    return it == o_.nodes.end() ? nullptr : &*it;
  }

  RankView view(int rank) const {
    RankView v;
    v.node = node_named(w_.ranks[static_cast<size_t>(rank)]);
    if (v.node == nullptr) {
      v.state = RankState::unknown;
      return v;
    }
    if (!o_.generation) return v;
    for (const ObservedProcess& p : v.node->processes) {
      if (p.rank == rank && p.generation == o_.generation->n) v.process = &p;
    }
    if (v.process != nullptr && v.process->end) {
      v.state = RankState::ended;
    } else if (!v.node->reachable) {
      v.state = RankState::unknown;
    } else if (v.process != nullptr) {
      v.state = v.process->ready ? RankState::ready : RankState::starting;
    }
    return v;
  }

  /// The API process that counts: the newest.
  const ObservedProcess* api() const {
    const ObservedProcess* newest = nullptr;
    for (const ObservedProcess& p : head().processes) {
      if (p.rank < 0 && (newest == nullptr || p.generation > newest->generation)) newest = &p;
    }
    return newest;
  }
  const ObservedNode& head() const { return o_.nodes.front(); }
  bool api_alive() const { return api() != nullptr && !api()->end; }
  bool api_failed_for_good() const {
    const ObservedProcess* a = api();
    return a != nullptr && a->end && !a->stop_requested && a->end->at >= w_.changed_at && a->end->signal == 0 &&
           is_final(a->end->code.value_or(0));
  }
  std::string api_end_text() const {
    const ObservedProcess& a = *api();
    return cat("the API process exited with ", a.end->code.value_or(0), " (", describe_exit(a.end->code.value_or(0), 0),
               ")", a.last_error.empty() ? "" : ": " + a.last_error);
  }
  bool all(RankState state) const {
    // While a node is unknown a generation that was ready stays so.
    return std::all_of(ranks_.begin(), ranks_.end(), [&](const RankView& v) {
      return v.state == state || (v.state == RankState::unknown && o_.generation->was_up);
    });
  }
  bool any_loading() const {
    return std::any_of(ranks_.begin(), ranks_.end(), [](const RankView& v) {
      return v.process != nullptr && !v.process->end && v.process->phase >= Phase::load_target;
    });
  }
  bool others_at_rendezvous() const {
    return std::all_of(ranks_.begin() + 1, ranks_.end(), [](const RankView& v) {
      return v.state == RankState::ready || (v.state == RankState::starting && v.process->phase >= Phase::rendezvous);
    });
  }
  const ObservedNode* first_unreachable() const {
    for (const RankView& v : ranks_) {
      if (v.node != nullptr && !v.node->reachable) return v.node;
    }
    return nullptr;
  }
  std::string unreachable_text() const {
    const ObservedNode* node = first_unreachable();
    return node == nullptr ? "" : cat("the agent of ", node->name, " does not answer");
  }
  std::string waiting_for() const {
    if (const std::string text = unreachable_text(); !text.empty()) return text;
    for (size_t r = ranks_.size(); r-- > 0;) {
      const RankView& v = ranks_[r];
      if (v.state == RankState::starting) return cat("rank", r, ": ", glm53::name(v.process->phase));
      if (v.state == RankState::not_started) return cat("rank", r, " is to be started");
    }
    return {};
  }

  // ---- why the current generation has to end ----
  std::optional<Reason> ending_reason() const {
    const ObservedGeneration& g = *o_.generation;
    if (g.ending != Cause::none) return Reason{g.ending, g.ending_code, g.ending_reason};
    if (auto reason = dead_rank()) return reason;
    if (!w_.running) return Reason{Cause::requested, 0, "stopped by request"};
    if (g.n < w_.min_generation && fetched()) return Reason{Cause::requested, 0, "restarted by request"};
    if (auto reason = silent_rank()) return reason;
    if (!g.was_up && !all(RankState::ready) && now_ > g.started_at + w_.limits.ready_timeout) {
      return Reason{Cause::timeout, 0, cat("not ready within ranks.ready_timeout; ", waiting_for())};
    }
    if (!g.was_up && o_.canary == Canary::failed) return Reason{Cause::canary, 0, "canary: " + o_.canary_error};
    return std::nullopt;
  }

  std::vector<ObservedProcess> ended_ranks() const {
    std::vector<ObservedProcess> ended;
    for (const RankView& v : ranks_) {
      if (v.state == RankState::ended) ended.push_back(*v.process);
    }
    return ended;
  }

  std::optional<Reason> dead_rank() const {
    const auto ended = ended_ranks();
    if (auto reason = earliest_reason(ended)) return reason;
    // Asked to stop by an action whose record was lost.
    if (!ended.empty()) return Reason{Cause::lost, 0, cat("rank", ended.front().rank, " was stopped")};
    // Ranks start from the highest; a gap above a started one, or anything missing once it was up, is a rank that
    // vanished with its node.
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].state != RankState::not_started) continue;
      const bool lower_started = std::any_of(ranks_.begin(), ranks_.begin() + static_cast<std::ptrdiff_t>(r),
                                             [](const RankView& v) { return v.process != nullptr; });
      if (o_.generation->was_up || (lower_started && r > 0 && ranks_[0].process != nullptr)) {
        return Reason{Cause::lost, 0, cat("rank", r, " vanished from ", ranks_[r].node->name)};
      }
    }
    return std::nullopt;
  }

  std::optional<Reason> silent_rank() const {
    for (const RankView& v : ranks_) {
      if (v.state != RankState::starting && v.state != RankState::ready) continue;
      const ObservedProcess& p = *v.process;
      const Ms limit = p.ready ? w_.limits.watchdog : w_.limits.stall_timeout;
      if (now_ > p.last_heard + limit && now_ > p.extended_until) {
        return Reason{Cause::stalled, static_cast<int>(RankExit::stalled),
                      cat("rank", p.rank, " made no progress for ",
                          std::chrono::duration_cast<std::chrono::seconds>(now_ - p.last_heard).count(), " s in phase ",
                          glm53::name(p.phase))};
      }
    }
    return std::nullopt;
  }

  // ---- actions ----
  bool taken(const std::string& node) const {
    return std::any_of(out_.begin(), out_.end(), [&](const NodeAction& a) { return a.node == node; });
  }
  void add(NodeAction action) {
    if (!taken(action.node)) out_.push_back(std::move(action));
  }
  NodeAction make(const std::string& node, ActionKind kind, std::string argument = {}) const {
    NodeAction action;
    action.node = node;
    action.kind = kind;
    action.argument = std::move(argument);
    if (o_.generation) action.generation = o_.generation->n;
    return action;
  }

  void stop_leftovers() {
    const uint64_t current = o_.generation ? o_.generation->n : 0;
    const ObservedProcess* newest_api = api();
    for (const ObservedNode& node : o_.nodes) {
      if (!node.reachable) continue;
      for (const ObservedProcess& p : node.processes) {
        const bool stale_api = p.rank < 0 && &p != newest_api;
        if (p.end || (p.rank >= 0 && p.generation == current) || (p.rank < 0 && !stale_api)) continue;
        leftovers_ = true;
        if (p.stop_requested) continue;
        NodeAction action = make(node.name, p.rank < 0 ? ActionKind::stop_api : ActionKind::stop_rank,
                                 cat("left over from generation ", p.generation));
        action.rank = p.rank;
        action.generation = p.generation;
        add(std::move(action));
      }
    }
  }

  /// True while a start waits for its checks, or cannot go on because of them.
  bool check_first() {
    if (!w_.running || o_.generation || o_.preflight == Preflight::passed) return false;
    if (!unreachable_text().empty() || judge(o_.ends, w_.changed_at, w_.limits.max_restarts).blocked) return false;
    if (leftovers_) return true;  // they hold ports and memory rightly until they are gone
    if (o_.preflight == Preflight::none) add(make(head().name, ActionKind::preflight));
    if (o_.preflight == Preflight::running) add(make(head().name, ActionKind::wait_ready, "checks of the nodes"));
    return true;
  }

  /// Takes part: has a rank, or is the head, whose API process needs the tokenizer.
  bool takes_part(const ObservedNode& node) const {
    return &node == &head() || std::find(w_.ranks.begin(), w_.ranks.end(), node.name) != w_.ranks.end();
  }
  /// Every node has the models, or none is needed.
  bool fetched() const {
    return !w_.from_hub || std::all_of(o_.nodes.begin(), o_.nodes.end(), [&](const ObservedNode& n) {
      return n.weights == Weights::present || !takes_part(n);
    });
  }
  /// Gets its models from the head.
  bool copied(const ObservedNode& node) const { return w_.copies && &node != &head(); }
  static bool busy(const ObservedNode& n) { return n.weights == Weights::fetching || n.copy == Weights::fetching; }
  const ObservedNode* fetch_failure() const {
    if (!w_.running || !w_.from_hub) return nullptr;
    const auto it = std::find_if(o_.nodes.begin(), o_.nodes.end(), [&](const ObservedNode& n) {
      return takes_part(n) && (n.weights == Weights::failed || (copied(n) && n.copy == Weights::failed));
    });
    return it == o_.nodes.end() ? nullptr : &*it;
  }
  std::string fetch_text() const {
    std::string text;
    for (const ObservedNode& n : o_.nodes) {
      if (busy(n)) text += cat(text.empty() ? "" : "; ", n.name, ": ", n.weights_text);
    }
    return text;
  }

  void end_downloads() {
    for (const ObservedNode& n : o_.nodes) {
      if (!w_.running && n.reachable && busy(n)) add(make(n.name, ActionKind::end_download));
    }
  }

  /// A start or a restart waits for its models.
  bool must_fetch() const {
    return w_.running && !fetched() && (!o_.generation || o_.generation->n < w_.min_generation);
  }
  void fetch() {
    if (fetch_failure() != nullptr || judge(o_.ends, w_.changed_at, w_.limits.max_restarts).blocked) return;
    for (const ObservedNode& n : o_.nodes) {
      if (!takes_part(n) || !n.reachable) continue;
      if (busy(n)) {
        add(make(n.name, ActionKind::wait_ready, n.weights_text));
      } else if (n.weights == Weights::none && copied(n) && n.copy == Weights::none) {
        if (head().weights == Weights::present) add(make(n.name, ActionKind::copy));
      } else if (n.weights == Weights::none) {
        add(make(n.name, ActionKind::download));
      }
    }
  }

  /// Starts the API process when it should live; ends one that is deaf.
  void keep_api() {
    if (!w_.running || api_failed_for_good()) return;
    const ObservedProcess* a = api();
    if (a != nullptr && !a->end) {
      const Ms limit = a->ready ? w_.limits.watchdog : w_.limits.stall_timeout;
      if (!a->stop_requested && now_ > a->last_heard + limit && now_ > a->extended_until) {
        NodeAction action = make(head().name, ActionKind::stop_api, "the API process does not answer");
        action.generation = a->generation;
        add(std::move(action));
      }
      return;
    }
    // Stopping ranks on the head comes before: they must not wait for an API process that cannot start.
    if (o_.generation && ending_reason() && needs_stop_on(head())) return;
    if (a != nullptr && o_.api_starts_last_minute >= kApiBurst && a->end && now_ < a->end->at + kApiDelay) {
      NodeAction action = make(head().name, ActionKind::backoff, "the API process keeps ending");
      action.until = a->end->at + kApiDelay;
      if (!o_.generation) add(std::move(action));
      return;
    }
    NodeAction action = make(head().name, ActionKind::start_api);
    action.generation = a == nullptr ? 1 : a->generation + 1;
    add(std::move(action));
  }

  bool needs_stop_on(const ObservedNode& node) const {
    return std::any_of(ranks_.begin(), ranks_.end(), [&](const RankView& v) {
      return v.node == &node && v.process != nullptr && !v.process->end && !v.process->stop_requested;
    });
  }

  void with_generation() {
    if (const auto reason = ending_reason()) {
      end_generation(*reason);
    } else if (!all(RankState::ready)) {
      start_ranks();
    } else {
      bring_up();
    }
  }

  void end_generation(const Reason& reason) {
    if (reason.cause == Cause::requested && drain_first(reason)) return;
    bool live = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankView& v = ranks_[r];
      if (v.state != RankState::starting && v.state != RankState::ready) continue;
      live = true;
      if (v.process->stop_requested) continue;
      NodeAction action = make(v.node->name, ActionKind::stop_rank, reason.text);
      action.rank = static_cast<int>(r);
      action.cause = reason.cause;
      action.exit_code = reason.exit_code;
      add(std::move(action));
    }
    if (live) {
      add(make(head().name, ActionKind::none, "waiting for ranks to stop"));
      return;
    }
    close_generation(reason);
  }

  void close_generation(const Reason& recorded) {
    Reason reason = recorded;
    // The head often sees the echo before the worker's report of what really happened.
    if (reason.cause == Cause::exited || reason.cause == Cause::killed || reason.cause == Cause::lost) {
      if (const auto better = earliest_reason(ended_ranks())) reason = *better;
    }
    for (const ObservedNode& node : o_.nodes) {
      if (!node.reachable) continue;
      NodeAction action = make(node.name, ActionKind::clean, reason.text);
      action.cause = reason.cause;
      action.exit_code = reason.exit_code;
      add(std::move(action));
    }
  }

  /// True while clients are given time to finish.
  bool drain_first(const Reason& reason) {
    const bool serves = o_.generation->was_up && w_.drain.count() > 0 && ranks_.front().state == RankState::ready &&
                        !ranks_.front().process->stop_requested && all(RankState::ready) && api_alive();
    if (!serves) return false;
    if (!o_.drain_since) {
      NodeAction action = make(head().name, ActionKind::drain, reason.text);
      action.cause = reason.cause;
      add(std::move(action));
      return true;
    }
    if (o_.requests_running > 0 && now_ < *o_.drain_since + w_.drain) {
      add(make(head().name, ActionKind::none, cat("waiting for ", o_.requests_running, " requests to finish")));
      return true;
    }
    return false;
  }

  void start_ranks() {
    if (!api_ready()) return;
    for (size_t r = ranks_.size(); r-- > 0;) {
      const RankView& v = ranks_[r];
      if (v.state != RankState::not_started || (r == 0 && !others_at_rendezvous())) continue;
      start_rank(static_cast<int>(r), o_.generation->n, false);
    }
    add(make(head().name, ActionKind::wait_ready, waiting_for()));
  }

  void start_rank(int rank, uint64_t generation, bool automatic) {
    NodeAction action = make(w_.ranks[static_cast<size_t>(rank)], ActionKind::start_rank);
    action.rank = rank;
    action.generation = generation;
    action.automatic = automatic;
    add(std::move(action));
  }

  void bring_up() {
    if (!api_ready()) return;
    const bool tested = o_.generation->was_up || o_.canary == Canary::passed;
    if (!tested) {
      add(make(head().name, o_.canary == Canary::none ? ActionKind::warm_up : ActionKind::wait_ready, "canary"));
    } else if (!o_.gate_open) {
      add(make(head().name, ActionKind::open_gate));
    }
  }

  bool api_ready() {
    if (api_alive() && api()->ready && !api()->stop_requested) return true;
    if (api_alive()) add(make(head().name, ActionKind::wait_ready, "API process"));
    return false;
  }

  void without_generation() {
    if (!w_.running) {
      if (api_alive() && !api()->stop_requested) {
        NodeAction action = make(head().name, ActionKind::stop_api, "stopped by request");
        action.generation = api()->generation;
        add(std::move(action));
      }
      return;
    }
    if (leftovers_ || w_.ranks.empty()) return;
    const Verdict verdict = judge(o_.ends, w_.changed_at, w_.limits.max_restarts);
    if (verdict.blocked) return;
    if (api_alive() && !api()->stop_requested && api()->config_hash != w_.config_hash) {
      NodeAction action = make(head().name, ActionKind::stop_api, "its configuration changed");
      action.generation = api()->generation;
      add(std::move(action));
      return;
    }
    if (!api_ready()) return;
    if (verdict.not_before && now_ < *verdict.not_before) {
      NodeAction action = make(head().name, ActionKind::backoff, verdict.reason);
      action.until = verdict.not_before;
      add(std::move(action));
      return;
    }
    if (const std::string text = unreachable_text(); !text.empty()) {
      add(make(head().name, ActionKind::wait_ready, text));
      return;
    }
    start_rank(static_cast<int>(w_.ranks.size()) - 1, next_number(), verdict.automatic);
  }

  /// Above every number ever seen anywhere, so that a lost database never reuses one.
  uint64_t next_number() const {
    uint64_t n = o_.last_generation;
    for (const ObservedNode& node : o_.nodes) {
      for (const ObservedProcess& p : node.processes) {
        if (p.rank >= 0) n = std::max(n, p.generation);
      }
    }
    return std::max(n + 1, w_.min_generation);
  }

  ClusterView cluster_without_generation(const Verdict& verdict) const {
    if (!w_.running) {
      const bool anything = std::any_of(o_.nodes.begin(), o_.nodes.end(), [](const ObservedNode& n) {
        return n.reachable && (busy(n) || std::any_of(n.processes.begin(), n.processes.end(),
                                                      [](const ObservedProcess& p) { return !p.end; }));
      });
      return {anything ? ClusterState::draining : ClusterState::down, anything ? "processes are stopping" : ""};
    }
    if (verdict.blocked) return {ClusterState::failed, verdict.reason};
    if (o_.preflight == Preflight::failed) return {ClusterState::failed, o_.preflight_error};
    if (const ObservedNode* node = fetch_failure()) {
      return {ClusterState::failed, cat(node->name, ": ", node->weights_text)};
    }
    if (!o_.nodes.empty() && api_failed_for_good()) return {ClusterState::failed, api_end_text()};
    if (verdict.not_before && now_ < *verdict.not_before) {
      return {ClusterState::preparing,
              cat("next start in ", std::chrono::ceil<std::chrono::seconds>(*verdict.not_before - now_).count(),
                  " s after: ", verdict.reason)};
    }
    if (const std::string text = unreachable_text(); !text.empty()) return {ClusterState::preparing, text};
    const std::string fetching = fetch_text();
    return {ClusterState::preparing, fetching.empty() ? "starting" : fetching};
  }

  const Wanted& w_;
  const Observed& o_;
  Time now_;
  std::vector<RankView> ranks_;
  std::vector<NodeAction> out_;
  bool leftovers_ = false;
};

}  // namespace

std::string_view name(ActionKind kind) {
  return kActions[static_cast<size_t>(kind)];
}
std::string_view name(Cause cause) {
  return kCauses[static_cast<size_t>(cause)];
}
std::string_view name(ClusterState state) {
  return kStates[static_cast<size_t>(state)];
}

std::string_view name(Weights state) {
  return kWeights[static_cast<size_t>(state)];
}

Weights parse_weights(std::string_view text) {
  const auto it = std::find(kWeights.begin(), kWeights.end(), text);
  return it == kWeights.end() ? Weights::none : static_cast<Weights>(it - kWeights.begin());
}

Cause parse_cause(std::string_view text) {
  const auto it = std::find(kCauses.begin(), kCauses.end(), text);
  return it == kCauses.end() ? Cause::none : static_cast<Cause>(it - kCauses.begin());
}

std::vector<NodeAction> next_actions(const Wanted& wanted, const Observed& observed, Time now) {
  return Planner(wanted, observed, now).actions();
}

ClusterView cluster_view(const Wanted& wanted, const Observed& observed, Time now) {
  return Planner(wanted, observed, now).cluster();
}

}  // namespace glm53::reconcile
