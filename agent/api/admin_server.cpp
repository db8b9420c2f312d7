#include "agent/api/admin_server.h"

#include <algorithm>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "agent/api/auth.h"
#include "agent/api/status.h"
#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"
#include "common/version.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxBody = 1u << 20;
constexpr JsonLimits kLimits{.max_bytes = kMaxBody, .max_depth = 16};
constexpr size_t kStatusEvents = 20;
constexpr size_t kMostBackgrounds = 32;

void send_json(const std::shared_ptr<HttpReply>& reply, const Json& body, int status = 200) {
  HttpResponse response;
  response.status = status;
  response.body = dump(body);
  reply->send(std::move(response));
}

Json parse_body(const HttpRequest& request, std::initializer_list<std::string_view> members) {
  Json body = parse_json(request.body, kLimits);
  if (!body.is_object()) throw Error(Code::usage, "the body must be a JSON object");
  for (const auto& [key, value] : body.items()) {
    if (std::find(members.begin(), members.end(), key) == members.end()) {
      throw Error(Code::usage, cat("member '", key, "' is unknown"));
    }
  }
  return body;
}

bool boolean(const Json& body, const char* key) {
  const auto it = body.find(key);
  if (it == body.end() || it->is_null()) return false;
  if (!it->is_boolean()) throw Error(Code::usage, cat("member '", std::string_view(key), "' must be true or false"));
  return it->get<bool>();
}

Wish parse_wish(const HttpRequest& request) {
  const Json body = parse_body(request, {"state", "settings", "restart", "drain_ms", "preempt"});
  Wish wish;
  const std::string state = body.contains("state") && body["state"].is_string() ? body["state"].get<std::string>() : "";
  if (state != "running" && state != "stopped") throw Error(Code::usage, "member 'state' must be running or stopped");
  wish.running = state == "running";
  wish.restart = boolean(body, "restart");
  wish.preempt = boolean(body, "preempt");
  if (const auto it = body.find("settings"); it != body.end() && !it->is_null())
    wish.settings = parse_settings(dump(*it));
  if (const auto it = body.find("drain_ms"); it != body.end() && !it->is_null()) {
    const bool fits = it->is_number_integer() && it->get<int64_t>() >= 0 && it->get<int64_t>() <= 3600'000;
    if (!fits) throw Error(Code::usage, "member 'drain_ms' must be an integer from 0 to 3600000");
    wish.drain_ms = it->get<int64_t>();
  }
  wish.requested_by = requester(request);
  return wish;
}

int64_t query_number(const HttpRequest& request, const std::string& key, int64_t fallback, int64_t most) {
  const auto it = request.query.find(key);
  if (it == request.query.end() || it->second.empty()) return fallback;
  const auto n = parse_int(it->second);
  if (!n || *n < 0 || *n > most)
    throw Error(Code::usage, cat("query ", key, "=", it->second, " must be a number from 0 to ", most));
  return *n;
}

Json operation_json(const state::OperationRow& row) {
  Json error = nullptr;
  if (!row.error_text.empty())
    error = {{"code", row.error_code}, {"message", row.error_text}, {"remedy", row.error_remedy}};
  return {{"id", row.id},
          {"kind", row.kind},
          {"state", row.state},
          {"requested_by", row.requested_by},
          {"created_at", row.created_at},
          {"finished_at", row.finished_at == 0 ? Json(nullptr) : Json(row.finished_at)},
          {"arguments", parse_json(row.args_json)},
          {"error", error}};
}

Json step_json(const state::StepRow& row) {
  return {{"seq", row.seq},
          {"action", row.action},
          {"node", row.node},
          {"detail", row.detail},
          {"state", row.state},
          {"started_at", row.started_at},
          {"finished_at", row.finished_at == 0 ? Json(nullptr) : Json(row.finished_at)},
          {"error", row.error.empty() ? Json(nullptr) : Json(row.error)}};
}

[[noreturn]] void not_the_head() {
  throw Error(Code::usage, "this node is a worker", "ask the head's agent");
}

}  // namespace

HttpResponse error_response(const std::exception& error) {
  HttpResponse response;
  Json body;
  if (const auto* e = dynamic_cast<const Error*>(&error)) {
    response.status = http_status(e->code());
    body = {{"code", std::string(name(e->code()))}, {"message", log::redact(e->what())}, {"remedy", e->remedy()}};
  } else if (const auto* h = dynamic_cast<const HttpError*>(&error)) {
    response.status = h->status();
    body = {{"code", h->status() == 404 ? "not_found" : "usage"}, {"message", h->what()}, {"remedy", ""}};
  } else {
    response.status = 500;
    body = {{"code", "internal"}, {"message", log::redact(error.what())}, {"remedy", ""}};
  }
  response.body = dump({{"error", body}});
  return response;
}

