#include "agent/api/driver.h"

#include <algorithm>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::agent {

using reconcile::ClusterState;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kActive{250}, kSteady{1000};
/// Counters are a poll behind; requests that came just before a drain must not be overlooked.
constexpr milliseconds kDrainSettle{400};
constexpr state::TimeMs kRenewPeriod = 60'000;
constexpr state::TimeMs kWorkerPatience = 60'000;
constexpr state::TimeMs kFetchAgain = 30'000;
constexpr int kHistory = 64;

reconcile::Time to_time(state::TimeMs ms) {
  return reconcile::Time(milliseconds(ms));
}

reconcile::Time wall_now() {
  return to_time(state::now_ms());
}

}  // namespace

Code code_of_exit(int exit_code) {
  switch (static_cast<RankExit>(exit_code)) {
    case RankExit::config:
      return Code::config;
    case RankExit::weights:
      return Code::weights;
    case RankExit::memory:
      return Code::memory;
    case RankExit::fabric:
      return Code::fabric;
    case RankExit::device:
      return Code::device;
    case RankExit::stalled:
      return Code::stalled;
    default:
      return Code::internal;
  }
}

Driver::Driver(const AgentSettings& settings, ConfigFile& file, state::Database& db, supervise::Supervisor& supervisor,
               LocalNode& node, Journal& journal)
    : settings_(settings),
      file_(file),
      supervisor_(supervisor),
      node_(node),
      journal_(journal),
      wanted_store_(db),
      operations_(db),
      generations_(db),
      processes_(db),
      lease_(db),
      epoch_(lease_.take(settings.name, boot_id(), ::getpid(), state::now_ms())),
      probe_(settings.run_dir, supervisor),
      canary_([this] { wake(); }),
      preflight_([this] { wake(); }),
      copy_([this] { wake(); }, [this](const std::string& line) { journal_.note("info", log::redact(line)); }) {
  operations_.interrupt_steps(state::now_ms());
  load_wanted();
  reload_history();
  state_since_ = state::now_ms();
  if (const auto address = worker_address(file_.config(), settings_)) {
    link_ = std::make_unique<WorkerLink>(*address, epoch_, settings_.trust, [this] { wake(); });
  }
  if (const auto at_work = operations_.running()) {
    operation_ = at_work->id;
    operation_kind_ = at_work->kind;
    operation_since_ = at_work->created_at;
    if (operation_kind_ == "sync") {
      finish("failed", Error(Code::cancelled, "the agent ended during the copy", "sync again: what came is kept"));
      return;
    }
    journal_.note("info", cat("the agent goes on with ", at_work->id, " (", at_work->kind, ")"), operation_);
  }
}

Driver::~Driver() {
  {
    const std::lock_guard lock(wake_mutex_);
    stopping_ = true;
  }
  wake_cv_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (background_.joinable()) background_.join();
  link_.reset();
  canary_.cancel();
  preflight_.wait();
  copy_.stop();
}

void Driver::start() {
  thread_ = std::thread([this] { run(); });
}

void Driver::wake() {
  {
    const std::lock_guard lock(wake_mutex_);
    woken_ = true;
  }
  wake_cv_.notify_all();
}

void Driver::run() {
  milliseconds period = kActive;
  while (true) {
    {
      std::unique_lock lock(wake_mutex_);
      wake_cv_.wait_for(lock, period, [&] { return woken_ || stopping_; });
      if (stopping_) return;
      woken_ = false;
    }
    try {
      const bool acted = tick();
      const std::lock_guard lock(mutex_);
      stuck_.clear();
      const bool steady = cluster_.state == ClusterState::up || cluster_.state == ClusterState::down ||
                          cluster_.state == ClusterState::failed;
      period = acted ? milliseconds(0) : steady && operation_.empty() ? kSteady : kActive;
    } catch (const std::exception& e) {
      log::error(cat("driver: ", std::string_view(e.what())));
      const std::lock_guard lock(mutex_);
      stuck_ = e.what();
      period = kSteady;
    }
  }
}

void Driver::load_wanted() {
  wanted_ = wanted_store_.get();
  try {
    effective_ =
        wanted_.config_hash.empty() ? make_effective(file_.config(), {}) : restore_effective(wanted_.config_json);
  } catch (const Error& e) {
    // Written by another version, or a file that cannot run a cluster yet: nothing is started from it.
    journal_.note(wanted_.running ? "error" : "warn", cat("the configuration cannot be used: ", e.line()));
    wanted_.running = false;
  }
}

