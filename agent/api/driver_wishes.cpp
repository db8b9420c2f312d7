// What a PUT of the wanted state does. The answer is at once; the work is the main loop's.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "agent/api/driver.h"
#include "agent/api/hub_models.h"
#include "agent/sync/manifest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {

using reconcile::ClusterState;

WishAnswer Driver::want(const Wish& wish) {
  WishAnswer answer;
  {
    const std::lock_guard lock(mutex_);
    const state::WantedRow wanted = wanted_;
    const Effective effective = effective_;
    try {
      answer = wish.running ? want_running(wish) : want_stopped(wish);
    } catch (...) {
      // What could not be recorded (a full disk) or was refused halfway is not wanted.
      wanted_ = wanted;
      effective_ = effective;
      throw;
    }
  }
  wake();
  return answer;
}

std::string Driver::copy_to_worker(std::vector<HubModel> models, const std::string& requested_by) {
  std::string id;
  {
    const std::lock_guard lock(mutex_);
    if (!link_) throw Error(Code::config, "there is no worker to copy to", "set worker.admin in the head's file");
    Wish wish;
    wish.requested_by = requested_by;
    if (const auto at_work = operations_.running()) clear_way(wish, *at_work);
    if (models.empty()) models = hub_models(file_.config());
    if (models.empty()) {
      throw Error(Code::usage, "no model is named by repository",
                  "glm53ctl sync ORGANISATION/NAME@COMMIT, or set model.repo and model.revision");
    }
    for (const HubModel& m : models) (void)sync::manifest_of(hub::Cache(settings_.hub_cache), m.repo, m.commit);
    const std::string before = wanted_.operation;
    id = new_operation("sync", wish);
    wanted_.operation = before;  // it is nobody's wish
    try {
      begin_copy(id, std::move(models));
    } catch (const Error& e) {
      finish("failed", e);
      throw;
    }
  }
  wake();
  return id;
}

/// The way is free, or Error(busy). Stopping may push a start aside when it says so.
void Driver::clear_way(const Wish& wish, const state::OperationRow& at_work) {
  if (!wish.preempt) {
    throw Error(
        Code::busy, cat(at_work.id, " (", at_work.kind, " by ", at_work.requested_by, ") is at work"),
        cat("follow it with glm53ctl start, or stop with --preempt; its record is /admin/v1/operations/", at_work.id));
  }
  copy_.cancel();
  finish("cancelled", Error(Code::cancelled, cat("called off by ", wish.requested_by)));
}

/// Reads the file again: the operator means what it says now.
void Driver::adopt_config(const Wish& wish) {
  const auto settings = wish.settings.value_or(std::map<std::string, std::string>());
  const Effective fresh = make_effective(file_.reload(), settings);
  const auto models = hub_models(fresh.config);
  const bool named = std::any_of(models.begin(), models.end(), [](const HubModel& m) { return m.key == "model"; });
  if (!named && fresh.config.text("model.path").empty()) {
    throw Error(Code::config, "neither model.path nor model.repo is set",
                cat("name the folder of the checkpoint, or its repository and commit, in ", file_.path()));
  }
  const auto address = worker_address(file_.config(), settings_);
  const bool same_worker =
      address.has_value() == (link_ != nullptr) && (!link_ || link_->address().endpoint == address->endpoint);
  if (!same_worker) {
    link_.reset();
    worker_step_.reset();
    if (address) link_ = std::make_unique<WorkerLink>(*address, epoch_, settings_.trust, [this] { wake(); });
  }
  effective_ = fresh;
  wanted_.config_json = fresh.json;
  wanted_.config_hash = fresh.hash;
  wanted_.settings_json = settings_json(settings);
}

std::string Driver::new_operation(const std::string& kind, const Wish& wish) {
  const nlohmann::ordered_json args{
      {"settings", wish.settings ? parse_json(settings_json(*wish.settings)) : nlohmann::ordered_json::object()},
      {"drain_ms", wish.drain_ms},
      {"preempt", wish.preempt}};
  const state::TimeMs now = state::now_ms();
  operation_ = operations_.create(kind, dump(args), wish.requested_by, now);
  operation_kind_ = kind;
  operation_since_ = now;
  wanted_.operation = operation_;
  journal_.note("info", cat(operation_, ": ", kind, " requested by ", wish.requested_by), operation_);
  return operation_;
}

bool Driver::reached_up() const {
  return cluster_.state == ClusterState::up && !history_.empty() && history_.back().n >= wanted_.min_generation;
}

WishAnswer Driver::want_running(const Wish& wish) {
  const auto at_work = operations_.running();
  const bool new_settings =
      wish.settings && !wish.settings->empty() && settings_json(*wish.settings) != wanted_.settings_json;
  if (wanted_.running && !wish.restart) {
    if (new_settings && at_work) clear_way({}, *at_work);  // refuses: that operation has other settings
    if (new_settings && at_work && !wish.preempt) clear_way(wish, *at_work);
    if (new_settings) {
      throw Error(Code::usage, "the cluster is wanted with other settings",
                  "settings take effect at a restart: glm53ctl restart --set …");
    }
    if (at_work) return {at_work->id, true};
    if (reached_up()) return {};
    const bool waits = cluster_.state == ClusterState::preparing && !history_.empty() && history_.back().ended_at != 0;
    if (cluster_.state == ClusterState::failed || waits) {
      // Somebody acts: the past is forgiven, and nobody waits for the next automatic attempt.
      Wish again = wish;
      if (!again.settings || again.settings->empty()) again.settings = parse_settings(wanted_.settings_json);
      adopt_config(again);
      wanted_.changed_at = state::now_ms();
    }
    const std::string id = new_operation("start", wish);
    wanted_store_.set(wanted_);
    return {id, false};
  }
  const bool restarts = wanted_.running;
  if (at_work) {
    if (restarts && at_work->kind == "restart" && !new_settings) return {at_work->id, true};
    clear_way(wish, *at_work);
  }
  adopt_config(wish);
  const uint64_t last = history_.empty() ? 0 : history_.back().n;
  wanted_.running = true;
  wanted_.drain_ms = wish.drain_ms;
  wanted_.changed_at = state::now_ms();
  wanted_.min_generation = last + 1;
  const std::string id = new_operation(restarts ? "restart" : "start", wish);
  wanted_store_.set(wanted_);
  return {id, false};
}

WishAnswer Driver::want_stopped(const Wish& wish) {
  const auto at_work = operations_.running();
  if (at_work && at_work->kind == "stop") {
    if (wish.drain_ms < wanted_.drain_ms) {
      wanted_.drain_ms = wish.drain_ms;
      wanted_store_.set(wanted_);
    }
    return {at_work->id, true};
  }
  if (at_work) clear_way(wish, *at_work);
  if (!wanted_.running && cluster_.state == ClusterState::down) return {};
  wanted_.running = false;
  wanted_.drain_ms = wish.drain_ms;
  wanted_.changed_at = state::now_ms();
  const std::string id = new_operation("stop", wish);
  wanted_store_.set(wanted_);
  return {id, false};
}

}  // namespace glm53::agent
