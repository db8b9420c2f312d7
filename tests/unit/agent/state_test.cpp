// The database: opening, migrating, recovering; and its repositories.
#include <algorithm>
#include <fstream>

#include <doctest/doctest.h>

#include "agent/state/database.h"
#include "agent/state/history.h"
#include "agent/state/operations.h"
#include "agent/state/wanted.h"
#include "common/error.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::state;

namespace {

constexpr const char* kAddColumn = "ALTER TABLE meta ADD COLUMN note TEXT NOT NULL DEFAULT ''";

std::vector<Migration> with_second(const char* sql) {
  std::vector<Migration> steps(migrations().begin(), migrations().end());
  steps.push_back({steps.back().version + 1, sql});
  return steps;
}

std::vector<std::string> files(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

bool has(const std::vector<std::string>& names, const std::string& prefix) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& n) { return n.starts_with(prefix); });
}

}  // namespace

TEST_CASE("a new database keeps what is written") {
  const test::TempDir dir;
  {
    const auto db = Database::open(dir.path());
    CHECK(db->moved_aside().empty());
    Meta(*db).set("a", "1");
    Meta(*db).set("a", "2");
  }
  const auto db = Database::open(dir.path());
  CHECK(Meta(*db).get("a") == "2");
  CHECK_FALSE(Meta(*db).get("b"));
}

TEST_CASE("migration keeps the rows, and a copy of before") {
  const test::TempDir dir;
  { Meta(*Database::open(dir.path())).set("a", "1"); }
  const auto steps = with_second(kAddColumn);
  { CHECK(Meta(*Database::open(dir.path(), steps)).get("a") == "1"); }
  CHECK(std::filesystem::exists(dir / "state.db.bak-1"));
  // The program of before refuses what it does not know, and changes nothing.
  CHECK_THROWS_WITH_AS(Database::open(dir.path()), doctest::Contains("schema 2"), Error);
  CHECK(Meta(*Database::open(dir.path(), steps)).get("a") == "1");
  // The copy is a whole database.
  const test::TempDir restored;
  std::filesystem::copy(dir / "state.db.bak-1", restored / "state.db");
  CHECK(Meta(*Database::open(restored.path())).get("a") == "1");
}

TEST_CASE("a migration that fails changes nothing") {
  const test::TempDir dir;
  { Meta(*Database::open(dir.path())).set("a", "1"); }
  const auto steps = with_second("CREATE TABLE fresh(x INTEGER); THIS IS NO SQL");
  CHECK_THROWS_AS(Database::open(dir.path(), steps), Error);
  const auto db = Database::open(dir.path());
  CHECK(Meta(*db).get("a") == "1");
}

TEST_CASE("a damaged file is moved aside and a new one made") {
  const test::TempDir dir;
  SUBCASE("no database at all") {
    std::ofstream(dir / "state.db") << std::string(8192, 'x');
  }
  SUBCASE("damaged pages") {
    {
      const auto db = Database::open(dir.path());
      Events events(*db);
      for (int i = 0; i < 500; ++i) events.add({0, now_ms(), "info", "log", "", 0, std::string(200, 'a'), "{}"});
    }
    std::fstream file(dir / "state.db", std::ios::in | std::ios::out | std::ios::binary);
    for (int page = 1; page < 12; ++page) {
      file.seekp(page * 4096);
      file << std::string(4096, '\x5a');
    }
  }
  const auto db = Database::open(dir.path());
  CHECK(db->moved_aside().find("state.db.corrupt-") != std::string::npos);
  CHECK(has(files(dir.path()), "state.db.corrupt-"));
  Meta(*db).set("a", "1");
  CHECK(Meta(*db).get("a") == "1");
}

TEST_CASE("one agent a folder") {
  const test::TempDir dir;
  {
    const auto lock = DirectoryLock::acquire(dir.path());
    CHECK_THROWS_WITH_AS(DirectoryLock::acquire(dir.path()), doctest::Contains("pid"), Error);
  }
  CHECK_NOTHROW(DirectoryLock::acquire(dir.path()));
}

