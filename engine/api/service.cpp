// Routing, and the endpoints that do not generate.
#include "engine/api/service.h"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/api/body.h"
#include "engine/api/embedded.h"
#include "engine/api/errors.h"
#include "engine/api/members.h"
#include "engine/text/chat_template.h"

namespace glm53::api {

namespace {

using Json = nlohmann::ordered_json;

/// Smaller bodies are parsed on the server's thread at once.
constexpr size_t kInlineBody = 64u << 10;
constexpr size_t kMaxIgnoredHeader = 1024;

constexpr std::array<std::string_view, 17> kRoutes = {"/v1/chat/completions",
                                                      "/v1/completions",
                                                      "/v1/messages",
                                                      "/v1/messages/count_tokens",
                                                      "/v1/responses",
                                                      "/v1/embeddings",
                                                      "/v1/models",
                                                      "/tokenize",
                                                      "/detokenize",
                                                      "/health",
                                                      "/ready",
                                                      "/ping",
                                                      "/version",
                                                      "/openapi.json",
                                                      "/metrics",
                                                      "/load",
                                                      "/v1/models/"};

void need_json(const HttpRequest& request) {
  std::string type(trim(split(std::string(request.header("content-type")), ';').front()));
  std::transform(type.begin(), type.end(), type.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (type != "application/json") {
    throw ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed");
  }
}

/// The client's X-Request-Id if it is fit for a header and an id; else a random one.
std::string request_id_of(const HttpRequest& request) {
  const std::string_view given = request.header("x-request-id");
  const bool fit =
      !given.empty() && given.size() <= 128 && std::all_of(given.begin(), given.end(), [](unsigned char c) {
        return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
      });
  return fit ? std::string(given) : random_hex(16);
}

HttpResponse json_response(std::string body, int status = 200) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body);
  return response;
}

}  // namespace

Service::Service(const Settings& settings, const text::Tokenizer& tokenizer, EngineLink& link, Metrics& metrics)
    : settings_(settings),
      tokenizer_(tokenizer),
      link_(link),
      metrics_(metrics),
      keys_(settings.keys, settings.key_file) {}

std::string_view Service::route_of(std::string_view path) {
  if (path.starts_with("/v1/models/")) return "/v1/models/{id}";
  const auto found = std::find(kRoutes.begin(), kRoutes.end(), path);
  return found == kRoutes.end() ? std::string_view("other") : *found;
}

void Service::authenticate(const HttpRequest& request) const {
  if (settings_.keys.empty() || is_open_path(request.path, settings_.metrics_open)) return;
  if (!key_of(request)) throw ApiError(401, "Unauthorized");
}

std::optional<std::string> Service::key_of(const HttpRequest& request) const {
  const auto ring = keys_.ring();
  const std::string_view own = request.header("x-api-key");
  if (!own.empty() && dialect_of(request.path) == Dialect::anthropic) {
    if (auto name = ring->check_secret(own)) return name;
  }
  return ring->check(request.header("authorization"));
}

std::shared_ptr<QuotaLease> Service::admit(const std::string& key) const {
  if (key.empty()) return nullptr;
  return quotas_->admit(key, keys_.ring()->limits(key), std::chrono::steady_clock::now());
}

void Service::install(HttpServer& server) {
  connections_ = [&server] { return server.connections(); };
  const auto get = [&server](const std::string& path, const std::function<HttpResponse(const HttpRequest&)>& answer) {
    server.route("GET", path, [answer](const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
      reply->send(answer(request));
    });
  };
  const auto post_json = [this, &server](const std::string& path, Job job) {
    server.route("POST", path, [this, job](const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
      need_json(request);
      post(request, reply, job);
    });
  };
  post_json("/v1/chat/completions", &Service::chat);
  post_json("/v1/completions", &Service::completion);
  post_json("/v1/messages", &Service::messages);
  post_json("/v1/responses", &Service::responses);
  install_unsupported(server);
  post_json("/v1/messages/count_tokens", &Service::count_tokens);
  post_json("/tokenize", &Service::tokenize);
  post_json("/detokenize", &Service::detokenize);

  get("/v1/models", [this](const HttpRequest&) { return json_response(models_body()); });
  get("/v1/models/{id}", [this](const HttpRequest& request) {
    return json_response(dump(model_card(check_model(request.params.at("id"), settings_))));
  });
  get("/health", [this](const HttpRequest&) {
    bool healthy = false;
    std::string body = health_body(healthy);
    return json_response(std::move(body), healthy ? 200 : 503);
  });
  get("/ready", [this](const HttpRequest&) {
    bool healthy = false;
    std::string body = health_body(healthy);
    return json_response(std::move(body), healthy && link_.status().gate_open ? 200 : 503);
  });
  const auto ping = [this](const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
    bool healthy = false;
    health_body(healthy);
    reply->send(json_response("", healthy ? 200 : 503));
  };
  server.route("GET", "/ping", ping);
  server.route("POST", "/ping", ping);
  get("/version", [this](const HttpRequest&) { return json_response(dump({{"version", settings_.process.version}})); });
  get("/load", [this](const HttpRequest&) {
    return json_response(dump({{"server_load", link_.status().unfinished}}));
  });
  get("/openapi.json", [](const HttpRequest&) { return json_response(std::string(embedded::openapi_json())); });
  get("/metrics", [this](const HttpRequest&) {
    HttpResponse response = json_response(metrics_.text(link_.status(), connections_()));
    response.content_type = "text/plain; version=0.0.4; charset=utf-8";
    return response;
  });
}

