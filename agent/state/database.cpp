#include "agent/state/database.h"

#include <chrono>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <sqlite3.h>
#include <system_error>
#include <unistd.h>

#include <SQLiteCpp/Database.h>
#include <SQLiteCpp/Exception.h>
#include <SQLiteCpp/Statement.h>
#include <SQLiteCpp/Transaction.h>
#include <sys/stat.h>

#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::state {
namespace {

namespace fs = std::filesystem;

bool is_damage(const SQLite::Exception& e) {
  return e.getErrorCode() == SQLITE_CORRUPT || e.getErrorCode() == SQLITE_NOTADB;
}

/// nullptr when the file is damaged.
std::unique_ptr<SQLite::Database> open_checked(const std::string& path) {
  try {
    auto db = std::make_unique<SQLite::Database>(path, SQLite::OPEN_READWRITE | SQLite::OPEN_CREATE, 5000);
    {
      // A statement that has not ended holds a transaction, within which the journal mode cannot change.
      SQLite::Statement check(*db, "PRAGMA quick_check(1)");
      if (!check.executeStep() || check.getColumn(0).getString() != "ok") return nullptr;
    }
    db->exec("PRAGMA journal_mode=WAL");
    db->exec("PRAGMA synchronous=FULL");
    db->exec("PRAGMA foreign_keys=ON");
    db->exec("PRAGMA cache_size=-512");
    return db;
  } catch (const SQLite::Exception& e) {
    if (is_damage(e)) return nullptr;
    throw Error(Code::unavailable, cat("state database ", path, ": ", e.what()),
                "check that paths.state is a folder the agent may write");
  }
}

std::string move_aside(const std::string& path) {
  const std::string target = cat(path, ".corrupt-", now_ms());
  for (const char* tail : {"", "-wal", "-shm"}) {
    std::error_code ec;
    const fs::path from(path + tail);
    if (!fs::exists(from, ec)) continue;
    fs::rename(from, target + tail, ec);
    if (ec) throw Error(Code::unavailable, cat("cannot move the damaged ", from.string(), " aside: ", ec.message()));
  }
  return target;
}

/// Whether the path still names the file behind the descriptor.
bool is_file(const UniqueFd& fd, const std::string& path) {
  struct stat ours {
  }, named{};
  return ::fstat(fd.get(), &ours) == 0 && ::stat(path.c_str(), &named) == 0 && ours.st_ino == named.st_ino &&
         ours.st_dev == named.st_dev;
}

int schema_version(SQLite::Database& db) {
  SQLite::Statement query(db, "PRAGMA user_version");
  return query.executeStep() ? query.getColumn(0).getInt() : 0;
}

/// A copy that can be opened on its own: VACUUM INTO reads through the write-ahead log.
void back_up(SQLite::Database& db, const std::string& path, int version) {
  const std::string copy = cat(path, ".bak-", version);
  std::error_code ec;
  fs::remove(copy, ec);
  SQLite::Statement vacuum(db, "VACUUM INTO ?");
  vacuum.bind(1, copy);
  vacuum.exec();
}

void migrate(SQLite::Database& db, const std::string& path, std::span<const Migration> steps) {
  const int have = schema_version(db);
  const int newest = steps.empty() ? 0 : steps.back().version;
  if (have > newest) {
    throw Error(Code::unavailable,
                cat("state database ", path, " has schema ", have, "; this program knows up to ", newest),
                cat("run the newer program, or restore ", path, ".bak-", newest));
  }
  if (have == newest) return;
  if (have > 0) back_up(db, path, have);
  SQLite::Transaction transaction(db);
  for (const Migration& step : steps) {
    if (step.version > have) db.exec(step.sql);
  }
  db.exec(cat("PRAGMA user_version=", newest));
  transaction.commit();
}

}  // namespace

TimeMs now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

DirectoryLock DirectoryLock::acquire(const std::string& dir) {
  make_dirs(dir, 0750);
  const std::string path = dir + "/agent.lock";
  std::optional<UniqueFd> fd;
  do {
    fd = try_lock(path);
    // Its last holder may have removed the file between our opening and locking it.
  } while (fd && !is_file(*fd, path));
  if (!fd) {
    std::string holder = "another process";
    try {
      const std::string text(trim(read_file(path, 64)));
      if (!text.empty()) holder = "pid " + text;
    } catch (const Error&) {
      // The name of the holder is a courtesy.
    }
    throw Error(Code::busy, cat("folder ", dir, " is in use by ", holder),
                "stop that agent, or set other paths.state and paths.run");
  }
  const std::string pid = cat(getpid(), "\n");
  if (ftruncate(fd->get(), 0) != 0 ||
      pwrite(fd->get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    throw_errno(Code::unavailable, "cannot write " + path);
  }
  return {std::move(*fd), path};
}

DirectoryLock::~DirectoryLock() {
  if (fd_) ::unlink(path_.c_str());
}

Database::Database(std::unique_ptr<SQLite::Database> db, std::string moved_aside)
    : db_(std::move(db)), moved_aside_(std::move(moved_aside)) {}

Database::~Database() = default;

std::unique_ptr<Database> Database::open(const std::string& dir, std::span<const Migration> steps) {
  make_dirs(dir, 0750);
  const std::string path = dir + "/state.db";
  std::string moved;
  auto db = open_checked(path);
  if (!db) {
    moved = move_aside(path);
    log::error(cat("state database ", path, " was damaged and has been moved to ", moved,
                   "; the wanted state and the history start afresh"));
    db = open_checked(path);
    if (!db) throw Error(Code::unavailable, cat("state database ", path, " is damaged right after it was created"));
  }
  try {
    migrate(*db, path, steps);
  } catch (const SQLite::Exception& e) {
    throw Error(Code::unavailable, cat("migration of ", path, " failed: ", e.what()), "nothing was changed");
  }
  return std::unique_ptr<Database>(new Database(std::move(db), std::move(moved)));
}

void Database::use(const char* what, const std::function<void(SQLite::Database&)>& body) {
  const std::lock_guard lock(mutex_);
  try {
    body(*db_);
  } catch (const SQLite::Exception& e) {
    if (e.getErrorCode() == SQLITE_FULL) {
      throw Error(Code::unavailable, cat("E230 the disk of paths.state is full (", what, ")"),
                  "make room there: nothing was lost, and it goes on by itself; then ask again");
    }
    throw Error(Code::internal, cat("state database, ", what, ": ", e.what()));
  }
}

void Database::transact(const char* what, const std::function<void(SQLite::Database&)>& body) {
  use(what, [&](SQLite::Database& db) {
    SQLite::Transaction transaction(db);
    body(db);
    transaction.commit();
  });
}

}  // namespace glm53::state
