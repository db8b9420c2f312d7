// The admin REST API (docs/admin-api.md).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "agent/api/config_file.h"
#include "agent/api/driver.h"
#include "agent/api/fence.h"
#include "agent/api/journal.h"
#include "agent/api/local_node.h"
#include "agent/api/streams.h"
#include "agent/api/sync_service.h"
#include "common/http_server.h"

namespace glm53::agent {

/// What the routes work on. `driver` is null on a worker, `fence` on a head.
struct AdminContext {
  const AgentSettings& settings;
  ConfigFile& file;
  LocalNode& node;
  Journal& journal;
  Streams& streams;
  Driver* driver = nullptr;
  Fence* fence = nullptr;
  SyncService* sync = nullptr;  ///< null on a head
  std::string database_moved_to;
  /// A worker was given a rank's configuration (its limits apply from now on).
  std::function<void(const std::string& config_json)> on_rank_config = [](const std::string&) {};
};

class AdminServer {
 public:
  explicit AdminServer(AdminContext context);
  ~AdminServer();
  /// Throws Error(busy) when an address is in use.
  void listen();
  /// Port of the TCP address; 0 without one.
  uint16_t port() const { return port_; }
  /// "GET /admin/v1/status" and so on.
  const std::vector<std::string>& routes() const { return routes_; }
  void start();
  void stop();

 private:
  using Reply = std::shared_ptr<HttpReply>;
  void add_routes();
  void add_sync_routes();
  void add_cluster_routes();
  void add_files();
  void join_head(const HttpRequest& request, const Reply& reply);
  void route(const char* method, const std::string& path, HttpHandler handler);
  void put_wanted(const HttpRequest& request, const Reply& reply);
  void get_operation(const HttpRequest& request, const Reply& reply);
  void get_events(const HttpRequest& request, const Reply& reply);
  void get_logs(const HttpRequest& request, const Reply& reply);
  void agent_log(int lines, bool follow, const Reply& reply);
  void worker_log(const HttpRequest& request, const Reply& reply);
  void get_config(const Reply& reply);
  void check_config(const HttpRequest& request, const Reply& reply);
  void node_action(const HttpRequest& request, const Reply& reply);
  void get_node(const HttpRequest& request, const Reply& reply);
  void get_status(const Reply& reply);
  void get_preflight(const HttpRequest& request, const Reply& reply);
  void node_preflight(const HttpRequest& request, const Reply& reply);
  /// Runs what may take seconds on a thread of its own; stop() waits for it. Throws Error(overloaded).
  void in_background(std::function<void()> body);
  bool is_remote(const std::string& node, const std::string& process);

  struct Background {
    std::shared_ptr<std::atomic<bool>> done;
    std::thread thread;
  };
  AdminContext context_;
  std::unique_ptr<HttpServer> server_;
  uint16_t port_ = 0;
  std::vector<std::string> routes_;
  bool bound_ = false;  ///< the socket file is ours
  std::atomic<bool> stopping_{false};
  std::mutex backgrounds_mutex_;
  std::vector<Background> backgrounds_;  // guarded by backgrounds_mutex_
};

/// {"error":{"code","message","remedy"}} with the status of the code.
HttpResponse error_response(const std::exception& error);

}  // namespace glm53::agent
