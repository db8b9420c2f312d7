// Wanted state against observed state -> next actions. Pure: no clock, no I/O.
//
// The policy in prose. A start begins with the checks of all nodes (preflight); nothing is started before they passed.
// Then every node that takes part gets the models that are named by repository: the head from the Hub, the others from
// the head (or from the Hub too). A restart gets them while the old generation still serves. Then the API process comes
// first and stays over generations of ranks; if it dies it is started again at once. A generation is started from its
// highest rank down, rank 0 when all others wait at the rendezvous. When every rank is ready a canary goes through the
// API process, then the gates open. One dead, stalled or late rank ends its generation: the others are stopped, `clean`
// closes the record with the reason, and the next generation starts after the delay that policy.h gives, or never, when
// somebody has to act first. Ranks of any other generation than the current one are leftovers and are stopped before
// anything is started. A node that does not answer is unknown, not dead.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/rank_contract.h"

namespace glm53::reconcile {

using Time = std::chrono::sys_time<std::chrono::milliseconds>;
using Ms = std::chrono::milliseconds;

enum class ActionKind {
  none,       ///< nothing to do
  backoff,    ///< wait until a time before the next generation
  preflight,  ///< check all nodes
  download,   ///< bring the models of the wanted state into the node's cache
  end_download,
  copy,   ///< copy the models from the head's cache to the node's
  clean,  ///< close the generation: record its reason, remove what it left
  start_api,
  stop_api,
  start_rank,
  wait_ready,  ///< wait for processes that start
  warm_up,     ///< send the canary
  open_gate,
  drain,
  stop_rank,
};
std::string_view name(ActionKind kind);

/// Why a generation ended.
enum class Cause { none, exited, killed, lost, stalled, timeout, canary, requested };
std::string_view name(Cause cause);
Cause parse_cause(std::string_view text);  ///< none for unknown text

struct Limits {
  Ms ready_timeout{3600'000}, stall_timeout{180'000}, watchdog{30'000};
  int max_restarts = 3;  ///< automatic ones within an hour
};
struct Wanted {
  bool running = false;
  uint64_t min_generation = 0;  ///< older ranks are to be replaced
  Time changed_at{};            ///< failures before it are forgiven
  Ms drain{30'000};
  std::string config_hash;         ///< of the effective configuration
  bool from_hub = false;           ///< a model is named by repository: the nodes' caches must hold it
  bool copies = false;             ///< other nodes get it from the head, not from the Hub
  std::vector<std::string> ranks;  ///< node of each rank; the head is the first node of Observed
  Limits limits;
};

/// How a process ended.
struct ProcessEnd {
  std::optional<int> code;  ///< empty with signal 0: nobody could collect it
  int signal = 0;
  Time at{};
};
struct ObservedProcess {
  int rank = -1;            ///< -1: the API process
  uint64_t generation = 0;  ///< of the API process: how often it was started
  bool ready = false, stop_requested = false;
  Phase phase = Phase::exec;
  Time started_at{}, last_heard{}, extended_until{};
  std::optional<ProcessEnd> end;  ///< set: it is gone
  std::string last_error, config_hash;
};
/// The models of the wanted state in a node's cache.
enum class Weights { none, fetching, present, failed };
std::string_view name(Weights state);
Weights parse_weights(std::string_view text);  ///< none for unknown text

struct ObservedNode {
  std::string name;
  bool reachable = true;  ///< false: the rest is what was last known
  Weights weights = Weights::none;
  std::string weights_text;      ///< how far, or what failed
  Weights copy = Weights::none;  ///< of the copy from the head; present: done, the node has only to look
  std::vector<ObservedProcess> processes;
};
struct ObservedGeneration {
  uint64_t n = 0;
  Time started_at{};
  bool was_up = false;         ///< its gate has been open: no further canary
  Cause ending = Cause::none;  ///< recorded when its first rank was stopped
  int ending_code = 0;
  std::string ending_reason;
};
/// An ended generation.
struct PastEnd {
  uint64_t n = 0;
  Time at{};
  Cause cause = Cause::none;
  int exit_code = 0;
  Ms up_for{0};
  std::string reason;
};
/// The checks for the wanted state as it is.
enum class Preflight { none, running, passed, failed };
enum class Canary { none, running, passed, failed };

struct Observed {
  std::vector<ObservedNode> nodes;               ///< head first
  std::optional<ObservedGeneration> generation;  ///< the one not ended
  uint64_t last_generation = 0;                  ///< highest number ever used
  std::vector<PastEnd> ends;                     ///< oldest first
  Preflight preflight = Preflight::passed;
  std::string preflight_error;   ///< every failure
  Canary canary = Canary::none;  ///< of the current generation
  std::string canary_error;
  bool gate_open = false;           ///< on rank 0 and on the API process as they are now
  std::optional<Time> drain_since;  ///< of the current generation
  int64_t requests_running = 0;
  int api_starts_last_minute = 0;
};

struct NodeAction {
  std::string node;
  ActionKind kind = ActionKind::none;
  int rank = -1;
  uint64_t generation = 0;
  std::string argument;       ///< for people: what is waited for, why something stops
  Cause cause = Cause::none;  ///< of stop_rank, drain and clean
  int exit_code = 0;
  std::optional<Time> until;  ///< backoff
  bool automatic = false;     ///< start_rank: of a restart nobody asked for
};

/// At most one action a node, in the order of `observed.nodes`; nodes without one are left out.
std::vector<NodeAction> next_actions(const Wanted& wanted, const Observed& observed, Time now);

enum class ClusterState { down, preparing, loading, warming, up, draining, failed };
std::string_view name(ClusterState state);
struct ClusterView {
  ClusterState state = ClusterState::down;
  std::string reason;
};
ClusterView cluster_view(const Wanted& wanted, const Observed& observed, Time now);

}  // namespace glm53::reconcile
