// How the driver runs the actions that the reconciler names, here and on the worker.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "agent/api/driver.h"
#include "agent/api/hub_models.h"
#include "agent/api/preflight_run.h"
#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {

using reconcile::ActionKind;
using reconcile::Cause;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kRetry{1000};
constexpr state::TimeMs kCheckAgain = 30'000;
constexpr int64_t kBesideServing = 200'000'000;  ///< bytes a second
constexpr int kGateTimeoutMs = 5000;

bool is_wait(ActionKind kind) {
  return kind == ActionKind::none || kind == ActionKind::wait_ready || kind == ActionKind::backoff;
}

/// A command whose refusal is an error.
void demand(const std::string& socket, std::string_view command) {
  const auto answer = parse_json(admin_call(socket, cat("{\"do\":\"", command, "\"}"), kGateTimeoutMs));
  if (answer.is_object() && answer.contains("ok") && answer["ok"] == true) return;
  throw Error(Code::unavailable, cat(command, " was refused: ", refusal_text(answer)));
}

std::string describe(const reconcile::NodeAction& action) {
  std::string text = cat(action.node, ": ", name(action.kind));
  if (action.rank >= 0) text += cat(" ", action.rank);
  if (action.generation > 0 && action.kind != ActionKind::start_api && action.kind != ActionKind::stop_api) {
    text += cat(" of generation ", action.generation);
  }
  if (!action.argument.empty()) text += cat(" (", action.argument, ")");
  return text;
}

nlohmann::ordered_json action_data(const reconcile::NodeAction& action, const std::string& state,
                                   const std::string& text) {
  nlohmann::ordered_json rank = nullptr;
  if (action.rank >= 0) rank = action.rank;
  return {{"at", state::now_ms()}, {"node", action.node}, {"kind", std::string(name(action.kind))},
          {"rank", rank},          {"state", state},      {"text", log::redact(text)}};
}

}  // namespace

bool Driver::execute(const Action& action, reconcile::Time) {
  if (is_wait(action.kind)) {
    if (action.kind == ActionKind::backoff && action.until != announced_backoff_) {
      announced_backoff_ = action.until;
      const auto seconds =
          std::chrono::ceil<std::chrono::seconds>(*action.until - reconcile::Time(milliseconds(state::now_ms())))
              .count();
      journal_.note("warn", cat("next start in ", std::max<int64_t>(0, seconds), " s after: ", action.argument),
                    operation_);
    }
    return false;
  }
  const auto retry = retry_after_.find(action.node);
  if (retry != retry_after_.end() && steady_clock::now() < retry->second) return false;
  if (action.kind == ActionKind::copy) return start_copy(action);
  // The copy runs here, whatever node it is for.
  if (action.kind == ActionKind::end_download && action.node != "head") copy_.cancel();
  return action.node == "head" ? execute_here(action) : execute_there(action);
}

bool Driver::start_copy(const Action& action) {
  if (copy_step_) return false;
  const Step step = begin(action);
  try {
    begin_copy(fetch_request(), hub_models(effective_.config));
    copy_step_ = step;
  } catch (const Error& e) {
    end(step, e.line());
  }
  return false;
}

/// Serving comes first: without a limit of its own a copy beside a cluster at work is held back.
void Driver::begin_copy(const std::string& request, std::vector<HubModel> models) {
  if (!link_) throw Error(Code::config, "there is no worker", "set worker.admin");
  SyncJob::Order order;
  order.request = request;
  order.models = std::move(models);
  order.worker = link_->address();
  order.epoch = epoch_;
  order.cache = settings_.hub_cache;
  order.journal_dir = settings_.state_dir + "/hub";
  order.streams = static_cast<int>(file_.config().integer("sync.streams"));
  order.limit_rate = file_.config().integer("sync.limit_rate");
  if (order.limit_rate == 0 && cluster_.state == reconcile::ClusterState::up) order.limit_rate = kBesideServing;
  copy_.start(std::move(order));
}

void Driver::note_copy() {
  if (!copy_step_) return;
  const FetchReport copy = copy_.report();
  if (copy.state == reconcile::Weights::fetching) return;
  end(*copy_step_, copy.error);
  copy_step_.reset();
}

bool Driver::execute_here(const Action& action) {
  if (action.kind == ActionKind::preflight && preflight_step_) return false;
  const bool in_background = action.kind == ActionKind::open_gate || action.kind == ActionKind::drain;
  if (in_background && background_busy_) return false;
  prepare(action);
  const Step step = begin(action);
  try {
    switch (action.kind) {
      case ActionKind::preflight:
        begin_preflight(step);
        return false;
      case ActionKind::warm_up:
        canary_.start(action.generation, node_.socket_of("api"));
        break;
      case ActionKind::open_gate:
        open_gate();
        background_step_ = step;
        return false;
      case ActionKind::drain:
        drain();
        background_step_ = step;
        return false;
      case ActionKind::clean:
        close_generation(action);
        break;
      default:
        node_.run(command_for(action));
    }
    end(step, "");
  } catch (const Error& e) {
    end(step, e.line());
  }
  return true;
}

bool Driver::execute_there(const Action& action) {
  // The worker's agent cleans up behind every process by itself; the record that `clean` closes is the head's.
  if (action.kind == ActionKind::clean || !link_ || link_->busy()) return false;
  prepare(action);
  worker_step_ = begin(action);
  try {
    link_->submit(command_for(action));
  } catch (const Error& e) {
    end(*worker_step_, e.line());
    worker_step_.reset();
  }
  return false;  // the link wakes us when it is done
}