AdminServer::AdminServer(AdminContext context) : context_(std::move(context)) {
  HttpServerOptions options;
  options.threads = 3;  // pieces of a copy come over several connections
  options.max_body = kMaxBody;
  options.max_connections = 256;
  options.on_error = [](const HttpRequest&, const std::exception& e) { return error_response(e); };
  server_ = std::make_unique<HttpServer>(std::move(options));
  server_->before([uid = ::geteuid(), token = context_.settings.admin_token, trust = context_.settings.trust](
                      const HttpRequest& request) { authenticate(request, uid, token, trust.get()); });
  add_routes();
}

AdminServer::~AdminServer() {
  stop();
}

void AdminServer::listen() {
  server_->listen_unix(context_.settings.admin_socket, 0660);
  bound_ = true;
  const auto& at = context_.settings.admin_listen;
  if (!at) return;
  if (!context_.settings.admin_tls) {
    port_ = server_->listen_tcp(at->host, at->port);
    return;
  }
  port_ = server_->listen_tls(at->host, at->port, [trust = context_.settings.trust] {
    auto tls = trust->server();
    if (!tls) throw Error(Code::unavailable, "E720 this node has no certificate yet", "glm53ctl cluster init or join");
    return tls;
  });
}

void AdminServer::start() {
  server_->start();
}

void AdminServer::stop() {
  if (stopping_.exchange(true)) return;
  std::vector<Background> backgrounds;
  {
    const std::lock_guard lock(backgrounds_mutex_);
    backgrounds.swap(backgrounds_);
  }
  for (Background& b : backgrounds) b.thread.join();
  server_->stop(std::chrono::milliseconds(500));
  if (bound_) ::unlink(context_.settings.admin_socket.c_str());
}

void AdminServer::in_background(std::function<void()> body) {
  const std::lock_guard lock(backgrounds_mutex_);
  std::erase_if(backgrounds_, [](Background& b) {
    if (!*b.done) return false;
    b.thread.join();
    return true;
  });
  if (backgrounds_.size() >= kMostBackgrounds || stopping_) {
    throw Error(Code::overloaded, "too many slow requests at the same time");
  }
  Background b;
  b.done = std::make_shared<std::atomic<bool>>(false);
  b.thread = std::thread([body = std::move(body), done = b.done] {
    try {
      body();
    } catch (const std::exception& e) {
      log::warn(cat("admin API, in the background: ", std::string_view(e.what())));
    }
    *done = true;
  });
  backgrounds_.push_back(std::move(b));
}

void AdminServer::route(const char* method, const std::string& path, HttpHandler handler) {
  routes_.push_back(cat(std::string_view(method), " /admin/v1", path));
  server_->route(method, "/admin/v1" + path, std::move(handler));
}

void AdminServer::add_routes() {
  route("GET", "/version", [this](const HttpRequest&, const Reply& reply) {
    send_json(
        reply,
        {{"version", std::string(version())}, {"node", context_.settings.name}, {"role", context_.settings.role}});
  });
  route("GET", "/status", [this](const HttpRequest&, const Reply& reply) { get_status(reply); });
  route("GET", "/node", [this](const HttpRequest& request, const Reply& reply) { get_node(request, reply); });
  route("PUT", "/wanted", [this](const HttpRequest& request, const Reply& reply) { put_wanted(request, reply); });
  route("GET", "/operations", [this](const HttpRequest&, const Reply& reply) {
    if (context_.driver == nullptr) not_the_head();
    Json list = Json::array();
    for (const auto& row : context_.driver->operations().list(100)) list.push_back(operation_json(row));
    send_json(reply, {{"operations", list}});
  });
  route("GET", "/operations/{id}",
        [this](const HttpRequest& request, const Reply& reply) { get_operation(request, reply); });
  route("GET", "/operations/{id}/events", [this](const HttpRequest& request, const Reply& reply) {
    if (context_.driver == nullptr) not_the_head();
    const std::string& id = request.params.at("id");
    if (!context_.driver->operations().get(id)) throw Error(Code::not_found, cat("there is no operation '", id, "'"));
    context_.streams.follow_operation(reply, id);
  });
  route("GET", "/events", [this](const HttpRequest& request, const Reply& reply) { get_events(request, reply); });
  route("GET", "/logs", [this](const HttpRequest& request, const Reply& reply) { get_logs(request, reply); });
  route("GET", "/config", [this](const HttpRequest&, const Reply& reply) { get_config(reply); });
  route("POST", "/config/check",
        [this](const HttpRequest& request, const Reply& reply) { check_config(request, reply); });
  route("GET", "/preflight", [this](const HttpRequest& request, const Reply& reply) { get_preflight(request, reply); });
  route("POST", "/node/preflight",
        [this](const HttpRequest& request, const Reply& reply) { node_preflight(request, reply); });
  route("POST", "/node/actions",
        [this](const HttpRequest& request, const Reply& reply) { node_action(request, reply); });
  add_sync_routes();
  add_cluster_routes();
  add_files();
}

