#include "agent/api/sync_service.h"

#include <charconv>

#include <nlohmann/json.hpp>

#include "agent/api/admin_server.h"
#include "agent/sync/receiver.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
constexpr size_t kThreads = 4, kMostTasks = 64;

const std::string& query(const HttpRequest& request, const char* key) {
  const auto it = request.query.find(key);
  if (it == request.query.end() || it->second.empty())
    throw Error(Code::usage, cat("query ", std::string_view(key), " is missing"));
  return it->second;
}

uint64_t number(const HttpRequest& request, const char* key, int base) {
  const std::string& text = query(request, key);
  uint64_t n = 0;
  const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), n, base);
  if (ec != std::errc() || end != text.data() + text.size())
    throw Error(Code::usage, cat("query ", std::string_view(key), "=", text, " is no number"));
  return n;
}

Json have_json(const sync::Have& have) {
  Json missing = Json::array();
  for (const sync::Range& r : have.missing) missing.push_back({r.etag, r.offset, r.length});
  return {{"bytes_total", have.bytes_total}, {"bytes_done", have.bytes_done}, {"missing", missing}};
}

}  // namespace

struct SyncService::Session {
  std::string id = random_hex(16);
  std::unique_ptr<sync::Receiver> receiver;
  std::atomic<bool> replaced{false};
  std::mutex mutex;  // guards the rest
  std::string state = "planning";
  sync::Have have;
  std::string error_code, error, remedy;
};

SyncService::SyncService(const AgentSettings& settings, const ConfigFile& file) : settings_(settings), file_(file) {
  for (size_t i = 0; i < kThreads; ++i) pool_.emplace_back([this] { work(); });
}

SyncService::~SyncService() {
  stop();
}

void SyncService::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (session_) session_->replaced = true;
  }
  wake_.notify_all();
  for (std::thread& t : pool_) t.join();
  pool_.clear();
  if (planner_.joinable()) planner_.join();
}

void SyncService::open(const std::string& manifest_json) {
  sync::Manifest manifest = sync::parse_manifest(manifest_json);
  const Config config = file_.config();
  sync::ReceiverSettings to;
  to.cache = settings_.hub_cache;
  to.journal_dir = settings_.state_dir + "/hub";
  to.segment_bytes = config.integer("hub.segment_bytes");
  to.disk_reserve = config.integer("hub.disk_reserve");
  to.keep_bad = config.boolean("hub.keep_bad");
  const std::lock_guard lock(mutex_);
  if (stopping_) throw Error(Code::unavailable, "the agent ends");
  if (session_) session_->replaced = true;
  if (planner_.joinable()) planner_.join();  // it sees that it was replaced, and ends
  session_.reset();                          // its partial files are closed before they are opened again
  const auto fresh = std::make_shared<Session>();
  fresh->receiver = std::make_unique<sync::Receiver>(std::move(to), std::move(manifest));
  session_ = fresh;
  planner_ = std::thread([this, fresh] { plan(fresh); });
}

void SyncService::plan(const std::shared_ptr<Session>& session) {
  try {
    sync::Have have = session->receiver->have([&] {
      if (session->replaced) throw Error(Code::cancelled, "sync: another copy took its place");
    });
    const std::lock_guard lock(session->mutex);
    session->have = std::move(have);
    session->state = "ready";
  } catch (const std::exception& e) {
    const auto* known = dynamic_cast<const Error*>(&e);
    const std::lock_guard lock(session->mutex);
    session->state = "failed";
    session->error_code = name(known == nullptr ? Code::internal : known->code());
    session->error = log::redact(e.what());
    session->remedy = known == nullptr ? "" : known->remedy();
  }
}

std::shared_ptr<SyncService::Session> SyncService::session(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  if (!session_ || session_->id != id) {
    throw Error(Code::not_found, "sync: this copy is not under way any more", "begin it again: what came is kept");
  }
  return session_;
}

Json SyncService::state() const {
  std::shared_ptr<Session> s;
  {
    const std::lock_guard lock(mutex_);
    s = session_;
  }
  if (!s) return {{"session", nullptr}, {"digest", nullptr}, {"state", "none"}, {"have", nullptr}, {"error", nullptr}};
  const std::lock_guard lock(s->mutex);
  const bool failed = s->state == "failed";
  const Json error =
      failed ? Json{{"code", s->error_code}, {"message", s->error}, {"remedy", s->remedy}} : Json(nullptr);
  return {{"session", s->id},
          {"digest", s->receiver->digest()},
          {"state", s->state},
          {"have", s->state == "ready" ? have_json(s->have) : Json(nullptr)},
          {"error", error}};
}

void SyncService::data(const HttpRequest& request, std::shared_ptr<HttpReply> reply) {
  const auto s = session(query(request, "session"));
  const std::string blob = query(request, "blob");
  const uint64_t offset = number(request, "offset", 10), checksum = number(request, "xxh64", 16);
  if (offset > uint64_t{INT64_MAX}) throw Error(Code::usage, "query offset is out of bounds");
  {
    const std::lock_guard lock(s->mutex);
    if (s->state != "ready") throw Error(Code::busy, "sync: the receiver still looks at what it has");
  }
  // The body lives as long as this call; disks may take longer than a server
  // thread should wait.
  Task task{[s, blob, offset, checksum, body = request.body, reply = std::move(reply)] {
    HttpResponse response;
    try {
      s->receiver->take(blob, static_cast<int64_t>(offset), body, checksum);
      response.body = R"({"ok":true})";
    } catch (const std::exception& e) {
      response = error_response(e);
    }
    reply->send(std::move(response));
  }};
  {
    const std::lock_guard lock(mutex_);
    if (stopping_ || tasks_.size() >= kMostTasks) throw Error(Code::overloaded, "sync: too many pieces at once");
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void SyncService::work() {
  while (true) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stopping_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    try {
      task.run();
    } catch (const std::exception& e) {
      log::warn(cat("sync: ", std::string_view(e.what())));
    }
  }
}

void SyncService::commit(const std::string& body) {
  const Json j = parse_json(body, {.max_bytes = 4096, .max_depth = 2});
  const auto text = [&](const char* key) {
    const auto it = j.is_object() ? j.find(key) : j.end();
    if (!j.is_object() || it == j.end() || !it->is_string())
      throw Error(Code::usage, cat("member '", std::string_view(key), "' is missing"));
    return it->get<std::string>();
  };
  const auto s = session(text("session"));
  if (s->receiver->digest() != text("digest")) throw Error(Code::busy, "sync: another copy is under way");
  s->receiver->commit();
}

}  // namespace glm53::agent
