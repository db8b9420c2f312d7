// The agent's database: opening, migrating and recovering it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "common/file.h"

namespace SQLite {
class Database;
}

namespace glm53::state {

/// Milliseconds since the epoch.
using TimeMs = int64_t;
TimeMs now_ms();

/// One step of the schema. Versions count up from 1; a published migration is never changed.
struct Migration {
  int version;
  const char* sql;
};
std::span<const Migration> migrations();

/// Held by the one agent that owns a folder. Its file goes with it.
class DirectoryLock {
 public:
  /// Creates the folder if needed. Throws Error(busy) naming the process that holds it.
  static DirectoryLock acquire(const std::string& dir);
  DirectoryLock(DirectoryLock&&) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&&) = delete;
  ~DirectoryLock();

 private:
  DirectoryLock(UniqueFd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}
  UniqueFd fd_;
  std::string path_;
};

/// An open, migrated database. Thread-safe: every access holds its mutex.
class Database {
 public:
  /// Opens `dir`/state.db. A damaged file is moved to state.db.corrupt-<time> and a new one is made. Throws
  /// Error(unavailable) when its schema is newer than this program's, or the folder cannot be written.
  static std::unique_ptr<Database> open(const std::string& dir, std::span<const Migration> steps = migrations());
  ~Database();
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  /// Runs `body` with the connection. SQLite's exceptions become Error(internal) naming `what`, a full
  /// disk Error(unavailable) E230.
  void use(const char* what, const std::function<void(SQLite::Database&)>& body);
  /// The same within one transaction; an exception rolls it back.
  void transact(const char* what, const std::function<void(SQLite::Database&)>& body);

  /// Where a damaged predecessor was moved; empty normally.
  const std::string& moved_aside() const { return moved_aside_; }

 private:
  Database(std::unique_ptr<SQLite::Database> db, std::string moved_aside);
  std::recursive_mutex mutex_;
  std::unique_ptr<SQLite::Database> db_;
  std::string moved_aside_;
};

}  // namespace glm53::state