/// Records that must exist before the world changes, so that an end of the agent in between loses nothing.
void Driver::prepare(const Action& action) {
  const bool current = !history_.empty() && history_.back().ended_at == 0 && history_.back().n == action.generation;
  if (action.kind == ActionKind::start_rank && !current) {
    canary_.cancel();
    drain_since_.reset();
    state::GenerationRow row;
    row.n = action.generation;
    row.config_json = effective_.json;
    row.config_hash = effective_.hash;
    row.automatic = action.automatic;
    row.started_at = state::now_ms();
    generations_.begin(row);
    reload_history();
  }
  const bool ends = action.kind == ActionKind::stop_rank || action.kind == ActionKind::drain;
  if (ends && current && action.cause != Cause::none && history_.back().ending_at == 0) {
    generations_.mark_ending(action.generation, std::string(name(action.cause)), action.exit_code, action.argument,
                             state::now_ms());
    reload_history();
    if (action.cause != Cause::requested) {
      journal_.note("error", cat("generation ", action.generation, " ends: ", action.argument), operation_,
                    action.generation);
    }
  }
}

void Driver::close_generation(const Action& action) {
  canary_.cancel();
  generations_.mark_ended(action.generation, std::string(name(action.cause)), action.exit_code, action.argument,
                          state::now_ms());
  reload_history();
  drain_since_.reset();
}

void Driver::begin_preflight(const Step& step) {
  const auto worker = link_ ? std::optional(link_->address()) : std::nullopt;
  preflight_step_ = step;
  preflight_.start(wanted_.changed_at,
                   [this, own = file_.config(), cluster = effective_, report = head_report_, worker] {
                     return check_cluster(settings_, own, cluster, report, worker, false);
                   });
}

/// Records how the checks ended. A failure nobody waits for is forgotten after a while: after a boot, links and disks
/// may come late.
void Driver::note_preflight() {
  if (preflight_step_ && preflight_.state(wanted_.changed_at) != reconcile::Preflight::running) {
    checked_at_ = state::now_ms();
    for (const std::string& text : preflight_.warnings()) journal_.note("warn", text, preflight_step_->operation);
    for (const std::string& text : preflight_.failures()) journal_.note("error", text, preflight_step_->operation);
    end(*preflight_step_, join(preflight_.failures(), "; "));
    preflight_step_.reset();
  }
  if (operation_.empty() && state::now_ms() > checked_at_ + kCheckAgain) preflight_.forget_failure();
}

void Driver::open_gate() {
  uint64_t api = 0;
  for (const ProcessReport& p : head_report_.processes) {
    if (p.name == "api") api = std::max(api, p.generation);
  }
  const std::pair<uint64_t, uint64_t> opens{history_.back().n, api};
  const std::string rank0 = node_.socket_of("rank0"), front = node_.socket_of("api");
  opened_.reset();
  run_in_background({}, [this, opens, rank0, front] {
    demand(rank0, "gate_open");
    demand(front, "gate_open");
    opened_ = opens;
  });
}

void Driver::drain() {
  drain_since_ = reconcile::Time(milliseconds(state::now_ms()));
  drain_generation_ = history_.back().n;
  // Only the API process is told: what it has accepted may still be admitted by rank 0 and finish.
  run_in_background({}, [front = node_.socket_of("api")] { demand(front, "drain"); });
}

void Driver::run_in_background(const Action&, std::function<void()> body) {
  if (background_.joinable()) background_.join();
  background_busy_ = true;
  background_error_.clear();
  background_ = std::thread([this, body = std::move(body)] {
    try {
      body();
    } catch (const std::exception& e) {
      background_error_ = e.what();
    }
    background_busy_ = false;
    wake();
  });
}

void Driver::collect_results() {
  note_preflight();
  note_copy();
  if (background_step_ && !background_busy_) {
    end(*background_step_, background_error_);
    background_step_.reset();
    if (opened_) std::tie(gate_generation_, gate_api_) = *opened_;
    opened_.reset();
  }
  if (!link_ || !worker_step_) return;
  if (const auto result = link_->take_result()) {
    end(*worker_step_, result->error);
    worker_step_.reset();
  }
}

NodeCommand Driver::command_for(const Action& action) {
  NodeCommand command;
  command.epoch = epoch_;
  command.kind = action.kind;
  command.rank = action.rank;
  command.generation = action.generation;
  command.grace = effective_.config.duration("ranks.stop_grace");
  if (action.kind == ActionKind::start_rank) {
    command.config = glm53::to_json(rank_config(effective_, action.rank, action.generation));
  }
  if (action.kind == ActionKind::download) {
    command.request = fetch_request();
    command.config = to_json(hub_models(effective_.config));
  }
  if (action.kind == ActionKind::start_api) {
    command.config = glm53::to_json(api_config(effective_, settings_));
    command.config_hash = effective_.hash;
    command.generation = node_.next_api_number();
  }
  return command;
}

Driver::Step Driver::begin(const Action& action) {
  Step step{operation_, 0, action};
  journal_.add("info", "action", describe(action), action_data(action, "running", action.argument), operation_,
               action.generation);
  if (!operation_.empty()) {
    step.seq = operations_.begin_step(operation_, std::string(name(action.kind)), action.node, describe(action),
                                      state::now_ms());
  }
  return step;
}

void Driver::end(const Step& step, const std::string& error) {
  const bool failed = !error.empty();
  if (failed) retry_after_[step.action.node] = steady_clock::now() + kRetry;
  if (failed || !step.operation.empty()) {
    const std::string text =
        failed ? cat(describe(step.action), " failed: ", error) : cat(describe(step.action), ": done");
    journal_.add(failed ? "warn" : "debug", "action", text, action_data(step.action, failed ? "failed" : "done", error),
                 step.operation, step.action.generation);
  }
  if (!step.operation.empty()) operations_.end_step(step.operation, step.seq, error, state::now_ms());
}

}  // namespace glm53::agent