TEST_CASE("wanted and lease") {
  const test::TempDir dir;
  const auto db = Database::open(dir.path());
  WantedStore store(*db);
  CHECK_FALSE(store.get().running);
  WantedRow row;
  row.running = true;
  row.config_json = R"({"a":1})";
  row.min_generation = 3;
  row.operation = "op-1";
  store.set(row);
  store.set(row);
  CHECK(store.get().running);
  CHECK(store.get().config_json == row.config_json);
  CHECK(store.get().min_generation == 3);

  Lease lease(*db);
  const uint64_t first = lease.take("head", "boot", 1, 5'000'000);
  CHECK(first == 5000);
  CHECK(lease.take("head", "boot", 2, 5'000'000) == 5001);
  // A clock set back does not lower it.
  CHECK(lease.take("head", "boot", 3, 1'000) == 5002);
  CHECK(lease.get()->pid == 3);
}

TEST_CASE("operations and their steps") {
  const test::TempDir dir;
  const auto db = Database::open(dir.path());
  Operations ops(*db);
  CHECK_FALSE(ops.running());
  const std::string id = ops.create("start", "{}", "somebody", 10);
  CHECK(parse_operation_id(id));
  CHECK_FALSE(parse_operation_id("op-x"));
  CHECK_FALSE(parse_operation_id("7"));
  CHECK(ops.running()->id == id);
  const int64_t one = ops.begin_step(id, "start_api", "head", "", 11),
                two = ops.begin_step(id, "start_rank", "worker", "", 12);
  CHECK(two == one + 1);
  ops.end_step(id, one, "", 13);
  ops.interrupt_steps(14);
  const auto steps = ops.steps(id);
  REQUIRE(steps.size() == 2);
  CHECK(steps[0].state == "done");
  CHECK(steps[1].state == "failed");
  ops.finish(id, "failed", 15, "config", "text", "remedy");
  ops.finish(id, "done", 16);
  CHECK(ops.get(id)->state == "failed");
  CHECK(ops.get(id)->error_remedy == "remedy");
  CHECK_FALSE(ops.running());
  CHECK_FALSE(ops.get("op-99"));
  CHECK_FALSE(ops.get("nonsense"));
}

TEST_CASE("processes and generations") {
  const test::TempDir dir;
  const auto db = Database::open(dir.path());
  Processes processes(*db);
  const TimeMs now = now_ms();
  ProcessRow a{"rank0", 1, "boot", 10, 99, "/s", "h", "init", false, false, now, now, 70, 0, "x"};
  processes.save(a);
  ProcessRow b = a;
  b.generation = 2;
  b.ended_at = 0;
  b.exit_code.reset();
  processes.save(b);
  b.phase = "ready";
  b.ready = true;
  processes.save(b);
  const auto current = processes.current();
  REQUIRE(current.size() == 1);
  CHECK(current[0].generation == 2);
  CHECK(current[0].ready);
  CHECK_FALSE(current[0].exit_code);
  CHECK(processes.last_generation("rank0") == 2);
  CHECK(processes.started_since("rank0", 0) == 2);

  Generations generations(*db);
  GenerationRow g;
  g.n = 4;
  g.started_at = 10;
  generations.begin(g);
  g.automatic = true;
  generations.begin(g);
  CHECK_FALSE(generations.last()->automatic);
  generations.mark_up(4, 20);
  generations.mark_up(4, 30);
  generations.mark_ending(4, "exited", 68, "echo", 40);
  generations.mark_ending(4, "requested", 0, "late", 41);
  CHECK(generations.last()->end_reason == "echo");
  generations.mark_ended(4, "killed", 0, "the reason", 50);
  const auto last = generations.last();
  CHECK(last->up_at == 20);
  CHECK(last->ending_at == 40);
  CHECK(last->ended_at == 50);
  CHECK(last->cause == "killed");
}

TEST_CASE("the event ring is bounded by rows and by age") {
  const test::TempDir dir;
  const auto db = Database::open(dir.path());
  Events events(*db, 10, 1000);
  const auto add = [&](TimeMs at, const std::string& op = "") {
    return events.add({0, at, "info", "log", op, 0, "text", "{}"});
  };
  int64_t last = 0;
  for (int i = 0; i < 25; ++i) last = add(5000, i % 2 == 0 ? "op-1" : "");
  CHECK(events.after(0, 100).size() == 10);
  CHECK(events.after(0, 100).back().id == last);
  CHECK(events.after(last - 3, 100).size() == 3);
  CHECK(events.after(0, 100, "op-1").size() == 5);
  CHECK(events.after(0, 2).size() == 2);
  CHECK(events.last(4).size() == 4);
  add(7000);
  CHECK(events.after(0, 100).size() == 1);
}