void Service::install_unsupported(HttpServer& server) const {
  const auto refuse = [&server](const char* method, const char* path, int status, const char* what) {
    server.route(method, path, [status, what](const HttpRequest&, const std::shared_ptr<HttpReply>& reply) {
      HttpResponse response = error_response(status, what);
      response.headers.emplace_back("x-should-retry", "false");  // the official clients try 5xx again otherwise
      reply->send(std::move(response));
    });
  };
  for (const char* path : {"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/moderations"}) {
    refuse("POST", path, 501, "not supported: this server generates text; it serves no embedding or scoring model");
  }
  for (const char* path : {"/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech",
                           "/v1/images/generations", "/v1/images/edits", "/v1/images/variations", "/v1/videos"}) {
    refuse("POST", path, 501, "not supported: this server reads and writes text only");
  }
  for (const char* path : {"/v1/files", "/v1/batches", "/v1/fine_tuning/jobs", "/v1/assistants", "/v1/threads",
                           "/v1/vector_stores", "/v1/conversations", "/v1/uploads"}) {
    refuse("POST", path, 501, "not supported: this server keeps nothing between requests");
    refuse("GET", path, 501, "not supported: this server keeps nothing between requests");
  }
  for (const char* method : {"GET", "DELETE"}) {
    refuse(method, "/v1/responses/{id}", 404, "responses are not kept; send the conversation as `input`");
  }
  refuse("POST", "/v1/responses/{id}/cancel", 404, "responses are not kept; close the connection to cancel one");
}

void Service::post(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply, Job job) {
  Incoming in;
  in.request_id = request_id_of(request);
  if (!settings_.keys.empty()) in.key = key_of(request).value_or("");
  in.encoding = request.header("content-encoding");
  in.dialect = dialect_of(request.path);
  in.body = request.body;
  if (in.body.size() <= kInlineBody && in.encoding.empty()) {
    run(in, reply, job);
  } else {
    workers_.post([this, in = std::make_shared<Incoming>(std::move(in)), reply, job] { run(*in, reply, job); });
  }
}

void Service::run(Incoming& in, const std::shared_ptr<HttpReply>& reply, Job job) noexcept {
  try {
    try {
      in.body = decode_body(std::move(in.body), in.encoding, settings_.max_body);
      (this->*job)(in, reply);
    } catch (const std::exception& e) {
      HttpResponse response = error_response(e, in.dialect);
      response.headers.emplace_back("X-Request-Id", in.request_id);
      reply->send(std::move(response));
    }
  } catch (const std::exception& e) {
    log::error(cat("a request could not be answered: ", std::string_view(e.what())));
  }
}

std::vector<std::pair<std::string, std::string>> Service::answer_headers(
    const std::string& request_id, const std::vector<std::string>& ignored) const {
  std::vector<std::pair<std::string, std::string>> headers = {{"X-Request-Id", request_id}};
  std::string names;
  for (const std::string& name : ignored) {
    std::string shown = name.substr(0, 64);
    for (char& c : shown) {
      if (c <= ' ' || c >= 0x7F || c == ',') c = '?';  // names are the client's: nothing of them may end the header
    }
    if (names.size() + shown.size() + 2 > kMaxIgnoredHeader) {
      names += ", ...";
      break;
    }
    names += (names.empty() ? "" : ", ") + shown;
  }
  if (!names.empty()) headers.emplace_back("x-glm53-ignored", names);
  return headers;
}

