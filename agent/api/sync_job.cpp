#include "agent/api/sync_job.h"

#include <chrono>
#include <thread>

#include <nlohmann/json.hpp>

#include "agent/api/report.h"
#include "agent/api/settings.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr milliseconds kConnect{3000}, kRead{60'000}, kPoll{100};
constexpr JsonLimits kLimits{.max_bytes = size_t{64} << 20, .max_depth = 8};

std::string text(const Json& j, const char* key) {
  const auto it = j.is_object() ? j.find(key) : j.end();
  return j.is_object() && it != j.end() && it->is_string() ? it->get<std::string>() : std::string();
}

[[noreturn]] void rethrow(const Json& error, int status) {
  const std::string message = text(error, "message");
  throw Error(parse_code(text(error, "code")),
              message.empty() ? cat("the worker answered with HTTP status ", status) : cat("worker: ", message),
              text(error, "remedy"));
}

sync::Range parse_range(const Json& j) {
  const bool good = j.is_array() && j.size() == 3 && j[0].is_string() && j[1].is_number_integer() &&
                    j[2].is_number_integer() && j[1] >= 0 && j[2] >= 0;
  if (!good) throw Error(Code::corrupt, "sync: the worker's list of what is missing has a wrong entry");
  return {j[0].get<std::string>(), j[1].get<int64_t>(), j[2].get<int64_t>()};
}

class HttpPeer final : public sync::Peer {
 public:
  HttpPeer(const WorkerAddress& worker, uint64_t epoch) : client_(worker.connect()), epoch_(epoch) {
    client_.set_timeout(kConnect, kRead);
  }
  sync::Have open(const sync::Manifest& manifest) override {
    ask("POST", cat("/admin/v1/node/sync?epoch=", epoch_), to_json(manifest));
    while (true) {
      const Json state = ask("GET", "/admin/v1/node/sync", {});
      const std::string phase = text(state, "state");
      if (phase == "failed") rethrow(state.value("error", Json::object()), 200);
      if (phase == "ready") return have_of(state);
      if (phase != "planning") throw Error(Code::not_found, "sync: the worker's agent was started again");
      std::this_thread::sleep_for(kPoll);
    }
  }
  void send(const std::string& etag, int64_t offset, std::string_view data, uint64_t checksum) override {
    if (session_.empty()) session_ = text(ask("GET", "/admin/v1/node/sync", {}), "session");
    std::string hex;
    for (int shift = 60; shift >= 0; shift -= 4) hex += "0123456789abcdef"[checksum >> shift & 15];
    ask("PUT", cat("/admin/v1/node/sync/data?session=", session_, "&blob=", etag, "&offset=", offset, "&xxh64=", hex),
        data, "application/octet-stream");
  }
  void commit(const std::string& digest) override {
    ask("POST", "/admin/v1/node/sync/commit", dump({{"session", session_}, {"digest", digest}}));
  }

 private:
  Json ask(const char* method, const std::string& path, std::string_view body, const char* type = "application/json") {
    const HttpAnswer answer = client_.request(method, path, body, type);
    Json json;
    try {
      json = parse_json(answer.body, kLimits);
    } catch (const Error& e) {
      if (answer.status < 300) throw Error(Code::corrupt, cat("sync: the worker's answer is no JSON: ", e.what()));
    }
    if (answer.status >= 300) rethrow(json.is_object() ? json.value("error", Json::object()) : Json(), answer.status);
    return json;
  }
  sync::Have have_of(const Json& state) {
    session_ = text(state, "session");
    sync::Have have;
    have.digest = text(state, "digest");
    const Json inner = state.value("have", Json::object());
    have.bytes_total = inner.value("bytes_total", int64_t{0});
    have.bytes_done = inner.value("bytes_done", int64_t{0});
    for (const Json& r : inner.value("missing", Json::array())) have.missing.push_back(parse_range(r));
    return have;
  }

  HttpClient client_;
  const uint64_t epoch_;
  std::string session_;
};

}  // namespace

std::unique_ptr<sync::Peer> worker_peer(const WorkerAddress& worker, uint64_t epoch) {
  return std::make_unique<HttpPeer>(worker, epoch);
}

void SyncJob::start(Order order) {
  const std::string request = order.request;
  job_.start(request, [this, order = std::move(order)] {
    for (const HubModel& model : order.models) copy(order, model);
  });
}

void SyncJob::copy(const Order& order, const HubModel& model) {
  const sync::Manifest manifest = sync::manifest_of(hub::Cache(order.cache), model.repo, model.commit);
  sync::SenderSettings settings;
  settings.cache = order.cache;
  settings.journal_dir = order.journal_dir;
  settings.streams = order.streams;
  settings.limit_rate = order.limit_rate;
  const auto sender = std::make_shared<sync::Sender>(
      settings, [worker = order.worker, epoch = order.epoch] { return worker_peer(worker, epoch); });
  job_.begin(model.repo, [sender] { sender->cancel(); });
  const auto begin = std::chrono::steady_clock::now();
  const sync::SendResult result = sender->run(
      manifest,
      [&](const sync::SendProgress& p) {
        const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        const auto rate = s > 0 ? static_cast<int64_t>(static_cast<double>(p.bytes_sent) / s) : 0;
        job_.progress(p.bytes_done, p.bytes_total, rate, rate > 0 ? (p.bytes_total - p.bytes_done) / rate : -1);
      },
      on_event_);
  on_event_(cat(model.repo, "@", model.commit.substr(0, 12), ": the worker has all ", human_bytes(result.bytes), ", ",
                human_bytes(result.bytes_sent), " were copied"));
}

}  // namespace glm53::agent
