// Answers that go on: events of an operation, the event ring, logs. One thread serves them all.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "agent/api/journal.h"
#include "agent/api/report.h"
#include "agent/supervise/log_file.h"
#include "common/http_server.h"

namespace glm53::agent {

/// Thread-safe.
class Streams {
 public:
  using Reports = std::function<std::vector<NodeReport>()>;
  /// `reports`: the nodes now, for progress.
  Streams(Journal& journal, Reports reports);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  /// Ends the thread and all streams.
  void stop();
  /// Something was recorded. Never blocks.
  void notify();
  /// Server-sent events of an operation from its start until `done`. Progress of processes is mixed in.
  void follow_operation(std::shared_ptr<HttpReply> reply, const std::string& operation);
  /// Server-sent events of the ring above `after`, without end.
  void follow_events(std::shared_ptr<HttpReply> reply, int64_t after);
  /// Events above `after` as lines of text, without end.
  void follow_lines(std::shared_ptr<HttpReply> reply, int64_t after,
                    std::function<std::string(const state::EventRow&)> line);
  /// Lines of a log as they come.
  void follow_log(std::shared_ptr<HttpReply> reply, supervise::LogReader reader);

 private:
  struct EventStream {
    std::shared_ptr<HttpReply> reply;
    std::string operation;
    int64_t last = 0;
    std::map<std::string, std::string> progress;  ///< by process: what was sent last
    std::chrono::steady_clock::time_point spoke{};
    bool finished = false;
    std::function<std::string(const state::EventRow&)> line;  ///< set: lines instead of server-sent events
  };
  struct LogStream {
    std::shared_ptr<HttpReply> reply;
    supervise::LogReader reader;
  };

  void run();
  void add(EventStream stream);
  void pump(EventStream& stream, const std::vector<NodeReport>& reports);
  void send_download(EventStream& stream, const NodeReport& node);
  void send_progress(EventStream& stream, const std::vector<NodeReport>& reports);
  void serve();

  Journal& journal_;
  Reports reports_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool news_ = false, stopping_ = false;   // guarded by mutex_
  std::vector<EventStream> fresh_events_;  // guarded by mutex_
  std::vector<LogStream> fresh_logs_;      // guarded by mutex_
  std::vector<EventStream> events_;        // only the thread
  std::vector<LogStream> logs_;            // only the thread
  std::thread thread_;
};

/// One server-sent event.
std::string sse(std::string_view event, std::string_view data);
/// Every line through the filter for secrets.
std::string redact_lines(const std::string& text);
nlohmann::ordered_json to_json(const state::EventRow& row);

}  // namespace glm53::agent
