#include "agent/state/history.h"

#include <algorithm>

#include <SQLiteCpp/Database.h>
#include <SQLiteCpp/Statement.h>

#include "agent/state/operations.h"
#include "common/strings.h"

namespace glm53::state {
namespace {

int64_t i64(uint64_t v) {
  return static_cast<int64_t>(v);
}

void run(Database& db, const char* what, const char* sql, const std::function<void(SQLite::Statement&)>& bind) {
  db.use(what, [&](SQLite::Database& connection) {
    SQLite::Statement statement(connection, sql);
    bind(statement);
    statement.exec();
  });
}

GenerationRow read_generation(SQLite::Statement& q) {
  GenerationRow row;
  row.n = static_cast<uint64_t>(q.getColumn(0).getInt64());
  row.config_json = q.getColumn(1).getString();
  row.config_hash = q.getColumn(2).getString();
  row.automatic = q.getColumn(3).getInt() != 0;
  row.started_at = q.getColumn(4).getInt64();
  row.ready_at = q.getColumn(5).getInt64();
  row.up_at = q.getColumn(6).getInt64();
  row.ending_at = q.getColumn(7).getInt64();
  row.ended_at = q.getColumn(8).getInt64();
  row.cause = q.getColumn(9).getString();
  row.exit_code = q.getColumn(10).getInt();
  row.end_reason = q.getColumn(11).getString();
  return row;
}

EventRow read_event(SQLite::Statement& q) {
  EventRow row;
  row.id = q.getColumn(0).getInt64();
  row.at = q.getColumn(1).getInt64();
  row.level = q.getColumn(2).getString();
  row.kind = q.getColumn(3).getString();
  if (!q.getColumn(4).isNull()) row.operation = cat("op-", q.getColumn(4).getInt64());
  row.generation = static_cast<uint64_t>(q.getColumn(5).getInt64());
  row.text = q.getColumn(6).getString();
  row.data_json = q.getColumn(7).getString();
  return row;
}

constexpr const char* kEventColumns =
    "SELECT id, at, level, kind, operation, coalesce(generation,0), text, data_json FROM event ";

}  // namespace

void Processes::save(const ProcessRow& row) {
  run(db_, "recording a process", "INSERT OR REPLACE INTO process VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
      [&](SQLite::Statement& s) {
        s.bind(1, row.name);
        s.bind(2, i64(row.generation));
        s.bind(3, row.boot_id);
        s.bind(4, row.pid);
        s.bind(5, i64(row.start_ticks));
        s.bind(6, row.admin_socket);
        s.bind(7, row.config_hash);
        s.bind(8, row.phase);
        s.bind(9, row.ready ? 1 : 0);
        s.bind(10, row.stop_requested ? 1 : 0);
        s.bind(11, row.started_at);
        if (row.ended_at != 0) s.bind(12, row.ended_at);
        if (row.exit_code) s.bind(13, *row.exit_code);
        s.bind(14, row.exit_signal);
        s.bind(15, row.last_error);
      });
}

std::vector<ProcessRow> Processes::current() {
  std::vector<ProcessRow> rows;
  db_.use("reading processes", [&](SQLite::Database& db) {
    SQLite::Statement forget(db, "DELETE FROM process WHERE ended_at IS NOT NULL AND ended_at<?");
    forget.bind(1, now_ms() - Events::kMaxAge);
    forget.exec();
    SQLite::Statement q(db,
                        "SELECT name, generation, boot_id, pid, start_ticks, admin_socket, config_hash, phase, ready, "
                        "stop_requested, started_at, coalesce(ended_at,0), exit_code, coalesce(exit_signal,0), "
                        "coalesce(last_error,'') FROM process p WHERE ended_at IS NULL OR generation="
                        "(SELECT max(generation) FROM process WHERE name=p.name) ORDER BY name, generation");
    while (q.executeStep()) {
      ProcessRow row;
      row.name = q.getColumn(0).getString();
      row.generation = static_cast<uint64_t>(q.getColumn(1).getInt64());
      row.boot_id = q.getColumn(2).getString();
      row.pid = q.getColumn(3).getInt64();
      row.start_ticks = static_cast<uint64_t>(q.getColumn(4).getInt64());
      row.admin_socket = q.getColumn(5).getString();
      row.config_hash = q.getColumn(6).getString();
      row.phase = q.getColumn(7).getString();
      row.ready = q.getColumn(8).getInt() != 0;
      row.stop_requested = q.getColumn(9).getInt() != 0;
      row.started_at = q.getColumn(10).getInt64();
      row.ended_at = q.getColumn(11).getInt64();
      if (!q.getColumn(12).isNull()) row.exit_code = q.getColumn(12).getInt();
      row.exit_signal = q.getColumn(13).getInt();
      row.last_error = q.getColumn(14).getString();
      rows.push_back(std::move(row));
    }
  });
  return rows;
}

uint64_t Processes::last_generation(const std::string& name) {
  uint64_t n = 0;
  db_.use("reading processes", [&](SQLite::Database& db) {
    SQLite::Statement q(db, "SELECT coalesce(max(generation),0) FROM process WHERE name=?");
    q.bind(1, name);
    if (q.executeStep()) n = static_cast<uint64_t>(q.getColumn(0).getInt64());
  });
  return n;
}

int64_t Processes::started_since(const std::string& name, TimeMs since) {
  int64_t n = 0;
  db_.use("reading processes", [&](SQLite::Database& db) {
    SQLite::Statement q(db, "SELECT count(*) FROM process WHERE name=? AND started_at>=?");
    q.bind(1, name);
    q.bind(2, since);
    if (q.executeStep()) n = q.getColumn(0).getInt64();
  });
  return n;
}

void Generations::begin(const GenerationRow& row) {
  run(db_, "recording a generation",
      "INSERT OR IGNORE INTO generation(n, config_json, config_hash, automatic, started_at) VALUES(?,?,?,?,?)",
      [&](SQLite::Statement& s) {
        s.bind(1, i64(row.n));
        s.bind(2, row.config_json);
        s.bind(3, row.config_hash);
        s.bind(4, row.automatic ? 1 : 0);
        s.bind(5, row.started_at);
      });
}

void Generations::mark_ready(uint64_t n, TimeMs now) {
  run(db_, "recording a generation", "UPDATE generation SET ready_at=? WHERE n=? AND ready_at IS NULL",
      [&](SQLite::Statement& s) {
        s.bind(1, now);
        s.bind(2, i64(n));
      });
}

void Generations::mark_up(uint64_t n, TimeMs now) {
  run(db_, "recording a generation", "UPDATE generation SET up_at=? WHERE n=? AND up_at IS NULL",
      [&](SQLite::Statement& s) {
        s.bind(1, now);
        s.bind(2, i64(n));
      });
}

void Generations::mark_ending(uint64_t n, const std::string& cause, int exit_code, const std::string& reason,
                              TimeMs now) {
  run(db_, "recording a generation",
      "UPDATE generation SET ending_at=?, cause=?, exit_code=?, end_reason=? WHERE n=? AND ending_at IS NULL",
      [&](SQLite::Statement& s) {
        s.bind(1, now);
        s.bind(2, cause);
        s.bind(3, exit_code);
        s.bind(4, reason);
        s.bind(5, i64(n));
      });
}

void Generations::mark_ended(uint64_t n, const std::string& cause, int exit_code, const std::string& reason,
                             TimeMs now) {
  run(db_, "recording a generation",
      "UPDATE generation SET ended_at=?, ending_at=coalesce(ending_at,?), cause=?, exit_code=?, end_reason=? "
      "WHERE n=? AND ended_at IS NULL",
      [&](SQLite::Statement& s) {
        s.bind(1, now);
        s.bind(2, now);
        s.bind(3, cause);
        s.bind(4, exit_code);
        s.bind(5, reason);
        s.bind(6, i64(n));
      });
}

int64_t Generations::automatic_since(TimeMs since) {
  int64_t count = 0;
  db_.use("counting generations", [&](SQLite::Database& db) {
    SQLite::Statement q(db, "SELECT count(*) FROM generation WHERE automatic=1 AND started_at>=?");
    q.bind(1, since);
    if (q.executeStep()) count = q.getColumn(0).getInt64();
  });
  return count;
}

std::optional<GenerationRow> Generations::last() {
  auto rows = recent(1);
  if (rows.empty()) return std::nullopt;
  return rows.back();
}

std::vector<GenerationRow> Generations::recent(int limit) {
  std::vector<GenerationRow> rows;
  db_.use("reading generations", [&](SQLite::Database& db) {
    SQLite::Statement q(
        db,
        "SELECT n, config_json, config_hash, automatic, started_at, coalesce(ready_at,0), coalesce(up_at,0), "
        "coalesce(ending_at,0), coalesce(ended_at,0), coalesce(cause,''), coalesce(exit_code,0), "
        "coalesce(end_reason,'') FROM generation ORDER BY n DESC LIMIT ?");
    q.bind(1, limit);
    while (q.executeStep()) rows.push_back(read_generation(q));
  });
  std::reverse(rows.begin(), rows.end());
  return rows;
}

int64_t Events::add(const EventRow& row) {
  int64_t id = 0;
  db_.transact("recording an event", [&](SQLite::Database& db) {
    SQLite::Statement write(
        db, "INSERT INTO event(at, level, kind, operation, generation, text, data_json) VALUES(?,?,?,?,?,?,?)");
    write.bind(1, row.at);
    write.bind(2, row.level);
    write.bind(3, row.kind);
    if (const auto n = parse_operation_id(row.operation)) write.bind(4, *n);
    write.bind(5, i64(row.generation));
    write.bind(6, row.text);
    write.bind(7, row.data_json);
    write.exec();
    id = static_cast<int64_t>(db.getLastInsertRowid());
    // Ids only grow, so the ring is cut by comparison; doing it every few rows keeps inserts cheap.
    if (id % 64 != 0 && max_rows_ > 64) return;
    SQLite::Statement cut(db, "DELETE FROM event WHERE id<=? OR at<?");
    cut.bind(1, id - max_rows_);
    cut.bind(2, row.at - max_age_);
    cut.exec();
  });
  return id;
}

std::vector<EventRow> Events::after(int64_t id, int limit, const std::string& operation) {
  std::vector<EventRow> rows;
  const auto n = parse_operation_id(operation);
  db_.use("reading events", [&](SQLite::Database& db) {
    SQLite::Statement q(db, std::string(kEventColumns) + (n ? "WHERE id>? AND operation=? " : "WHERE id>? ") +
                                "ORDER BY id LIMIT " + std::to_string(limit));
    q.bind(1, id);
    if (n) q.bind(2, *n);
    while (q.executeStep()) rows.push_back(read_event(q));
  });
  return rows;
}

std::vector<EventRow> Events::last(int limit) {
  std::vector<EventRow> rows;
  db_.use("reading events", [&](SQLite::Database& db) {
    SQLite::Statement q(db, std::string(kEventColumns) + "ORDER BY id DESC LIMIT ?");
    q.bind(1, limit);
    while (q.executeStep()) rows.push_back(read_event(q));
  });
  std::reverse(rows.begin(), rows.end());
  return rows;
}

}  // namespace glm53::state
