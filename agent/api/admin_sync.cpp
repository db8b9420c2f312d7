// Copies over the admin API: the head begins one, the worker receives it.
#include <nlohmann/json.hpp>

#include "agent/api/admin_server.h"
#include "agent/api/auth.h"
#include "agent/api/sync_service.h"
#include "agent/hub/names.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

void send(const std::shared_ptr<HttpReply>& reply, const Json& body, int status = 200) {
  HttpResponse response;
  response.status = status;
  response.body = dump(body);
  reply->send(std::move(response));
}

/// {} for the models of the configuration, {"repo","revision"} for one.
std::vector<HubModel> parse_order(const std::string& text) {
  const Json body = parse_json(text, {.max_bytes = 4096, .max_depth = 2});
  if (!body.is_object()) throw Error(Code::usage, "the body must be a JSON object");
  HubModel model{"model", {}, {}};
  for (const auto& [key, value] : body.items()) {
    if ((key != "repo" && key != "revision") || !value.is_string())
      throw Error(Code::usage, cat("member '", key, "' is unknown or no text"));
    (key == "repo" ? model.repo : model.commit) = value.get<std::string>();
  }
  if (model.repo.empty() && model.commit.empty()) return {};
  hub::check_repo_id(model.repo);
  if (!hub::is_commit(model.commit)) {
    throw Error(Code::usage, cat("'", model.commit, "' is no commit"), "name its 40 hex digits: branches move");
  }
  return {model};
}

}  // namespace

void AdminServer::add_sync_routes() {
  route("POST", "/sync", [this](const HttpRequest& request, const Reply& reply) {
    if (context_.driver == nullptr) throw Error(Code::usage, "this node is a worker", "ask the head's agent");
    send(reply, {{"operation", context_.driver->copy_to_worker(parse_order(request.body), requester(request))}}, 202);
  });
  const auto receiver = [this]() -> SyncService& {
    if (context_.sync == nullptr) throw Error(Code::usage, "this node is the head; it receives no copies");
    return *context_.sync;
  };
  route("POST", "/node/sync", [this, receiver](const HttpRequest& request, const Reply& reply) {
    SyncService& sync = receiver();
    const auto it = request.query.find("epoch");
    const auto epoch = it == request.query.end() ? std::nullopt : parse_int(it->second);
    if (!epoch || *epoch < 0) throw Error(Code::usage, "query epoch must be a number");
    context_.fence->admit(static_cast<uint64_t>(*epoch));
    // The copy before it may still be at a disk.
    in_background([&sync, reply, manifest = request.body] {
      try {
        sync.open(manifest);
        send(reply, {{"ok", true}});
      } catch (const std::exception& e) {
        reply->send(error_response(e));
      }
    });
  });
  route("GET", "/node/sync", [receiver](const HttpRequest&, const Reply& reply) { send(reply, receiver().state()); });
  route("PUT", "/node/sync/data",
        [receiver](const HttpRequest& request, const Reply& reply) { receiver().data(request, reply); });
  route("POST", "/node/sync/commit", [this, receiver](const HttpRequest& request, const Reply& reply) {
    SyncService& sync = receiver();
    in_background([&sync, reply, body = request.body] {
      try {
        sync.commit(body);
        send(reply, {{"ok", true}});
      } catch (const std::exception& e) {
        reply->send(error_response(e));
      }
    });
  });
}

}  // namespace glm53::agent
