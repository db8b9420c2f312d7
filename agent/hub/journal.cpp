#include "agent/hub/journal.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <thread>

#include <SQLiteCpp/Database.h>
#include <SQLiteCpp/Statement.h>

#include "common/error.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

constexpr const char* kVersion1 = R"(
CREATE TABLE repo(id INTEGER PRIMARY KEY, endpoint TEXT NOT NULL, repo_id TEXT NOT NULL, kind TEXT NOT NULL DEFAULT 'model',
  folder TEXT NOT NULL UNIQUE);
CREATE TABLE snapshot(repo INTEGER NOT NULL REFERENCES repo(id), commit_sha TEXT NOT NULL, state TEXT NOT NULL
  CHECK(state IN('planned','partial','complete','bad')), checked_at INTEGER, PRIMARY KEY(repo,commit_sha));
CREATE TABLE snapshot_file(repo INTEGER NOT NULL, commit_sha TEXT NOT NULL, path TEXT NOT NULL, etag TEXT NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY(repo,commit_sha,path));
CREATE TABLE blob(repo INTEGER NOT NULL, etag TEXT NOT NULL, algo TEXT NOT NULL CHECK(algo IN('sha256','git-sha1')), size INTEGER NOT NULL,
  inode INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, verified_at INTEGER NOT NULL, PRIMARY KEY(repo,etag));
CREATE TABLE download(repo INTEGER NOT NULL, commit_sha TEXT NOT NULL, source TEXT, bytes_total INTEGER, bytes_done INTEGER,
  state TEXT NOT NULL, last_error TEXT, updated_at INTEGER NOT NULL, PRIMARY KEY(repo,commit_sha));
CREATE TABLE download_file(repo INTEGER NOT NULL, etag TEXT NOT NULL, path TEXT NOT NULL, size INTEGER NOT NULL, seg_size INTEGER NOT NULL,
  segments BLOB NOT NULL, partial_path TEXT NOT NULL, updated_at INTEGER NOT NULL, PRIMARY KEY(repo,etag));
)";
constexpr std::array kMigrations{state::Migration{1, kVersion1}};

/// Eight bytes a segment, little-endian.
std::string pack(const std::vector<int64_t>& values) {
  std::string out;
  for (const int64_t v : values) {
    for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(static_cast<uint64_t>(v) >> shift & 0xff);
  }
  return out;
}

std::vector<int64_t> unpack(std::string_view bytes) {
  std::vector<int64_t> out;
  for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
    uint64_t v = 0;
    for (size_t i = 8; i-- > 0;) v = v << 8 | static_cast<unsigned char>(bytes[at + i]);
    out.push_back(static_cast<int64_t>(v));
  }
  return out;
}

/// A plan from the disk is judged like one from the network.
bool sane(const Segments& s, int64_t size) {
  if (s.size <= 0 || s.done.size() != static_cast<size_t>((size + s.size - 1) / s.size)) return false;
  for (size_t i = 0; i < s.done.size(); ++i) {
    const int64_t length = std::min(s.size, size - static_cast<int64_t>(i) * s.size);
    if (s.done[i] < 0 || s.done[i] > length) return false;
  }
  return true;
}

}  // namespace

Journal::Journal(const std::string& dir) {
  make_dirs(dir, 0750);
  // Two processes must not both find an empty database and fill it.
  std::optional<UniqueFd> alone;
  while (!(alone = try_lock(dir + "/open.lock"))) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  db_ = state::Database::open(dir, kMigrations);
}

std::string Journal::default_dir() {
  if (const auto state = environment("XDG_STATE_HOME"); state && !state->empty()) return *state + "/glm53/hub";
  const auto home = environment("HOME");
  if (!home || home->empty()) throw Error(Code::config, "hub: HOME is not set", "name a configuration: --config FILE");
  return *home + "/.local/state/glm53/hub";
}

int64_t Journal::repo(const std::string& folder) {
  int64_t id = 0;
  db_->use("finding a repository", [&](SQLite::Database& db) {
    SQLite::Statement add(db, "INSERT INTO repo(endpoint, repo_id, folder) VALUES('','',?) ON CONFLICT DO NOTHING");
    add.bind(1, folder);
    add.exec();
    SQLite::Statement find(db, "SELECT id FROM repo WHERE folder=?");
    find.bind(1, folder);
    if (find.executeStep()) id = find.getColumn(0).getInt64();
  });
  return id;
}

void Journal::save_plan(const std::string& folder, const Source& source, const std::string& commit,
                        const std::vector<FileEntry>& files) {
  const int64_t id = repo(folder);
  db_->transact("saving a plan", [&](SQLite::Database& db) {
    SQLite::Statement name(db, "UPDATE repo SET endpoint=?, repo_id=? WHERE id=?");
    name.bind(1, source.endpoint);
    name.bind(2, source.repo);
    name.bind(3, id);
    name.exec();
    SQLite::Statement plan(
        db, "INSERT INTO snapshot(repo, commit_sha, state) VALUES(?,?,'planned') ON CONFLICT DO NOTHING");
    plan.bind(1, id);
    plan.bind(2, commit);
    plan.exec();
    SQLite::Statement file(
        db, "INSERT OR REPLACE INTO snapshot_file(repo, commit_sha, path, etag, size) VALUES(?,?,?,?,?)");
    for (const FileEntry& f : files) {
      file.bind(1, id);
      file.bind(2, commit);
      file.bind(3, f.path);
      file.bind(4, f.etag);
      file.bind(5, f.size);
      file.exec();
      file.reset();
    }
  });
}

