// Load on a local cluster for a while (scripts/test.sh --soak 30m), with a KV cache that is far too small for it: every
// answer equals the one that the request got alone, nothing is left behind, no process grows. Clients leave at any
// moment, requests are put back, the prefix cache is always full. GLM53_SOAK_SECONDS says how long (default 20).
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
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

constexpr int kClients = 10;
constexpr int kBeginnings = 8;  // system prompts, of which the cache holds only some
constexpr int64_t kGrowth = int64_t{12} << 20;
const std::vector<std::string> kProcesses{"rank0", "rank1", "api", "agent of head", "agent of worker"};

/// One of the requests that clients send, and what it gets when nobody else is there.
struct Question {
  Json body;
  std::string answer;
};

std::vector<Question> questions() {
  std::vector<Question> out;
  for (int i = 0; i < 3 * kBeginnings; ++i) {
    std::string system = cat("You are helper number ", i % kBeginnings, ".");
    for (int n = 0; n < 5 + 3 * (i % kBeginnings); ++n)
      system += cat(" Rule ", n, ": count only when you are asked to count, and say hello to those who say hello.");
    Json body = {{"messages",
                  {{{"role", "system"}, {"content", system}},
                   {{"role", "user"}, {"content", cat("Count from ", 1 + i / kBeginnings, " to ", 15 + 2 * i, ".")}}}},
                 {"max_tokens", 40 + 10 * i},
                 {"stream", true},
                 {"chat_template_kwargs", {{"enable_thinking", false}}}};
    // Each third is sampled, each fifth goes before others, each fourth outgrows what was reserved for it.
    body["temperature"] = i % 3 == 2 ? 0.9 : 0.0;
    body["seed"] = 1000 + i;
    if (i % 5 == 4) body["priority"] = -1;
    if (i % 4 == 3) body["ignore_eos"] = true;
    out.push_back({std::move(body), {}});
  }
  return out;
}

/// What the clients saw.
struct Tally {
  std::atomic<int> answers = 0, left = 0, faults = 0;
  std::mutex mutex;
  std::vector<std::string> texts;
  void fault(const std::string& text) {
    ++faults;
    const std::lock_guard lock(mutex);
    if (texts.size() < 10) texts.push_back(text);
  }
};

struct ClientLeft {};

/// Sends a question and goes away: while the answer comes, or after a moment, wherever the request is then.
void leave_early(const LocalCluster& cluster, const Question& question, std::mt19937& random, Tally& tally) {
  const bool in_stream = std::uniform_int_distribution(0, 1)(random) == 0;
  int pieces = std::uniform_int_distribution(1, 30)(random);
  const std::chrono::milliseconds patience = in_stream ? 120s : std::uniform_int_distribution(5, 1500)(random) * 1ms;
  try {
    cluster.stream(question.body, patience, [&](const std::string&) {
      if (in_stream && --pieces == 0) throw ClientLeft{};
    });
    ++tally.answers;
  } catch (const ClientLeft&) {
    ++tally.left;
  } catch (const Error& e) {
    in_stream ? tally.fault(e.line()) : void(++tally.left);
  }
}

void one_client(const LocalCluster& cluster, const std::vector<Question>& questions, unsigned seed,
                Clock::time_point until, Tally& tally) {
  std::mt19937 random(seed);
  while (Clock::now() < until) {
    const Question& q = questions[std::uniform_int_distribution<size_t>(0, questions.size() - 1)(random)];
    if (std::uniform_int_distribution(0, 3)(random) == 0) {
      leave_early(cluster, q, random, tally);
      continue;
    }
    try {
      const std::string answer = cluster.stream(q.body, 300s, [](const std::string&) {});
      ++tally.answers;
      if (answer != q.answer)
        tally.fault(cat("asked ", q.body["messages"][1]["content"], " and got\n", answer, "\nbut alone\n", q.answer));
    } catch (const std::exception& e) {
      tally.fault(e.what());
      std::this_thread::sleep_for(500ms);
    }
  }
}

std::map<std::string, double> metrics(const LocalCluster& cluster) {
  std::map<std::string, double> out;
  std::istringstream lines(HttpClient(cluster.api_url()).request("GET", "/metrics").body);
  for (std::string line; std::getline(lines, line);) {
    const size_t space = line.rfind(' ');
    if (line.starts_with("glm53_") && space != std::string::npos)
      out[line.substr(0, line.find_first_of("{ "))] = std::strtod(line.c_str() + space, nullptr);
  }
  return out;
}

/// What a process uses: its resident bytes, open descriptors and threads.
struct Usage {
  int64_t bytes = 0, descriptors = 0, threads = 0;
};
std::map<std::string, Usage> usage(const std::map<std::string, pid_t>& pids) {
  std::map<std::string, Usage> out;
  for (const auto& [name, pid] : pids) {
    const auto entries = [&](const char* folder) {
      return std::distance(std::filesystem::directory_iterator(cat("/proc/", pid, "/", folder)), {});
    };
    out[name] = {static_cast<int64_t>(resident_bytes(pid)), entries("fd"), entries("task")};
  }
  return out;
}

