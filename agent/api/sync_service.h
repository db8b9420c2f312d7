// The receiving end of copies on a node, as the admin API offers it to the
// head's agent.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "agent/api/config_file.h"
#include "agent/api/settings.h"
#include "common/http_server.h"

namespace glm53::sync {
class Receiver;
}

namespace glm53::agent {

/// One copy at a time; a new one takes the place of the one before, whose
/// pieces are kept. Thread-safe.
class SyncService {
 public:
  SyncService(const AgentSettings& settings, const ConfigFile& file);
  ~SyncService();
  SyncService(const SyncService&) = delete;
  SyncService& operator=(const SyncService&) = delete;

  /// POST /node/sync: begins a copy. Looks at what is there in the background:
  /// state() tells.
  void open(const std::string& manifest_json);
  /// GET /node/sync:
  /// {"session","digest","state":"none|planning|ready|failed","have":{…}|null,"error":{…}|null}.
  nlohmann::ordered_json state() const;
  /// PUT /node/sync/data: one piece; answered when it is written.
  void data(const HttpRequest& request, std::shared_ptr<HttpReply> reply);
  /// POST /node/sync/commit: {"session","digest"}. Error(busy) when something
  /// is missing.
  void commit(const std::string& body);
  void stop();

 private:
  struct Session;
  struct Task {
    std::function<void()> run;
  };
  std::shared_ptr<Session> session(const std::string& id) const;
  void plan(const std::shared_ptr<Session>& session);
  void work();

  const AgentSettings& settings_;
  const ConfigFile& file_;
  mutable std::mutex mutex_;  // guards the next five
  std::shared_ptr<Session> session_;
  std::thread planner_;
  std::deque<Task> tasks_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::vector<std::thread> pool_;
};

}  // namespace glm53::agent