std::vector<FileEntry> Journal::plan(const std::string& folder, const std::string& commit) {
  const int64_t id = repo(folder);
  std::vector<FileEntry> files;
  db_->use("reading a plan", [&](SQLite::Database& db) {
    SQLite::Statement query(db,
                            "SELECT path, size, etag FROM snapshot_file WHERE repo=? AND commit_sha=? ORDER BY path");
    query.bind(1, id);
    query.bind(2, commit);
    while (query.executeStep()) {
      FileEntry file{query.getColumn(0).getString(), query.getColumn(1).getInt64(), query.getColumn(2).getString()};
      if (!unsafe_path(file.path) && is_etag(file.etag)) files.push_back(std::move(file));
    }
  });
  return files;
}

void Journal::verified(const std::string& folder, const std::string& etag, const FileId& id) {
  const int64_t owner = repo(folder);
  db_->use("recording a blob", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "INSERT OR REPLACE INTO blob VALUES(?,?,?,?,?,?,?)");
    write.bind(1, owner);
    write.bind(2, etag);
    write.bind(3, etag.size() == 64 ? "sha256" : "git-sha1");
    write.bind(4, id.size);
    write.bind(5, static_cast<int64_t>(id.inode));
    write.bind(6, id.mtime_ns);
    write.bind(7, state::now_ms());
    write.exec();
  });
}

bool Journal::is_verified(const std::string& folder, const std::string& etag, const FileId& id) {
  const int64_t owner = repo(folder);
  bool known = false;
  db_->use("finding a blob", [&](SQLite::Database& db) {
    SQLite::Statement query(db, "SELECT 1 FROM blob WHERE repo=? AND etag=? AND size=? AND inode=? AND mtime_ns=?");
    query.bind(1, owner);
    query.bind(2, etag);
    query.bind(3, id.size);
    query.bind(4, static_cast<int64_t>(id.inode));
    query.bind(5, id.mtime_ns);
    known = query.executeStep();
  });
  return known;
}

void Journal::save_segments(const std::string& folder, const FileEntry& file, const std::string& partial,
                            const Segments& segments) {
  const int64_t owner = repo(folder);
  const std::string packed = pack(segments.done);
  db_->use("recording a partial file", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "INSERT OR REPLACE INTO download_file VALUES(?,?,?,?,?,?,?,?)");
    write.bind(1, owner);
    write.bind(2, file.etag);
    write.bind(3, file.path);
    write.bind(4, file.size);
    write.bind(5, segments.size);
    write.bind(6, packed.data(), static_cast<int>(packed.size()));
    write.bind(7, partial);
    write.bind(8, state::now_ms());
    write.exec();
  });
}

std::optional<Segments> Journal::segments(const std::string& folder, const FileEntry& file,
                                          const std::string& partial) {
  const int64_t owner = repo(folder);
  std::optional<Segments> found;
  db_->use("finding a partial file", [&](SQLite::Database& db) {
    SQLite::Statement query(
        db, "SELECT seg_size, segments FROM download_file WHERE repo=? AND etag=? AND size=? AND partial_path=?");
    query.bind(1, owner);
    query.bind(2, file.etag);
    query.bind(3, file.size);
    query.bind(4, partial);
    if (!query.executeStep()) return;
    const SQLite::Column packed = query.getColumn(1);
    Segments s{query.getColumn(0).getInt64(),
               unpack({static_cast<const char*>(packed.getBlob()), static_cast<size_t>(packed.getBytes())})};
    if (sane(s, file.size)) found = std::move(s);
  });
  return found;
}

void Journal::forget(const std::string& folder, const std::string& etag) {
  const int64_t owner = repo(folder);
  db_->use("forgetting a partial file", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "DELETE FROM download_file WHERE repo=? AND etag=?");
    write.bind(1, owner);
    write.bind(2, etag);
    write.exec();
  });
}

void Journal::save_download(const std::string& folder, const std::string& commit, const std::string& source,
                            int64_t total, int64_t done, const std::string& state, const std::string& error) {
  const int64_t owner = repo(folder);
  db_->transact("recording a download", [&](SQLite::Database& db) {
    SQLite::Statement write(db, "INSERT OR REPLACE INTO download VALUES(?,?,?,?,?,?,?,?)");
    write.bind(1, owner);
    write.bind(2, commit);
    write.bind(3, source);
    write.bind(4, total);
    write.bind(5, done);
    write.bind(6, state);
    write.bind(7, error);
    write.bind(8, state::now_ms());
    write.exec();
    SQLite::Statement snapshot(db, "UPDATE snapshot SET state=?, checked_at=? WHERE repo=? AND commit_sha=?");
    snapshot.bind(1, state == "done" ? "complete" : "partial");
    snapshot.bind(2, state::now_ms());
    snapshot.bind(3, owner);
    snapshot.bind(4, commit);
    snapshot.exec();
  });
}

}  // namespace glm53::hub