std::string Service::health_body(bool& healthy) const {
  const EngineStatus s = link_.status();
  const bool stalled = s.progress_age_ms > static_cast<uint64_t>(settings_.stall_limit.count());
  std::string_view state = "ok";
  if (!s.was_connected) {
    state = "loading";
  } else if (!s.connected) {
    state = "rank lost";
  } else if (!s.stats.peers_alive) {
    state = "peer lost";
  } else if (stalled) {
    state = "stalled";
  } else if (s.draining) {
    state = "draining";
  }
  healthy = state == "ok";
  return dump({{"status", state},
               {"ready", healthy && s.gate_open},
               {"model", settings_.model_names.front()},
               {"generation", s.generation},
               {"progress_age_ms", s.progress_age_ms},
               {"peers", {{"rank0", s.connected}, {"others", s.connected && s.stats.peers_alive}}},
               {"step", s.stats.step},
               {"running", s.connected ? s.stats.running : 0},
               {"waiting", s.waiting},
               {"unfinished", s.unfinished}});
}

Json Service::model_card(const std::string& name) const {
  Json permission = {{"id", "modelperm-" + name},
                     {"object", "model_permission"},
                     {"created", settings_.created},
                     {"allow_create_engine", false},
                     {"allow_sampling", true},
                     {"allow_logprobs", true},
                     {"allow_search_indices", false},
                     {"allow_view", true},
                     {"allow_fine_tuning", false},
                     {"organization", "*"},
                     {"group", nullptr},
                     {"is_blocking", false}};
  Json card = {{"id", name},
               {"object", "model"},
               {"created", settings_.created},
               {"owned_by", "glm53"},
               {"root", settings_.model_dir},
               {"parent", nullptr},
               {"max_model_len", context().max_context}};
  card["permission"] = Json::array({std::move(permission)});
  return card;
}

std::string Service::models_body() const {
  Json list = Json::array();
  for (const std::string& name : settings_.model_names) list.push_back(model_card(name));
  return dump({{"object", "list"}, {"data", std::move(list)}});
}

void Service::tokenize(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  const RequestContext c = context();
  const Json body = parse_json(in.body, {.keep_big_integers = true});
  const Members members(body);
  check_model(members.get("model"), settings_);
  members.boolean("add_special_tokens", true);
  const bool strings = members.boolean("return_token_strs", false);
  std::vector<int32_t> ids;
  if (members.given("messages")) {
    ids = conversation_ids(members, c);
  } else if (const auto prompt = members.text("prompt")) {
    ids = tokenizer_.encode(*prompt);
  } else {
    Members::refuse("prompt", "either `prompt` or `messages` is needed");
  }
  Json texts;
  if (strings) {
    texts = Json::array();
    for (const int32_t id : ids) texts.push_back(token_text(tokenizer_, id, false));
  }
  HttpResponse response = json_response(dump({{"count", ids.size()},
                                              {"max_model_len", c.max_context},
                                              {"tokens", std::move(ids)},
                                              {"token_strs", std::move(texts)}}));
  response.headers = answer_headers(in.request_id, {});
  reply->send(std::move(response));
}

void Service::detokenize(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  const Json body = parse_json(in.body);
  const Members members(body);
  check_model(members.get("model"), settings_);
  if (!members.given("tokens")) Members::refuse("tokens", "is missing");
  const auto ids = members.ids("tokens", [this](int32_t id) { return tokenizer_.has_text(id); });
  HttpResponse response = json_response(dump({{"prompt", tokenizer_.decode(ids)}}));
  response.headers = answer_headers(in.request_id, {});
  reply->send(std::move(response));
}

void Service::admin(const std::string& name, const Json& command, const AdminReply& reply) {
  if (name == "gate_open" || name == "gate_close") {
    link_.set_gate(name == "gate_open");
    log::info(name == "gate_open" ? "the gate is open" : "the gate is closed");
    reply({{"ok", true}});
  } else if (name == "drain") {
    link_.drain();
    log::info("draining");
    reply({{"ok", true}});
  } else if (name == "counters") {
    const EngineStatus s = link_.status();
    reply({{"ok", true},
           {"connections", connections_ ? connections_() : 0},
           {"requests", s.unfinished},
           {"running", s.connected ? s.stats.running : 0},
           {"waiting", s.waiting},
           {"connected", s.connected},
           {"generation", s.generation},
           {"model_digest", s.hello.model_digest},
           {"gate_open", s.gate_open},
           {"draining", s.draining},
           {"tokens", metrics_.generated_tokens()},
           {"prompt_tokens", metrics_.prompt_tokens()}});
  } else if (name == "canary") {
    canary(command, reply);
  } else {
    throw Error(Code::usage, cat("unknown command `", name, "`"),
                "known are gate_open, gate_close, drain, counters, canary");
  }
}

}  // namespace glm53::api
