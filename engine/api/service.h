// The endpoints.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "common/http_server.h"
#include "engine/api/admin_socket.h"
#include "engine/api/engine_link.h"
#include "engine/api/errors.h"
#include "engine/api/generation.h"
#include "engine/api/metrics.h"
#include "engine/api/request.h"
#include "engine/api/settings.h"
#include "engine/api/workers.h"
#include "engine/text/tokenizer.h"

namespace glm53::api {

/// Everything must outlive the HTTP server it is installed in.
class Service {
 public:
  Service(const Settings& settings, const text::Tokenizer& tokenizer, EngineLink& link, Metrics& metrics);

  void install(HttpServer& server);
  /// Throws ApiError(401) unless the request carries a key where one is needed.
  void authenticate(const HttpRequest& request) const;
  /// Commands of the admin socket.
  void admin(const std::string& name, const nlohmann::ordered_json& command, const AdminReply& reply);
  /// Comments on silent streams, new keys; call about once a second.
  void keep_alive();
  /// Path as a metrics label: a known route or "other".
  static std::string_view route_of(std::string_view path);

 private:
  struct Incoming {
    std::string body, request_id;
    std::string key;  ///< name of the client's key; "" = none is needed
    std::string encoding;
    Dialect dialect = Dialect::openai;
  };
  using Job = void (Service::*)(const Incoming&, const std::shared_ptr<HttpReply>&);

  std::shared_ptr<QuotaLease> admit(const std::string& key) const;
  void post(const HttpRequest& request, const std::shared_ptr<HttpReply>& reply, Job job);
  void run(Incoming& in, const std::shared_ptr<HttpReply>& reply, Job job) noexcept;
  void chat(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void messages(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void responses(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void install_unsupported(HttpServer& server) const;
  void count_tokens(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void run_chat(ChatRequest request, const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  std::optional<std::string> key_of(const HttpRequest& request) const;
  void completion(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void tokenize(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void detokenize(const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void start(const GenerationRequest& request, const ChatRequest* chat,
             const std::vector<std::vector<int32_t>>& prompts, std::vector<std::string> echo,
             const std::vector<text::OutputStart>& starts, const Incoming& in, const std::shared_ptr<HttpReply>& reply);
  void answer_echo(const GenerationRequest& request, ResponseFormat& format, const GenerationOptions& options,
                   const std::shared_ptr<HttpReply>& reply) const;
  std::vector<wire::Submit> submits(const GenerationRequest& request, const ChatRequest* chat,
                                    const std::vector<std::vector<int32_t>>& prompts,
                                    const std::vector<text::OutputStart>& starts, uint64_t first_id,
                                    const std::string& key) const;
  void canary(const nlohmann::ordered_json& command, const AdminReply& reply);
  RequestContext context() const;
  std::string health_body(bool& healthy) const;
  std::string models_body() const;
  nlohmann::ordered_json model_card(const std::string& name) const;
  std::vector<std::pair<std::string, std::string>> answer_headers(const std::string& request_id,
                                                                  const std::vector<std::string>& ignored) const;

  const Settings& settings_;
  const text::Tokenizer& tokenizer_;
  EngineLink& link_;
  Metrics& metrics_;
  KeyStore keys_;
  const std::shared_ptr<QuotaBook> quotas_ = std::make_shared<QuotaBook>();
  std::function<size_t()> connections_;
  std::mutex streams_mutex_;
  std::vector<std::weak_ptr<Generation>> streams_;
  Workers workers_{2};
};

}  // namespace glm53::api
