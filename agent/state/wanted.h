// What the operator wants, who leads, and small facts.
#pragma once

#include <optional>
#include <string>

#include "agent/state/database.h"

namespace glm53::state {

/// Small named facts: the worker's newest epoch, the id of this node.
class Meta {
 public:
  explicit Meta(Database& db) : db_(db) {}
  std::optional<std::string> get(const std::string& key);
  void set(const std::string& key, const std::string& value);

 private:
  Database& db_;
};

/// The operator's wish, with the effective configuration it was made with: an automatic restart uses the same one,
/// whatever the file says by then.
struct WantedRow {
  bool running = false;
  std::string config_json = "{}";  ///< effective cluster settings, flat
  std::string config_hash;
  std::string settings_json = "{}";  ///< the operator's --set values
  uint64_t min_generation = 0;       ///< ranks of older generations are to be replaced (restart)
  int64_t drain_ms = 30000;
  TimeMs changed_at = 0;
  std::string operation;  ///< "op-7", the operation that set it
};
class WantedStore {
 public:
  explicit WantedStore(Database& db) : db_(db) {}
  WantedRow get();
  void set(const WantedRow& row);

 private:
  Database& db_;
};

/// The right to command the cluster. Its epoch goes up with every agent that takes it, and with every command to a
/// worker (fencing).
struct LeaseRow {
  uint64_t epoch = 0;
  std::string holder, boot_id;
  int64_t pid = 0;
  TimeMs acquired_at = 0, renewed_at = 0;
};
class Lease {
 public:
  explicit Lease(Database& db) : db_(db) {}
  /// Takes it with a higher epoch: at least the seconds since 1970, so that a lost database does not lower it.
  uint64_t take(const std::string& holder, const std::string& boot_id, int64_t pid, TimeMs now);
  void renew(TimeMs now);
  std::optional<LeaseRow> get();

 private:
  Database& db_;
};

}  // namespace glm53::state
