#include "agent/api/status.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using reconcile::ClusterState;
constexpr uint64_t kLowMemory = uint64_t{1} << 30;

std::string model_name(const Config& config) {
  if (!config.text("api.model_name").empty()) return config.text("api.model_name");
  // Of a repository: its name, not the commit that its folder has.
  if (config.text("model.path").empty()) return std::filesystem::path(config.text("model.repo")).filename().string();
  return std::filesystem::path(config.text("model.path")).lexically_normal().filename().string();
}

Json cluster_json(const DriverView& v) {
  return {{"name", v.config.text("cluster.name")},
          {"state", std::string(name(v.cluster.state))},
          {"state_since", v.state_since},
          {"reason", v.cluster.reason},
          {"wanted", v.wanted.running ? "running" : "stopped"},
          {"generation", v.generation ? v.generation->n : 0},
          {"restarts", v.restarts},
          {"operation", v.operation.empty() ? Json(nullptr) : Json(v.operation)}};
}

Json api_json(const DriverView& v) {
  const ProcessReport* api = nullptr;
  for (const ProcessReport& p : v.head.processes) {
    if (p.name == "api" && (api == nullptr || p.generation > api->generation)) api = &p;
  }
  const bool alive = api != nullptr && !api->ended;
  return {{"url", api_url(v.config)},
          {"pid", alive ? Json(api->pid) : Json(nullptr)},
          {"ready", alive && v.gate_open},
          {"healthy", alive && v.counters.api_answers},
          {"model", model_name(v.config)},
          {"requests_running", v.counters.running},
          {"requests_waiting", v.counters.waiting},
          {"tokens_per_second", v.counters.tokens_per_second},
          {"tokens_total", v.counters.tokens_total},
          {"restarts", api == nullptr ? 0 : api->restarts}};
}

Json pools_json(const DriverView& v) {
  const Pools& p = v.counters.pools;
  if (!v.counters.rank0_answers) return nullptr;
  return {{"blocks_used", p.blocks_used},         {"blocks_total", p.blocks_total},
          {"blocks_cached", p.blocks_cached},     {"slots_used", p.slots_used},
          {"slots_total", p.slots_total},         {"snapshots_used", p.snapshots_used},
          {"snapshots_total", p.snapshots_total}, {"prefix_queries", p.prefix_queries},
          {"prefix_hits", p.prefix_hits},         {"preemptions", p.preemptions}};
}

Json model_json(const DriverView& v) {
  const auto text = [](const std::string& value) { return value.empty() ? Json(nullptr) : Json(value); };
  const bool from_hub = v.config.text("model.path").empty();
  return {{"path", v.config.text("model.path")},
          {"name", model_name(v.config)},
          {"repo", from_hub ? text(v.config.text("model.repo")) : Json(nullptr)},
          {"revision", from_hub ? text(v.config.text("model.revision")) : Json(nullptr)},
          {"digest", text(v.counters.model_digest)}};
}

Json node_json(const NodeReport& report, const std::string& address, bool reachable) {
  Json j = to_json(report);
  Json out{{"name", j["name"]}, {"role", j["role"]}, {"address", address}, {"reachable", reachable}};
  out["agent"] = j["agent"];
  out["memory"] = j["memory"];
  out["download"] = j["download"];
  out["processes"] = j["processes"];
  return out;
}

Json nodes_json(const DriverView& v) {
  Json nodes = Json::array({node_json(v.head, v.head.address, true)});
  if (!v.worker) return nodes;
  NodeReport report = v.worker->report.value_or(NodeReport());
  if (report.role.empty()) report.role = "worker";
  if (report.name.empty()) report.name = report.role;
  nodes.push_back(node_json(report, v.worker_address, v.worker->reachable));
  return nodes;
}

Json events_json(const std::vector<state::EventRow>& events) {
  Json out = Json::array();
  for (const auto& row : events)
    out.push_back({{"id", row.id}, {"at", row.at}, {"level", row.level}, {"text", row.text}});
  return out;
}

}  // namespace

