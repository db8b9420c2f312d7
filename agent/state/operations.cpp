#include "agent/state/operations.h"

#include <SQLiteCpp/Database.h>
#include <SQLiteCpp/Statement.h>

#include "common/strings.h"

namespace glm53::state {
namespace {

constexpr const char* kColumns =
    "SELECT n, kind, args_json, state, requested_by, created_at, coalesce(finished_at,0), coalesce(error_code,''), "
    "coalesce(error_text,''), coalesce(error_remedy,'') FROM operation ";

OperationRow read_row(SQLite::Statement& q) {
  OperationRow row;
  row.id = cat("op-", q.getColumn(0).getInt64());
  row.kind = q.getColumn(1).getString();
  row.args_json = q.getColumn(2).getString();
  row.state = q.getColumn(3).getString();
  row.requested_by = q.getColumn(4).getString();
  row.created_at = q.getColumn(5).getInt64();
  row.finished_at = q.getColumn(6).getInt64();
  row.error_code = q.getColumn(7).getString();
  row.error_text = q.getColumn(8).getString();
  row.error_remedy = q.getColumn(9).getString();
  return row;
}

int64_t number(const std::string& id) {
  return parse_operation_id(id).value_or(-1);
}

}  // namespace

std::optional<int64_t> parse_operation_id(std::string_view id) {
  if (!id.starts_with("op-")) return std::nullopt;
  return parse_int(id.substr(3));
}

std::string Operations::create(const std::string& kind, const std::string& args_json, const std::string& requested_by,
                               TimeMs now) {
  std::string id;
  db_.use("creating an operation", [&](SQLite::Database& db) {
    SQLite::Statement write(
        db, "INSERT INTO operation(kind, args_json, state, requested_by, created_at) VALUES(?,?,'running',?,?)");
    write.bind(1, kind);
    write.bind(2, args_json);
    write.bind(3, requested_by);
    write.bind(4, now);
    write.exec();
    id = cat("op-", static_cast<int64_t>(db.getLastInsertRowid()));
  });
  return id;
}

void Operations::finish(const std::string& id, const std::string& state, TimeMs now, const std::string& code,
                        const std::string& text, const std::string& remedy) {
  db_.use("finishing an operation", [&](SQLite::Database& db) {
    SQLite::Statement write(db,
                            "UPDATE operation SET state=?, finished_at=?, error_code=?, error_text=?, error_remedy=? "
                            "WHERE n=? AND state='running'");
    write.bind(1, state);
    write.bind(2, now);
    write.bind(3, code);
    write.bind(4, text);
    write.bind(5, remedy);
    write.bind(6, number(id));
    write.exec();
  });
}

std::optional<OperationRow> Operations::get(const std::string& id) {
  std::optional<OperationRow> row;
  db_.use("reading an operation", [&](SQLite::Database& db) {
    SQLite::Statement query(db, std::string(kColumns) + "WHERE n=?");
    query.bind(1, number(id));
    if (query.executeStep()) row = read_row(query);
  });
  return row;
}

std::optional<OperationRow> Operations::running() {
  std::optional<OperationRow> row;
  db_.use("reading operations", [&](SQLite::Database& db) {
    SQLite::Statement query(db, std::string(kColumns) + "WHERE state='running' ORDER BY n DESC LIMIT 1");
    if (query.executeStep()) row = read_row(query);
  });
  return row;
}

std::vector<OperationRow> Operations::list(int limit) {
  std::vector<OperationRow> rows;
  db_.use("reading operations", [&](SQLite::Database& db) {
    SQLite::Statement query(db, std::string(kColumns) + "ORDER BY n DESC LIMIT ?");
    query.bind(1, limit);
    while (query.executeStep()) rows.push_back(read_row(query));
  });
  return rows;
}

int64_t Operations::begin_step(const std::string& id, const std::string& action, const std::string& node,
                               const std::string& detail, TimeMs now) {
  int64_t seq = 0;
  db_.transact("recording an action", [&](SQLite::Database& db) {
    SQLite::Statement query(db, "SELECT coalesce(max(seq),0)+1 FROM operation_step WHERE operation=?");
    query.bind(1, number(id));
    seq = query.executeStep() ? query.getColumn(0).getInt64() : 1;
    SQLite::Statement write(db,
                            "INSERT INTO operation_step(operation, seq, action, node, detail, state, started_at) "
                            "VALUES(?,?,?,?,?,'running',?)");
    write.bind(1, number(id));
    write.bind(2, seq);
    write.bind(3, action);
    write.bind(4, node);
    write.bind(5, detail);
    write.bind(6, now);
    write.exec();
  });
  return seq;
}

void Operations::end_step(const std::string& id, int64_t seq, const std::string& error, TimeMs now) {
  db_.use("recording an action", [&](SQLite::Database& db) {
    SQLite::Statement write(
        db,
        "UPDATE operation_step SET state=?, finished_at=?, error=? WHERE operation=? AND seq=? AND state='running'");
    write.bind(1, error.empty() ? "done" : "failed");
    write.bind(2, now);
    write.bind(3, error);
    write.bind(4, number(id));
    write.bind(5, seq);
    write.exec();
  });
}

void Operations::interrupt_steps(TimeMs now) {
  db_.use("closing interrupted actions", [&](SQLite::Database& db) {
    SQLite::Statement write(
        db, "UPDATE operation_step SET state='failed', finished_at=?, error='the agent ended' WHERE state='running'");
    write.bind(1, now);
    write.exec();
  });
}

std::vector<StepRow> Operations::steps(const std::string& id) {
  std::vector<StepRow> rows;
  db_.use("reading actions", [&](SQLite::Database& db) {
    SQLite::Statement query(
        db,
        "SELECT seq, action, node, detail, state, started_at, coalesce(finished_at,0), coalesce(error,'') "
        "FROM operation_step WHERE operation=? ORDER BY seq");
    query.bind(1, number(id));
    while (query.executeStep()) {
      rows.push_back({query.getColumn(0).getInt64(), query.getColumn(1).getString(), query.getColumn(2).getString(),
                      query.getColumn(3).getString(), query.getColumn(4).getString(), query.getColumn(5).getInt64(),
                      query.getColumn(6).getInt64(), query.getColumn(7).getString()});
    }
  });
  return rows;
}

}  // namespace glm53::state
