#include "agent/api/preflight_run.h"

#include <chrono>
#include <future>

#include <nlohmann/json.hpp>

#include "agent/api/hub_models.h"
#include "agent/preflight/preflight.h"
#include "common/error.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr milliseconds kConnect{2000}, kRead{15'000};
constexpr JsonLimits kLimits{.max_bytes = 1u << 20, .max_depth = 16};

struct Asked {
  preflight::NodeResult result;
  int64_t clock = 0, round_trip = 0;  ///< of the head, when the answer came
  bool answered = false;
};

int64_t wall_ms() {
  return std::chrono::duration_cast<milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

std::string refusal(const HttpAnswer& answer) {
  try {
    return parse_json(answer.body).at("error").at("message").get<std::string>();
  } catch (const std::exception&) {
    return cat("HTTP status ", answer.status);
  }
}

/// Never throws: what goes wrong is the result.
Asked ask_worker(const WorkerAddress& address, const PreflightRequest& request) {
  Asked asked;
  try {
    HttpClient client = address.connect();
    client.set_timeout(kConnect, kRead);
    const HttpAnswer answer = client.request("POST", "/admin/v1/node/preflight", to_json(request));
    asked.clock = wall_ms();
    if (answer.status != 200) throw Error(Code::unavailable, refusal(answer));
    asked.result = preflight::parse_node_result(answer.body);
    asked.result.node = "worker";
    asked.answered = true;
    // The checks themselves take the most of that call; the way alone is what a small one takes.
    const int64_t before = wall_ms();
    client.request("GET", "/admin/v1/version");
    asked.round_trip = wall_ms() - before;
  } catch (const std::exception& e) {
    if (!asked.answered) asked.result = preflight::unreachable("worker", log::redact(e.what()));
  }
  return asked;
}

}  // namespace

preflight::NodeResult check_own_node(const AgentSettings& settings, const Config& own, const Effective& cluster,
                                     const NodeReport& report, bool deep) {
  preflight::Options options;
  options.deep = deep;
  for (const ProcessReport& p : report.processes) {
    if (!p.ended && p.pid > 0) options.own_pids.push_back(p.pid);
  }
  auto subject = preflight::subject_of(own, cluster.config, settings.role, settings.engine());
  try {
    for (const HubModel& m : hub_models(cluster.config)) {
      const bool draft = m.key == "draft";
      (draft ? subject.draft : subject.model) = snapshot_folder(settings.hub_cache, m);
      (draft ? subject.draft_source : subject.model_source) = cat(m.repo, "@", m.commit);
    }
  } catch (const Error& e) {
    log::debug(cat("preflight: ", e.line()));  // the check of the weights says that nothing usable is named
  }
  return run_checks(subject, preflight::FileRoot(), *preflight::this_machine(), options);
}

std::vector<preflight::NodeResult> check_cluster(const AgentSettings& settings, const Config& own,
                                                 const Effective& cluster, const NodeReport& report,
                                                 const std::optional<WorkerAddress>& worker, bool deep) {
  std::future<Asked> other;
  if (worker) {
    other = std::async(std::launch::async, [&] { return ask_worker(*worker, {cluster.json, deep}); });
  }
  std::vector<preflight::NodeResult> results{check_own_node(settings, own, cluster, report, deep)};
  if (!worker) return results;
  Asked asked = other.get();
  if (asked.answered) compare_nodes(results.front(), asked.result, asked.clock, asked.round_trip);
  results.push_back(std::move(asked.result));
  return results;
}

preflight::NodeResult check_file(const std::string& path, bool deep) {
  const Config file = Config::load(path);
  return check_own_node(agent_settings(file), file, make_effective(file, {}), {}, deep);
}

std::string to_json(const PreflightRequest& request) {
  return dump({{"config", parse_json(request.config_json)}, {"deep", request.deep}});
}

PreflightRequest parse_preflight_request(std::string_view json) {
  const Json body = parse_json(json, kLimits);
  if (!body.is_object()) throw Error(Code::usage, "the body must be a JSON object");
  PreflightRequest request;
  for (const auto& [key, value] : body.items()) {
    if (key == "config" && value.is_object()) {
      request.config_json = dump(value);
    } else if (key == "deep" && value.is_boolean()) {
      request.deep = value.get<bool>();
    } else {
      throw Error(Code::usage, cat("member '", key, "' is unknown or of a wrong type"));
    }
  }
  if (request.config_json.empty()) throw Error(Code::usage, "member 'config' is missing");
  return request;
}

}  // namespace glm53::agent