std::map<std::string, pid_t> pids_of(const LocalCluster& cluster) {
  std::map<std::string, pid_t> pids;
  for (const char* name : {"rank0", "rank1", "api"}) pids[name] = cluster.process_pid(name);
  for (const char* node : {"head", "worker"}) pids[cat("agent of ", node)] = cluster.agent_pid(node);
  return pids;
}

/// Nobody runs, waits or holds anything.
bool quiet(const LocalCluster& cluster) {
  const auto now = metrics(cluster);
  const auto zero = [&](const char* name) { return now.contains(name) && now.at(name) == 0; };
  return zero("glm53_num_requests_running") && zero("glm53_num_requests_waiting") && zero("glm53_kv_blocks_used") &&
         zero("glm53_state_slots_used");
}

ClusterOptions small_cache() {
  ClusterOptions options;
  options.fake_rank = false;
  options.head["serve.max_seqs"] = "6";
  options.head["serve.max_context"] = "1536";
  options.head["memory.kv_bytes"] = "\"12MiB\"";
  options.head["cache.snapshots"] = "10";
  options.head["cache.interval"] = "256";
  options.head["cache.spill_memory_bytes"] = "\"8MiB\"";
  options.head["sched.reserve_output"] = "16";
  options.head["engine.threads"] = "1";
  return options;
}

}  // namespace

TEST_CASE("load: every answer as alone, everything given back, no process grows") {
  const char* setting = std::getenv("GLM53_SOAK_SECONDS");
  const auto length = std::chrono::seconds(parse_int(setting != nullptr ? setting : "20").value_or(20));
  LocalCluster cluster(small_cache());
  cluster.up();
  auto asked = questions();
  for (size_t i = 0; i < asked.size(); ++i) {
    Json alone = asked[i].body;
    alone["cache_salt"] = cat("alone-", i);  // nothing is found in the cache
    asked[i].answer = cluster.stream(alone, 300s, [](const std::string&) {});
    REQUIRE(!asked[i].answer.empty());
  }
  std::cout << asked.size() << " requests have run alone" << std::endl;

  // Memory counts from the time when everything has been in use once.
  Tally tally;
  const auto begin = Clock::now(), until = begin + length, settled = begin + length / 4;
  const auto pids = pids_of(cluster);
  REQUIRE(wait_for([&] { return quiet(cluster); }, 30s));
  const auto idle = usage(pids);
  std::vector<std::jthread> clients;
  for (unsigned i = 0; i < kClients; ++i) clients.emplace_back([&, i] { one_client(cluster, asked, i, until, tally); });
  std::map<std::string, int64_t> first, last;
  const auto pause = std::clamp<Clock::duration>(length / 30, 500ms, 10s);
  for (auto next = begin + pause; Clock::now() < until; next += pause) {
    std::this_thread::sleep_until(std::min(until, next));
    auto& most = Clock::now() < settled ? first : last;
    std::string line;
    for (const auto& [name, used] : usage(pids)) {
      most[name] = std::max(most[name], used.bytes);
      line += cat(", ", name, " ", human_bytes(used.bytes));
    }
    std::cout << std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - begin).count()
              << " s: " << tally.answers << " answers, " << tally.left << " left early, " << tally.faults << " faults"
              << line << std::endl;
  }
  clients.clear();

  for (const auto& text : tally.texts) MESSAGE(text);
  CHECK(tally.faults == 0);
  CHECK(tally.answers > 0);
  CHECK(tally.left > 0);
  CHECK(wait_for([&] { return quiet(cluster); }, 30s));
  const auto counted = metrics(cluster);
  for (const char* name :
       {"glm53_num_preemptions_total", "glm53_prefix_cache_hits_total", "glm53_prefix_cache_blocks_evicted_total",
        "glm53_prefix_cache_snapshots_evicted_total", "glm53_restores_total"}) {
    INFO(name);
    REQUIRE(counted.contains(name));
    CHECK(counted.at(name) > 0);
    std::cout << name << " " << counted.at(name) << std::endl;
  }
  // The same processes as in the beginning, as large, with as many descriptors and threads.
  CHECK(cluster.generation() == 1);
  CHECK(pids_of(cluster) == pids);
  const auto after = usage(pids);
  for (const auto& name : kProcesses) {
    CAPTURE(name);
    CHECK(last[name] <= first[name] + first[name] / 20 + kGrowth);
    CHECK(after.at(name).descriptors <= idle.at(name).descriptors + 1);
    CHECK(after.at(name).threads <= idle.at(name).threads + 1);
  }
  CHECK(cluster.ctl({"stop"}).code == 0);
}