void AdminServer::get_status(const Reply& reply) {
  auto events = context_.journal.last(4 * static_cast<int>(kStatusEvents));
  std::erase_if(events, [](const state::EventRow& row) { return row.level == "debug"; });
  if (events.size() > kStatusEvents) events.erase(events.begin(), events.end() - kStatusEvents);
  if (context_.driver == nullptr) {
    send_json(reply, worker_status(context_.node.report(), events));
    return;
  }
  const DriverView view = context_.driver->view();
  const bool running = view.generation && view.generation->ended_at == 0;
  const auto drift = context_.file.drift(running ? view.generation->config_json : view.config_json,
                                         parse_settings(view.wanted.settings_json));
  auto warnings = warnings_of(view, drift, context_.database_moved_to);
  if (context_.settings.trust) {
    const auto more = trust_warnings(*context_.settings.trust, context_.settings.admin_tls, tls_now());
    warnings.insert(warnings.end(), more.begin(), more.end());
  }
  send_json(reply, head_status(view, drift, warnings, events));
}

void AdminServer::get_node(const HttpRequest& request, const Reply& reply) {
  NodeReport report = context_.node.report();
  if (context_.fence != nullptr) {
    context_.fence->contact(static_cast<uint64_t>(query_number(request, "epoch", 0, int64_t{1} << 53)));
    report.epoch = context_.fence->newest();
  } else {
    report.epoch = context_.driver->epoch();
  }
  send_json(reply, to_json(report));
}

void AdminServer::put_wanted(const HttpRequest& request, const Reply& reply) {
  if (context_.driver == nullptr) not_the_head();
  const WishAnswer answer = context_.driver->want(parse_wish(request));
  if (answer.operation.empty()) {
    send_json(reply, {{"operation", nullptr}, {"unchanged", true}});
  } else {
    send_json(reply, {{"operation", answer.operation}, {"attached", answer.attached}}, 202);
  }
}

void AdminServer::get_operation(const HttpRequest& request, const Reply& reply) {
  if (context_.driver == nullptr) not_the_head();
  const std::string& id = request.params.at("id");
  const auto row = context_.driver->operations().get(id);
  if (!row) throw Error(Code::not_found, cat("there is no operation '", id, "'"));
  Json body = operation_json(*row);
  body["actions"] = Json::array();
  for (const auto& step : context_.driver->operations().steps(id)) body["actions"].push_back(step_json(step));
  send_json(reply, body);
}

void AdminServer::get_events(const HttpRequest& request, const Reply& reply) {
  const int64_t after = query_number(request, "after", 0, int64_t{1} << 53);
  if (query_number(request, "follow", 0, 1) == 1) {
    context_.streams.follow_events(reply, after);
    return;
  }
  Json list = Json::array();
  for (const auto& row : context_.journal.after(after, 1000)) list.push_back(to_json(row));
  send_json(reply, {{"events", list}});
}

void AdminServer::get_config(const Reply& reply) {
  Json out = Json::object();
  const Config file = context_.file.config();
  const Json own = file.to_json();
  for (const auto& [key, value] : own.items()) out[key] = {{"value", value}, {"source", file.source(key)}};
  if (context_.driver != nullptr) {
    const DriverView view = context_.driver->view();
    const auto settings = parse_settings(view.wanted.settings_json);
    if (!view.wanted.config_hash.empty()) {
      const Json effective = parse_json(view.config_json);
      for (const auto& [key, value] : effective.items()) {
        const bool set = settings.contains(key);
        out[key] = {{"value", value}, {"source", set ? "--set" : file.source(key)}};
      }
    }
  }
  send_json(reply, out);
}

void AdminServer::check_config(const HttpRequest& request, const Reply& reply) {
  try {
    const Config config = Config::parse(request.body, "body");
    (void)agent_settings(config);
    if (config.text("node.role") == "head") (void)make_effective(config, {});
    send_json(reply, {{"ok", true}, {"error", nullptr}});
  } catch (const Error& e) {
    const Json error{{"code", std::string(name(e.code()))}, {"message", e.what()}, {"remedy", e.remedy()}};
    send_json(reply, {{"ok", false}, {"error", error}});
  }
}

void AdminServer::node_action(const HttpRequest& request, const Reply& reply) {
  if (context_.fence == nullptr) throw Error(Code::usage, "this node is the head; it takes no actions", "set wanted");
  const NodeCommand command = parse_command(request.body);
  const bool for_worker =
      command.kind != reconcile::ActionKind::start_api && command.kind != reconcile::ActionKind::stop_api;
  if (!for_worker) throw Error(Code::usage, "the API process runs on the head only");
  context_.fence->admit(command.epoch);
  context_.journal.note(
      "info",
      cat("the head asks for ", name(command.kind), command.rank >= 0 ? cat(" ", command.rank) : std::string(),
          command.generation > 0 ? cat(" of generation ", command.generation) : std::string()),
      {}, command.generation);
  context_.node.run(command);
  if (command.kind == reconcile::ActionKind::start_rank) context_.on_rank_config(command.config);
  send_json(reply, {{"ok", true}});
}

}  // namespace glm53::agent
