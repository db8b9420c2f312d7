// What ran: processes, generations of ranks, events.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "agent/state/database.h"

namespace glm53::state {

/// A process this agent started: enough to find it again after the agent's own end.
struct ProcessRow {
  std::string name;         ///< "rank0", "api"
  uint64_t generation = 0;  ///< of the API process: how often it was started
  std::string boot_id;
  int64_t pid = 0;
  uint64_t start_ticks = 0;
  std::string admin_socket, config_hash, phase;
  bool ready = false, stop_requested = false;
  TimeMs started_at = 0, ended_at = 0;  ///< ended_at 0: not known to have ended
  std::optional<int> exit_code;         ///< empty when nobody could collect it
  int exit_signal = 0;
  std::string last_error;
};
class Processes {
 public:
  explicit Processes(Database& db) : db_(db) {}
  void save(const ProcessRow& row);
  /// Those not known to have ended, and the newest of every name. Forgets what ended over 30 days ago.
  std::vector<ProcessRow> current();
  uint64_t last_generation(const std::string& name);
  /// How many of that name were started since `since`.
  int64_t started_since(const std::string& name, TimeMs since);

 private:
  Database& db_;
};

/// A set of ranks that started together.
struct GenerationRow {
  uint64_t n = 0;
  std::string config_json, config_hash;
  bool automatic = false;                                                       ///< a restart nobody asked for
  TimeMs started_at = 0, ready_at = 0, up_at = 0, ending_at = 0, ended_at = 0;  ///< 0: not yet
  std::string cause;                                                            ///< reconcile::Cause by name
  int exit_code = 0;
  std::string end_reason;
};
class Generations {
 public:
  explicit Generations(Database& db) : db_(db) {}
  /// Does nothing when it exists.
  void begin(const GenerationRow& row);
  void mark_ready(uint64_t n, TimeMs now);
  void mark_up(uint64_t n, TimeMs now);
  /// The first reason stays.
  void mark_ending(uint64_t n, const std::string& cause, int exit_code, const std::string& reason, TimeMs now);
  /// The final reason: what the ranks' ends say when all are known.
  void mark_ended(uint64_t n, const std::string& cause, int exit_code, const std::string& reason, TimeMs now);
  /// Automatic ones started since `since`.
  int64_t automatic_since(TimeMs since);
  std::optional<GenerationRow> last();
  /// Newest last.
  std::vector<GenerationRow> recent(int limit);

 private:
  Database& db_;
};

struct EventRow {
  int64_t id = 0;
  TimeMs at = 0;
  std::string level;      ///< info, warn, error
  std::string kind;       ///< action, progress, log, done
  std::string operation;  ///< "op-7" or empty
  uint64_t generation = 0;
  std::string text, data_json = "{}";
};
/// A ring: at most `max_rows` rows and `max_age` old.
class Events {
 public:
  static constexpr int64_t kMaxRows = 50000;
  static constexpr TimeMs kMaxAge = TimeMs{30} * 24 * 3600 * 1000;
  explicit Events(Database& db, int64_t max_rows = kMaxRows, TimeMs max_age = kMaxAge)
      : db_(db), max_rows_(max_rows), max_age_(max_age) {}
  /// Returns its id.
  int64_t add(const EventRow& row);
  /// Ids above `after`, oldest first; of one operation when named.
  std::vector<EventRow> after(int64_t id, int limit, const std::string& operation = {});
  /// The newest `limit`, oldest first.
  std::vector<EventRow> last(int limit);

 private:
  Database& db_;
  int64_t max_rows_;
  TimeMs max_age_;
};

}  // namespace glm53::state