void Driver::reload_history() {
  history_ = generations_.recent(kHistory);
}

reconcile::Wanted Driver::wanted_now() const {
  reconcile::Wanted w;
  w.running = wanted_.running && !exiting_;
  w.min_generation = wanted_.min_generation;
  w.changed_at = to_time(wanted_.changed_at);
  w.drain = exiting_ ? milliseconds(0) : milliseconds(wanted_.drain_ms);
  w.config_hash = effective_.hash;
  w.from_hub = w.running && !hub_models(effective_.config).empty();
  w.copies = file_.config().text("sync.worker_source") == "head";
  w.limits = limits_of(effective_.config);
  for (const RankPlace& place : parse_ranks(effective_.config)) w.ranks.push_back(place.node);
  return w;
}

/// Names the models of the wanted state as it is; empty when nothing is wanted.
std::string Driver::fetch_request() const {
  return wanted_.running && !exiting_ ? cat(wanted_.changed_at) : std::string();
}

reconcile::Observed Driver::observe(reconcile::Time now) {
  reconcile::Observed o;
  head_report_ = node_.report();
  o.nodes.push_back(to_observed(head_report_, now, true, fetch_request()));
  if (link_) {
    const WorkerView worker = link_->view();
    reconcile::ObservedNode node;
    if (worker.report) node = to_observed(*worker.report, worker.taken_at, worker.reachable, fetch_request());
    const FetchReport copy = copy_.report();
    const bool leftover =
        fetch_request().empty() && copy.state == reconcile::Weights::fetching && copy.request != operation_;
    if (leftover || (!copy.request.empty() && copy.request == fetch_request())) {
      node.copy = copy.state;
      const bool says = copy.state == reconcile::Weights::fetching || copy.state == reconcile::Weights::failed;
      if (says) node.weights_text = fetch_text(copy);
    }
    node.name = "worker";
    node.reachable = worker.reachable;
    // Silence is counted up to the report, not over the time since.
    for (auto& p : node.processes) p.last_heard += now - worker.taken_at;
    o.nodes.push_back(std::move(node));
  }
  for (const state::GenerationRow& g : history_) {
    o.last_generation = std::max(o.last_generation, g.n);
    if (g.ended_at != 0) {
      const auto up_for = g.up_at == 0 ? milliseconds(0) : milliseconds(std::max(g.ending_at, g.up_at) - g.up_at);
      o.ends.push_back({g.n, to_time(g.ended_at), reconcile::parse_cause(g.cause), g.exit_code, up_for, g.end_reason});
    }
  }
  forget_failed_fetch(o);
  o.preflight = preflight_.state(wanted_.changed_at);
  o.preflight_error = join(preflight_.failures(), "; ");
  if (!history_.empty() && history_.back().ended_at == 0) {
    const state::GenerationRow& g = history_.back();
    o.generation = reconcile::ObservedGeneration{
        g.n, to_time(g.started_at), g.up_at != 0, reconcile::parse_cause(g.cause), g.exit_code, g.end_reason};
    o.canary = canary_.state(g.n);
    o.canary_error = canary_.error();
    if (drain_since_ && drain_generation_ == g.n) o.drain_since = drain_since_;
  }
  uint64_t api = 0;
  bool api_ended = false;
  for (const auto& p : o.nodes.front().processes) {
    if (p.rank < 0 && p.generation >= api) {
      api = p.generation;
      api_ended = p.end.has_value();
    }
  }
  o.gate_open = o.generation && gate_generation_ == o.generation->n && gate_api_ == api && !api_ended;
  if (api_ended) o.api_starts_last_minute = static_cast<int>(processes_.started_since("api", state::now_ms() - 60'000));
  const Counters counters = probe_.counters();
  o.requests_running = std::max(counters.running + counters.waiting, counters.api_in_flight);
  if (o.drain_since && now < *o.drain_since + kDrainSettle)
    o.requests_running = std::max<int64_t>(o.requests_running, 1);
  return o;
}

/// A failure nobody waits for is tried again after a while: after a boot the network may come late.
void Driver::forget_failed_fetch(reconcile::Observed& observed) {
  const auto failed = [](const reconcile::ObservedNode& n) {
    return n.weights == reconcile::Weights::failed || n.copy == reconcile::Weights::failed;
  };
  if (!operation_.empty() || std::none_of(observed.nodes.begin(), observed.nodes.end(), failed)) {
    fetch_failed_at_ = 0;
    return;
  }
  if (fetch_failed_at_ == 0) fetch_failed_at_ = state::now_ms();
  if (state::now_ms() - fetch_failed_at_ < kFetchAgain) return;
  for (auto& node : observed.nodes) {
    if (node.weights == reconcile::Weights::failed) node.weights = reconcile::Weights::none;
    if (node.copy == reconcile::Weights::failed) node.copy = reconcile::Weights::none;
  }
}

bool Driver::tick() {
  const std::lock_guard lock(mutex_);
  const reconcile::Time now = wall_now();
  collect_results();
  const reconcile::Wanted wanted = wanted_now();
  const reconcile::Observed observed = observe(now);
  bool acted = false;
  for (const Action& action : next_actions(wanted, observed, now)) acted = execute(action, now) || acted;
  note_changes(wanted, observed, now);
  if (!acted) finish_operation(observed);
  if (state::now_ms() - renewed_ > kRenewPeriod) {
    renewed_ = state::now_ms();
    lease_.renew(renewed_);
  }
  probe_.set_hurry(observed.drain_since.has_value());
  if (link_) link_->set_lively(!operation_.empty() || observed.generation || wanted.running);
  return acted;
}

void Driver::note_changes(const reconcile::Wanted& wanted, const reconcile::Observed& observed, reconcile::Time now) {
  const reconcile::ClusterView fresh = cluster_view(wanted, observed, now);
  if (observed.generation && history_.back().ended_at == 0) {
    const state::GenerationRow& g = history_.back();
    const bool ready = fresh.state == ClusterState::warming || fresh.state == ClusterState::up;
    if (ready && g.ready_at == 0) {
      generations_.mark_ready(g.n, state::now_ms());
      reload_history();
    }
    if (fresh.state == ClusterState::up && history_.back().up_at == 0) {
      generations_.mark_up(history_.back().n, state::now_ms());
      reload_history();
    }
  }
  if (fresh.state != cluster_.state) {
    state_since_ = state::now_ms();
    const bool bad = fresh.state == ClusterState::failed;
    journal_.note(bad ? "error" : "info",
                  cat("cluster is ", name(fresh.state), fresh.reason.empty() ? "" : ": ", fresh.reason), operation_,
                  observed.generation ? observed.generation->n : 0);
  }
  cluster_ = fresh;
}

void Driver::finish_operation(const reconcile::Observed& observed) {
  if (operation_.empty()) return;
  if (operation_kind_ == "sync") return finish_copy();
  const bool unreachable = observed.nodes.size() > 1 && !observed.nodes[1].reachable;
  if (operation_kind_ == "stop") {
    if (cluster_.state != ClusterState::down) return;
    if (!unreachable) return finish("done", std::nullopt);
    return finish("failed", Error(Code::peer_lost, "the head is stopped; the worker's agent does not answer",
                                  "its ranks stop by themselves after ranks.orphan_timeout"));
  }
  if (finish_without_models()) return;
  if (cluster_.state == ClusterState::up && observed.generation && observed.generation->n >= wanted_.min_generation) {
    return finish("done", std::nullopt);
  }
  if (cluster_.state == ClusterState::failed) {
    Code code = Code::internal;
    if (!history_.empty() && history_.back().ended_at >= wanted_.changed_at)
      code = code_of_exit(history_.back().exit_code);
    if (history_.empty() || history_.back().ended_at < wanted_.changed_at) code = Code::config;
    if (observed.preflight == reconcile::Preflight::failed) {
      return finish("failed",
                    Error(code, cluster_.reason, "glm53ctl doctor shows every check; correct it and start again"));
    }
    return finish("failed", Error(code, cluster_.reason, "glm53ctl logs shows more; correct it and start again"));
  }
  if (unreachable && !observed.generation && state::now_ms() - operation_since_ > kWorkerPatience) {
    const WorkerView worker = link_->view();
    finish("failed", Error(Code::peer_lost, cat("the worker's agent does not answer: ", worker.error),
                           "start it; the cluster starts by itself when it answers"));
  }
}

void Driver::finish_copy() {
  const FetchReport copy = copy_.report();
  const bool ours = copy.request == operation_;
  if (ours && copy.state == reconcile::Weights::present) return finish("done", std::nullopt);
  if (ours && copy.state == reconcile::Weights::failed)
    return finish("failed", Error(parse_code(copy.error_code), copy.error, copy.remedy));
  if (!ours || copy.state != reconcile::Weights::fetching)
    finish("cancelled", Error(Code::cancelled, "the copy was ended"));
}

/// Ends an operation whose models cannot be had. A restart is given up: what serves goes on as it was.
bool Driver::finish_without_models() {
  std::vector<std::pair<std::string, FetchReport>> reports{{"head", head_report_.fetch}, {"worker", copy_.report()}};
  if (link_) {
    if (const auto report = link_->view().report) reports.emplace_back("worker", report->fetch);
  }
  for (const auto& [node, fetch] : reports) {
    if (fetch.state != reconcile::Weights::failed || fetch.request != fetch_request()) continue;
    if (!history_.empty() && history_.back().ended_at == 0 && history_.back().up_at != 0) {
      effective_ = restore_effective(history_.back().config_json);
      wanted_.config_json = effective_.json;
      wanted_.config_hash = effective_.hash;
      wanted_.min_generation = history_.back().n;
      wanted_store_.set(wanted_);
    }
    finish("failed", Error(parse_code(fetch.error_code), cat(node, ": ", fetch.error), fetch.remedy));
    return true;
  }
  return false;
}

void Driver::finish(const std::string& state, const std::optional<Error>& error) {
  nlohmann::ordered_json data{{"state", state}, {"error", nullptr}};
  if (error) {
    data["error"] = {
        {"code", std::string(name(error->code()))}, {"message", error->what()}, {"remedy", error->remedy()}};
  }
  journal_.add(error ? "error" : "info", "done",
               cat(operation_, " (", operation_kind_, "): ", state, error ? ": " + error->line() : ""), data,
               operation_);
  operations_.finish(operation_, state, state::now_ms(), error ? std::string(name(error->code())) : "",
                     error ? error->what() : "", error ? error->remedy() : "");
  operation_.clear();
  operation_kind_.clear();
}

DriverView Driver::view() {
  const std::lock_guard lock(mutex_);
  DriverView v;
  v.cluster = cluster_;
  v.state_since = state_since_;
  const bool restarted = history_.size() > 1 && history_.back().automatic;
  if (v.cluster.reason.empty() && v.cluster.state == ClusterState::up && restarted) {
    v.cluster.reason = cat("restarted after: ", history_[history_.size() - 2].end_reason);
  }
  v.wanted = wanted_;
  if (!history_.empty()) v.generation = history_.back();
  v.restarts = generations_.automatic_since(wanted_.changed_at);
  v.operation = operation_;
  v.gate_open = cluster_.state == ClusterState::up;
  v.stuck = log::redact(stuck_);
  v.head = node_.report();
  if (link_) {
    v.worker = link_->view();
    v.worker_address = link_->address().endpoint;
    const FetchReport copy = copy_.report();
    if (v.worker->report && copy.state == reconcile::Weights::fetching) v.worker->report->fetch = copy;
  }
  v.counters = probe_.counters();
  v.config = effective_.config;
  v.config_json = effective_.json;
  v.config_hash = effective_.hash;
  return v;
}

std::optional<WorkerAddress> Driver::worker() const {
  const std::lock_guard lock(mutex_);
  return link_ ? std::optional(link_->address()) : std::nullopt;
}

void Driver::reconnect_worker() {
  const std::lock_guard lock(mutex_);
  if (link_) link_->reconnect();
}

bool Driver::stop_everything(milliseconds limit) {
  {
    const std::lock_guard lock(mutex_);
    exiting_ = true;
  }
  const auto deadline = steady_clock::now() + limit;
  while (steady_clock::now() < deadline) {
    wake();
    std::this_thread::sleep_for(milliseconds(50));
    const std::lock_guard lock(mutex_);
    if (cluster_.state == ClusterState::down && !node_.any_alive()) return true;
  }
  return false;
}

}  // namespace glm53::agent
