// Load on a local cluster for a while (scripts/test.sh --soak 30m): streams of every length, clients that leave, now
// and then a killed process. GLM53_SOAK_SECONDS says how long (default 20).
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <random>
#include <signal.h>
#include <thread>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

using Clock = std::chrono::steady_clock;

/// What the clients saw.
struct Tally {
  std::atomic<int> answers = 0, left = 0, wrong = 0;
  std::mutex mutex;
  std::vector<std::string> faults;
  void fault(const std::string& text) {
    ++wrong;
    const std::lock_guard lock(mutex);
    if (faults.size() < 10) faults.push_back(text);
  }
};

struct ClientLeft {};

std::string expected_count(int to) {
  std::string out;
  for (int i = 1; i <= to; ++i) out += i == 1 ? cat(i) : cat(", ", i);
  return out;
}

void one_client(const LocalCluster& cluster, unsigned seed, Clock::time_point until, Tally& tally) {
  std::mt19937 random(seed);
  while (Clock::now() < until) {
    const int to = std::uniform_int_distribution(5, 60)(random);
    const bool leaves = std::uniform_int_distribution(0, 9)(random) == 0;
    try {
      const std::string answer = cluster.stream_chat(cat("Count from 1 to ", to, "."), 400, [&](const std::string&) {
        if (leaves) throw ClientLeft{};
      });
      if (answer.find(expected_count(to)) == std::string::npos) tally.fault(cat("asked for ", to, ", got: ", answer));
      ++tally.answers;
    } catch (const ClientLeft&) {
      ++tally.left;
    } catch (const std::exception& e) {
      tally.fault(e.what());
      std::this_thread::sleep_for(500ms);
    }
  }
}

int64_t memory_of(const LocalCluster& cluster) {
  int64_t most = 0;
  for (const char* name : {"rank0", "rank1", "api"}) {
    const Json process = cluster.process(name);
    if (process.is_object() && process["memory_bytes"].is_number())
      most = std::max(most, process["memory_bytes"].get<int64_t>());
  }
  return most;
}

}  // namespace

TEST_CASE("load without a fault, memory that stays, and a killed rank now and then") {
  const char* setting = std::getenv("GLM53_SOAK_SECONDS");
  const auto length = std::chrono::seconds(parse_int(setting != nullptr ? setting : "20").value_or(20));
  ClusterOptions options;
  options.fake_rank = false;
  options.head["ranks.max_restarts"] = "1000";
  LocalCluster cluster(options);
  cluster.up();
  cluster.chat("Count from 1 to 60.", 400);

  Tally tally;
  const auto until = Clock::now() + length;
  std::vector<std::jthread> clients;
  for (unsigned i = 0; i < 4; ++i) clients.emplace_back([&, i] { one_client(cluster, i, until, tally); });
  int64_t first_memory = 0, memory = 0;
  for (int minute = 1; Clock::now() < until; ++minute) {
    std::this_thread::sleep_until(std::min(until, Clock::now() + 60s));
    memory = memory_of(cluster);
    if (first_memory == 0) first_memory = memory;
    std::cout << "minute " << minute << ": " << tally.answers << " answers, " << tally.left << " left early, "
              << tally.wrong << " faults, " << human_bytes(memory) << " in the largest process" << std::endl;
    if (minute % 5 == 0 && Clock::now() + 60s < until) {
      if (const pid_t pid = cluster.process_pid(minute % 10 == 0 ? "rank0" : "rank1"); pid > 0) ::kill(pid, SIGKILL);
    }
  }
  clients.clear();
  for (const auto& fault : tally.faults) MESSAGE(fault);
  CHECK(tally.wrong == 0);
  CHECK(tally.answers > 0);
  CHECK(memory < first_memory + first_memory / 2 + (64 << 20));
  CHECK(cluster.ctl({"stop"}).code == 0);
}
