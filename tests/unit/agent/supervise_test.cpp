// Child processes with a shell as the child.
#include <map>
#include <mutex>
#include <signal.h>

#include <doctest/doctest.h>

#include "agent/supervise/log_file.h"
#include "agent/supervise/scan.h"
#include "agent/supervise/supervisor.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/temp_dir.h"
#include "tests/unit/agent/eventually.h"

using namespace glm53;
using namespace glm53::supervise;
using namespace std::chrono_literals;
using test::eventually;

namespace {

/// What a database would keep.
class MemoryStore final : public ProcessStore {
 public:
  void save(const ProcessRecord& r) override {
    const std::lock_guard lock(mutex_);
    rows_[{r.name, r.generation}] = r;
  }
  std::vector<ProcessRecord> current() override {
    const std::lock_guard lock(mutex_);
    std::vector<ProcessRecord> all;
    for (const auto& [key, row] : rows_) all.push_back(row);
    return all;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    rows_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, uint64_t>, ProcessRecord> rows_;
};

struct Fixture {
  test::TempDir dir;
  MemoryStore store;
  std::unique_ptr<Supervisor> supervisor;

  Fixture() { restart(); }
  ~Fixture() {
    for (const auto& v : supervisor->snapshot()) {
      if (v.ended_at == 0) supervisor->stop(v.name, v.generation, 0ms);
    }
    CHECK(eventually([&] {
      const auto all = supervisor->snapshot();
      return std::all_of(all.begin(), all.end(), [](const auto& v) { return v.ended_at != 0; });
    }));
  }
  void restart() {
    supervisor.reset();
    supervisor = std::make_unique<Supervisor>(options(), store);
    supervisor->adopt();
  }
  SupervisorOptions options() {
    SupervisorOptions o;
    o.run_dir = dir / "run";
    o.logs_dir = dir / "logs";
    return o;
  }
  void shell(const std::string& name, uint64_t generation, const std::string& script) {
    StartSpec spec;
    spec.name = name;
    spec.generation = generation;
    spec.argv = {"/bin/sh", "-c", script};
    spec.env = {{"PATH", "/usr/bin:/bin"}};
    spec.admin_socket = dir / ("run/" + name + ".sock");
    supervisor->start(spec);
  }
  ProcessView view(const std::string& name) {
    ProcessView found;
    for (const auto& v : supervisor->snapshot()) {
      if (v.name == name) found = v;
    }
    return found;
  }
  bool ended(const std::string& name) {
    return eventually([&] { return view(name).ended_at != 0; });
  }
  std::string log(const std::string& name, uint64_t generation) {
    return LogReader(log_path(dir / "logs", name, generation)).tail(100);
  }
};

}  // namespace

TEST_CASE("exit codes and signals are recorded, output is logged") {
  Fixture f;
  f.shell("rank0", 1, "echo out; echo err >&2; exit 66");
  REQUIRE(f.ended("rank0"));
  CHECK(f.view("rank0").exit_code == 66);
  CHECK(f.log("rank0", 1) == "out\nerr\n");
  f.shell("rank1", 1, "kill -9 $$");
  REQUIRE(f.ended("rank1"));
  CHECK(f.view("rank1").exit_signal == 9);
  CHECK_FALSE(f.view("rank1").exit_code);
}

TEST_CASE("a program that is not there ends as a configuration error") {
  Fixture f;
  StartSpec spec;
  spec.name = "rank0";
  spec.generation = 1;
  spec.argv = {f.dir / "nothing", "rank"};
  f.supervisor->start(spec);
  CHECK(f.view("rank0").exit_code == static_cast<int>(RankExit::config));
  CHECK(f.view("rank0").last_error.find("nothing") != std::string::npos);
}

TEST_CASE("the environment is what was asked for") {
  Fixture f;
  f.shell("rank0", 4, "env | sort");
  REQUIRE(f.ended("rank0"));
  const std::string log = f.log("rank0", 4);
  CHECK(log.find("NOTIFY_SOCKET=" + f.dir.path() + "/run/notify/rank0.4\n") != std::string::npos);
  CHECK(log.find("HOME=") == std::string::npos);
}

TEST_CASE("starting the same thing twice starts it once") {
  Fixture f;
  f.shell("rank0", 1, "echo once; sleep 60");
  const pid_t pid = f.view("rank0").id.pid;
  f.shell("rank0", 1, "echo twice");
  CHECK(f.view("rank0").id.pid == pid);
}

TEST_CASE("stop: SIGTERM, then SIGKILL after the grace") {
  Fixture f;
  f.shell("rank0", 1, "trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done");
  f.shell("rank1", 1, "trap '' TERM; echo deaf; while :; do sleep 0.01; done");
  REQUIRE(eventually([&] { return f.log("rank0", 1) == "ready\n" && f.log("rank1", 1) == "deaf\n"; }));
  f.supervisor->stop("rank0", 1, 60s);
  f.supervisor->stop("rank1", 1, 50ms);
  REQUIRE(f.ended("rank0"));
  REQUIRE(f.ended("rank1"));
  CHECK(f.view("rank0").exit_code.has_value());
  CHECK(f.view("rank0").stop_requested);
  CHECK(f.view("rank1").exit_signal == SIGKILL);
  f.supervisor->stop("rank1", 1, 0ms);
  f.supervisor->stop("nobody", 1, 0ms);
}

TEST_CASE("descendants go with their leader") {
  Fixture f;
  f.shell("rank0", 1, "sleep 1000 & echo $!; kill -9 $$");
  REQUIRE(f.ended("rank0"));
  const auto pid = parse_int(trim(f.log("rank0", 1)));
  REQUIRE(pid);
  CHECK(eventually([&] { return !identify(static_cast<pid_t>(*pid)); }));
}

TEST_CASE("notices: phase, progress, error, ready") {
  Fixture f;
  f.shell("rank0", 1, "sleep 60");
  const auto send = [&](const std::string& text) {
    ::setenv("NOTIFY_SOCKET", notify_path(f.dir / "run", "rank0", 1).c_str(), 1);
    Notifier notifier;
    ::unsetenv("NOTIFY_SOCKET");
    Notice notice = parse_notice(text);
    notifier.send(notice);
  };
  send("X_GLM53_PHASE=load_target\nX_GLM53_PROGRESS=3/9\nSTATUS=reading");
  REQUIRE(eventually([&] { return f.view("rank0").progress.has_value(); }));
  CHECK(f.view("rank0").phase == Phase::load_target);
  CHECK(f.view("rank0").progress == std::pair<uint64_t, uint64_t>(3, 9));
  CHECK_FALSE(f.view("rank0").ready);
  send("WATCHDOG=1");
  send("X_GLM53_ERROR=Authorization: Bearer abcdefghijklmnop");
  REQUIRE(eventually([&] { return !f.view("rank0").last_error.empty(); }));
  CHECK(f.view("rank0").last_error.find("abcdefgh") == std::string::npos);
  CHECK_FALSE(f.view("rank0").ready);
  send("EXTEND_TIMEOUT_USEC=60000000");
  REQUIRE(eventually([&] { return f.view("rank0").extended_for > 0ms; }));
  send("READY=1");
  REQUIRE(eventually([&] { return f.view("rank0").ready; }));
  CHECK_FALSE(f.view("rank0").progress);
}

TEST_CASE("the next supervisor adopts what runs") {
  Fixture f;
  const auto ready = [&] {
    ::setenv("NOTIFY_SOCKET", notify_path(f.dir / "run", "rank0", 3).c_str(), 1);
    Notifier notifier;
    ::unsetenv("NOTIFY_SOCKET");
    notifier.watchdog();
  };
  f.shell("rank0", 3, "while :; do echo tick; sleep 0.01; done");
  f.shell("rank1", 3, "exit 5");
  REQUIRE(f.ended("rank1"));
  const pid_t pid = f.view("rank0").id.pid;
  SUBCASE("with its records") {
    f.restart();
  }
  SUBCASE("without them: the environment tells") {
    f.supervisor.reset();
    f.store.forget();
    f.restart();
  }
  CHECK(f.view("rank0").id.pid == pid);
  CHECK(f.view("rank0").generation == 3);
  CHECK(f.view("rank0").adopted);
  CHECK(f.view("rank0").ended_at == 0);
  // READY=1 may have been missed; the step loop's watchdog tells.
  ready();
  CHECK(eventually([&] { return f.view("rank0").ready; }));
  // Its log goes on.
  const uint64_t before = log_size(log_path(f.dir / "logs", "rank0", 3));
  CHECK(eventually([&] { return log_size(log_path(f.dir / "logs", "rank0", 3)) > before; }));
  REQUIRE(::kill(pid, SIGKILL) == 0);
  CHECK(f.ended("rank0"));
}

TEST_CASE("what ended while nobody watched is recorded as unknown") {
  Fixture f;
  f.shell("rank0", 1, "sleep 1000");
  const ProcessId id = f.view("rank0").id;
  f.supervisor.reset();
  REQUIRE(::kill(id.pid, SIGKILL) == 0);
  REQUIRE(wait_until(id.pid, std::chrono::steady_clock::now() + 60s));
  f.restart();
  CHECK(f.view("rank0").ended_at != 0);
  CHECK_FALSE(f.view("rank0").exit_code);
  CHECK(f.view("rank0").exit_signal == 0);
}

TEST_CASE("a recycled pid is not ours") {
  Fixture f;
  ProcessRecord foreign;
  foreign.name = "rank0";
  foreign.generation = 1;
  foreign.id = *identify(::getpid());
  foreign.id.start_ticks += 1;
  f.store.save(foreign);
  f.restart();
  CHECK(f.view("rank0").ended_at != 0);
}

TEST_CASE("sockets of what ended are removed") {
  Fixture f;
  f.shell("rank0", 1, "exit 0");
  REQUIRE(f.ended("rank0"));
  CHECK_FALSE(std::filesystem::exists(notify_path(f.dir / "run", "rank0", 1)));
  write_file(notify_path(f.dir / "run", "rank9", 1), "");
  f.restart();
  CHECK_FALSE(std::filesystem::exists(notify_path(f.dir / "run", "rank9", 1)));
}

TEST_CASE("notify paths name process and generation") {
  CHECK(parse_notify_path("/r", notify_path("/r", "rank0", 12)) == std::pair<std::string, uint64_t>("rank0", 12));
  for (const char* wrong :
       {"/r/notify/", "/r/notify/rank0", "/r/notify/.1", "/r/notify/rank0.x", "/x/notify/rank0.1", "/r/notify/a/b.1"}) {
    CHECK_FALSE(parse_notify_path("/r", wrong));
  }
  CHECK_THROWS_AS(NotifySocket("/tmp/" + std::string(200, 'a')), Error);
}