std::vector<Warning> warnings_of(const DriverView& v, const ConfigFile::Drift& drift,
                                 const std::string& database_moved_to) {
  std::vector<Warning> w;
  if (v.cluster.state == ClusterState::failed) {
    w.push_back({"cluster-failed", "error", v.cluster.reason, "correct the cause and start again (glm53ctl start)"});
  }
  if (!v.stuck.empty()) {
    w.push_back({"agent-stuck", "error", cat("the agent cannot act: ", v.stuck),
                 "correct the cause (a full disk under paths.state?); the agent goes on by itself"});
  }
  if (v.worker && !v.worker->reachable) {
    w.push_back({"worker-unreachable", "error",
                 cat("the worker's agent at ", v.worker_address, " does not answer: ", v.worker->error),
                 "start glm53-agent there, or check worker.admin and glm53ctl node list"});
  }
  if (!drift.error.empty())
    w.push_back({"config-wrong", "warning", drift.error, "correct the file before the next restart"});
  if (!drift.lines.empty()) {
    w.push_back({"config-drift", "warning", cat(drift.lines.size(), " settings of the file differ from those that run"),
                 "glm53ctl restart applies the file"});
  }
  const auto low = [&](const NodeReport& node) {
    if (node.memory_total == 0 || node.memory_available >= kLowMemory) return;
    w.push_back({"memory-low", "warning",
                 cat(node.name, " has ", human_bytes(static_cast<int64_t>(node.memory_available)), " available"),
                 "lower memory.kv_bytes or end other programs"});
  };
  low(v.head);
  if (v.worker && v.worker->report) low(*v.worker->report);
  if (!database_moved_to.empty()) {
    w.push_back({"database-rebuilt", "warning", cat("the state database was damaged and is now at ", database_moved_to),
                 "check the disk; the wanted state has to be set again"});
  }
  return w;
}

std::vector<Warning> trust_warnings(const trust::Trust& trust, bool needed, int64_t now) {
  constexpr int64_t kSoon = 30 * int64_t{86'400};
  std::vector<Warning> w;
  const auto own = trust.own();
  if (!own && needed) {
    w.push_back({"no-certificate", "error", "E720 this node has no certificate yet: it answers no other machine",
                 "glm53ctl cluster init"});
  }
  for (const trust::Member& m : trust.members()) {
    if (m.removed || m.expires_at - now > kSoon) continue;
    w.push_back({"certificate-expires", "warning",
                 cat("W721 the certificate of ", m.role, " ", m.name,
                     now > m.expires_at ? " expired at " : " expires at ", pki::time_text(m.expires_at)),
                 cat("glm53ctl cluster token --role ", m.role, " --name ", m.name, ", and join again there")});
  }
  return w;
}

Json head_status(const DriverView& v, const ConfigFile::Drift& drift, const std::vector<Warning>& warnings,
                 const std::vector<state::EventRow>& events) {
  Json list = Json::array();
  for (const Warning& w : warnings) {
    list.push_back({{"name", w.name}, {"severity", w.severity}, {"text", w.text}, {"remedy", w.remedy}});
  }
  const bool running = v.generation && v.generation->ended_at == 0;
  return {{"cluster", cluster_json(v)},
          {"api", api_json(v)},
          {"pools", pools_json(v)},
          {"model", model_json(v)},
          {"config",
           {{"hash_running", running ? Json(v.generation->config_hash) : Json(nullptr)},
            {"hash_file", drift.hash_file.empty() ? Json(nullptr) : Json(drift.hash_file)},
            {"drift", drift.lines}}},
          {"nodes", nodes_json(v)},
          {"warnings", list},
          {"last_events", events_json(events)}};
}

Json worker_status(const NodeReport& node, const std::vector<state::EventRow>& events) {
  return {{"cluster", nullptr},
          {"nodes", Json::array({node_json(node, node.address, true)})},
          {"warnings", Json::array()},
          {"last_events", events_json(events)}};
}

}  // namespace glm53::agent
