// Preflight over the admin API.
#include <functional>

#include <nlohmann/json.hpp>

#include "agent/api/admin_server.h"
#include "agent/api/preflight_run.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

void answer(const std::shared_ptr<HttpReply>& reply, const std::function<Json()>& make) {
  HttpResponse response;
  try {
    response.body = dump(make());
  } catch (const std::exception& e) {
    response = error_response(e);
  }
  reply->send(std::move(response));
}

bool wants_deep(const HttpRequest& request) {
  const auto it = request.query.find("deep");
  if (it == request.query.end() || it->second == "0") return false;
  if (it->second != "1") throw Error(Code::usage, cat("query deep=", it->second, " must be 0 or 1"));
  return true;
}

}  // namespace

/// What a start would find now: the file as it is, with the settings of the wanted state.
void AdminServer::get_preflight(const HttpRequest& request, const Reply& reply) {
  const bool deep = wants_deep(request);
  const Config file = Config::load(context_.file.path());
  std::map<std::string, std::string> settings;
  std::optional<WorkerAddress> worker;
  if (context_.driver != nullptr) {
    settings = parse_settings(context_.driver->view().wanted.settings_json);
    worker = worker_address(file, context_.settings);
  }
  const Effective effective = make_effective(file, settings);
  in_background([this, reply, file, effective, worker, deep] {
    answer(reply, [&] {
      return report_json(check_cluster(context_.settings, file, effective, context_.node.report(), worker, deep));
    });
  });
}

void AdminServer::node_preflight(const HttpRequest& request, const Reply& reply) {
  const PreflightRequest wanted = parse_preflight_request(request.body);
  const Effective effective = restore_effective(wanted.config_json);
  in_background([this, reply, effective, deep = wanted.deep] {
    answer(reply, [&] {
      return preflight::to_json(
          check_own_node(context_.settings, context_.file.config(), effective, context_.node.report(), deep));
    });
  });
}

}  // namespace glm53::agent
