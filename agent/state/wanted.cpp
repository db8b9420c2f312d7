#include "agent/state/wanted.h"

#include <algorithm>

#include <SQLiteCpp/Database.h>
#include <SQLiteCpp/Statement.h>

namespace glm53::state {

std::optional<std::string> Meta::get(const std::string& key) {
  std::optional<std::string> value;
  db_.use("reading meta", [&](SQLite::Database& db) {
    SQLite::Statement query(db, "SELECT value FROM meta WHERE key=?");
    query.bind(1, key);
    if (query.executeStep()) value = query.getColumn(0).getString();
  });
  return value;
}

void Meta::set(const std::string& key, const std::string& value) {
  db_.use("writing meta", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "INSERT INTO meta VALUES(?,?) ON CONFLICT(key) DO UPDATE SET value=excluded.value");
    write.bind(1, key);
    write.bind(2, value);
    write.exec();
  });
}

WantedRow WantedStore::get() {
  WantedRow row;
  db_.use("reading wanted", [&](SQLite::Database& db) {
    SQLite::Statement query(
        db,
        "SELECT running, config_json, config_hash, settings_json, min_generation, drain_ms, changed_at, "
        "coalesce(operation,'') FROM wanted WHERE id=1");
    if (!query.executeStep()) return;
    row.running = query.getColumn(0).getInt() != 0;
    row.config_json = query.getColumn(1).getString();
    row.config_hash = query.getColumn(2).getString();
    row.settings_json = query.getColumn(3).getString();
    row.min_generation = static_cast<uint64_t>(query.getColumn(4).getInt64());
    row.drain_ms = query.getColumn(5).getInt64();
    row.changed_at = query.getColumn(6).getInt64();
    row.operation = query.getColumn(7).getString();
  });
  return row;
}

void WantedStore::set(const WantedRow& row) {
  db_.use("writing wanted", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "INSERT OR REPLACE INTO wanted VALUES(1,?,?,?,?,?,?,?,?)");
    write.bind(1, row.running ? 1 : 0);
    write.bind(2, row.config_json);
    write.bind(3, row.config_hash);
    write.bind(4, row.settings_json);
    write.bind(5, static_cast<int64_t>(row.min_generation));
    write.bind(6, row.drain_ms);
    write.bind(7, row.changed_at);
    write.bind(8, row.operation);
    write.exec();
  });
}

uint64_t Lease::take(const std::string& holder, const std::string& boot_id, int64_t pid, TimeMs now) {
  uint64_t epoch = 0;
  db_.transact("taking the lease", [&](SQLite::Database& db) {
    SQLite::Statement query(db, "SELECT epoch FROM lease WHERE id=1");
    const int64_t old = query.executeStep() ? query.getColumn(0).getInt64() : 0;
    epoch = static_cast<uint64_t>(std::max(old + 1, now / 1000));
    SQLite::Statement write(db, "INSERT OR REPLACE INTO lease VALUES(1,?,?,?,?,?,?)");
    write.bind(1, static_cast<int64_t>(epoch));
    write.bind(2, holder);
    write.bind(3, boot_id);
    write.bind(4, pid);
    write.bind(5, now);
    write.bind(6, now);
    write.exec();
  });
  return epoch;
}

void Lease::renew(TimeMs now) {
  db_.use("renewing the lease", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "UPDATE lease SET renewed_at=? WHERE id=1");
    write.bind(1, now);
    write.exec();
  });
}

std::optional<LeaseRow> Lease::get() {
  std::optional<LeaseRow> row;
  db_.use("reading the lease", [&](SQLite::Database& db) {
    SQLite::Statement query(db, "SELECT epoch, holder, boot_id, pid, acquired_at, renewed_at FROM lease WHERE id=1");
    if (!query.executeStep()) return;
    row = LeaseRow{static_cast<uint64_t>(query.getColumn(0).getInt64()),
                   query.getColumn(1).getString(),
                   query.getColumn(2).getString(),
                   query.getColumn(3).getInt64(),
                   query.getColumn(4).getInt64(),
                   query.getColumn(5).getInt64()};
  });
  return row;
}

}  // namespace glm53::state
