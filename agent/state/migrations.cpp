// The schema, one migration a version.
#include <array>

#include "agent/state/database.h"

namespace glm53::state {
namespace {

constexpr const char* kVersion1 = R"(
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE wanted(id INTEGER PRIMARY KEY CHECK(id=1), running INTEGER NOT NULL, config_json TEXT NOT NULL, config_hash TEXT NOT NULL,
  settings_json TEXT NOT NULL, min_generation INTEGER NOT NULL, drain_ms INTEGER NOT NULL, changed_at INTEGER NOT NULL, operation TEXT);
CREATE TABLE lease(id INTEGER PRIMARY KEY CHECK(id=1), epoch INTEGER NOT NULL, holder TEXT NOT NULL, boot_id TEXT NOT NULL,
  pid INTEGER NOT NULL, acquired_at INTEGER NOT NULL, renewed_at INTEGER NOT NULL);
CREATE TABLE operation(n INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, args_json TEXT NOT NULL,
  state TEXT NOT NULL CHECK(state IN('running','done','failed','cancelled')), requested_by TEXT NOT NULL, created_at INTEGER NOT NULL,
  finished_at INTEGER, error_code TEXT, error_text TEXT, error_remedy TEXT);
CREATE TABLE operation_step(operation INTEGER NOT NULL REFERENCES operation(n) ON DELETE CASCADE, seq INTEGER NOT NULL, action TEXT NOT NULL,
  node TEXT NOT NULL, detail TEXT NOT NULL, state TEXT NOT NULL CHECK(state IN('running','done','failed')), started_at INTEGER NOT NULL,
  finished_at INTEGER, error TEXT, PRIMARY KEY(operation, seq));
CREATE TABLE process(name TEXT NOT NULL, generation INTEGER NOT NULL, boot_id TEXT NOT NULL, pid INTEGER NOT NULL,
  start_ticks INTEGER NOT NULL, admin_socket TEXT NOT NULL, config_hash TEXT NOT NULL, phase TEXT NOT NULL, ready INTEGER NOT NULL,
  stop_requested INTEGER NOT NULL, started_at INTEGER NOT NULL, ended_at INTEGER, exit_code INTEGER, exit_signal INTEGER, last_error TEXT,
  PRIMARY KEY(name, generation));
CREATE TABLE generation(n INTEGER PRIMARY KEY, config_json TEXT NOT NULL, config_hash TEXT NOT NULL, automatic INTEGER NOT NULL,
  started_at INTEGER NOT NULL, ready_at INTEGER, up_at INTEGER, ending_at INTEGER, ended_at INTEGER, cause TEXT, exit_code INTEGER,
  end_reason TEXT);
CREATE TABLE event(id INTEGER PRIMARY KEY AUTOINCREMENT, at INTEGER NOT NULL, level TEXT NOT NULL, kind TEXT NOT NULL,
  operation INTEGER, generation INTEGER, text TEXT NOT NULL, data_json TEXT NOT NULL);
CREATE INDEX event_operation ON event(operation, id) WHERE operation IS NOT NULL;
)";

constexpr std::array kMigrations{Migration{1, kVersion1}};

}  // namespace

std::span<const Migration> migrations() {
  return kMigrations;
}

}  // namespace glm53::state
