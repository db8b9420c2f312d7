#include "engine/api/api_server.h"

#include "common/error.h"
#include "common/http_server.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/api/admin_socket.h"
#include "engine/api/engine_link.h"
#include "engine/api/errors.h"
#include "engine/api/metrics.h"
#include "engine/api/page.h"
#include "engine/api/service.h"
#include "engine/text/self_check.h"
#include "engine/text/tokenizer.h"

namespace glm53::api {

namespace {

text::Tokenizer load_tokenizer(const Settings& settings) {
  text::Tokenizer tokenizer = text::Tokenizer::load(settings.model_dir + "/tokenizer.json");
  text::self_check(tokenizer, settings.model_rows, settings.eos);
  return tokenizer;
}

HttpServerOptions server_options(const Settings& settings, Metrics& metrics) {
  HttpServerOptions options;
  options.threads = 2;
  options.max_body = settings.max_body;
  options.max_connections = settings.max_connections;
  options.on_error = [](const HttpRequest& request, const std::exception& e) {
    return error_response(e, dialect_of(request.path));
  };
  options.on_done = [&metrics](const HttpRequest& request, int status, std::chrono::microseconds took) {
    static constexpr std::string_view kMethods[] = {"GET", "POST", "HEAD", "OPTIONS"};
    std::string_view method = "other";
    for (const std::string_view known : kMethods) {
      if (request.method == known) method = known;
    }
    metrics.http(Service::route_of(request.path), method, status, took);
  };
  return options;
}

}  // namespace

struct ApiServer::Impl {
  Impl(const ApiConfig& config, std::function<void()> tick)
      : settings(load_settings(config)),
        tokenizer(load_tokenizer(settings)),
        metrics(settings.model_names.front(), settings.max_context),
        link(config.rank_socket, {settings.max_queue, settings.max_queue_tokens}),
        service(settings, tokenizer, link, metrics),
        server(server_options(settings, metrics)) {
    for (std::string& secret : settings.keys.secrets()) log::add_secret(std::move(secret));
    server.before([this](const HttpRequest& request) {
      if (!settings.page || !is_page(request)) service.authenticate(request);
    });
    service.install(server);
    if (settings.page) install_page(server);
    try {
      port = server.listen_tcp(config.bind, config.port);
    } catch (const Error& e) {
      // Trying again would not free the port: somebody has to act.
      throw Error(Code::config, e.what(), "end the program that has it, or set api.port");
    }
    server.every(std::chrono::seconds(1), [this, tick = std::move(tick)] {
      service.keep_alive();
      if (tick) tick();
    });
    server.start();
    admin.emplace(config.admin_socket, [this](const std::string& name, const nlohmann::ordered_json& command,
                                              const AdminReply& reply) { service.admin(name, command, reply); });
  }

  void stop(std::chrono::milliseconds grace) {
    admin.reset();
    server.stop(grace);
    link.stop();
  }

  const Settings settings;
  const text::Tokenizer tokenizer;
  Metrics metrics;
  EngineLink link;
  Service service;
  HttpServer server;
  std::optional<AdminSocket> admin;
  uint16_t port = 0;
};

ApiServer::ApiServer(const ApiConfig& config, std::function<void()> tick)
    : impl_(std::make_unique<Impl>(config, std::move(tick))) {
  log::info(cat("serving ", impl_->settings.model_names.front(), " on ", config.bind, ":", impl_->port));
}

ApiServer::~ApiServer() {
  stop(std::chrono::milliseconds(0));
}

uint16_t ApiServer::port() const {
  return impl_->port;
}

void ApiServer::drain() {
  impl_->link.drain();
}

size_t ApiServer::unfinished() const {
  return impl_->link.status().unfinished;
}

void ApiServer::stop(std::chrono::milliseconds grace) {
  impl_->stop(grace);
}

}  // namespace glm53::api
