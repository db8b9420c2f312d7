// Ranks of the real engine die or stand still under many clients: these notice a pause, and get what they would have
// got.
#include <atomic>
#include <signal.h>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/e2e/helpers.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

constexpr int kStreams = 16, kPlain = 4;

/// All clients at the same time, each with a prompt of its own; what they got, in their order. `each` is called with
/// every piece of a stream, on its client's thread.
std::vector<std::string> crowd(const LocalCluster& cluster, const std::function<void()>& each) {
  std::vector<std::string> answers(kStreams + kPlain);
  std::vector<std::thread> clients;
  for (int i = 0; i < kStreams + kPlain; ++i) {
    clients.emplace_back([&, i] {
      std::string& answer = answers[static_cast<size_t>(i)];
      const std::string prompt = cat("Count from 1 to ", 20 + i, ".");
      try {
        answer = i < kStreams ? cluster.stream_chat(prompt, 120, [&](const std::string&) { each(); })
                              : cluster.chat(prompt, 120);
      } catch (const std::exception& e) {
        answer = cat("client ", i, ": ", std::string_view(e.what()));
      }
    });
  }
  for (std::thread& t : clients) t.join();
  return answers;
}

/// The same crowd twice; in the middle of the second run `signal` goes to the rank.
void disturb(LocalCluster& cluster, const std::string& rank, int signal) {
  cluster.up();
  const std::vector<std::string> expected = crowd(cluster, [] {});
  for (const std::string& answer : expected) CHECK(contains(answer, "1, 2, 3, 4, 5"));
  const pid_t pid = cluster.process_pid(rank), api = cluster.process_pid("api");
  REQUIRE(pid > 0);
  std::atomic<int> pieces = 0;
  std::atomic<bool> sent = false;
  const std::vector<std::string> answers = crowd(cluster, [&] {
    // Some have much of their answer then, some a little, some are waiting.
    if (++pieces == 40) sent = ::kill(pid, signal) == 0;
  });
  CHECK(sent);
  for (size_t i = 0; i < answers.size(); ++i) {
    CAPTURE(i);
    CHECK(answers[i] == expected[i]);
  }
  CHECK(cluster.wait_up(1));
  CHECK(cluster.process_pid("api") == api);
  CHECK(cluster.status()["cluster"]["restarts"] == 1);
}

}  // namespace

TEST_CASE("kill -9 of rank 1 under 16 streams and 4 plain clients: all get the text of an undisturbed run") {
  LocalCluster cluster(real_engine());
  disturb(cluster, "rank1", SIGKILL);
}

TEST_CASE("kill -9 of rank 0 under 16 streams and 4 plain clients: all get the text of an undisturbed run") {
  LocalCluster cluster(real_engine());
  disturb(cluster, "rank0", SIGKILL);
}

TEST_CASE("a rank that stands still is given up by the collective it misses; nobody loses an answer") {
  ClusterOptions options = real_engine();
  options.head["ranks.collective_timeout"] = "\"5s\"";
  options.head["ranks.stop_grace"] = "\"1s\"";
  LocalCluster cluster(options);
  disturb(cluster, "rank1", SIGSTOP);
}

TEST_CASE("a request present at two deaths is answered as an error; one present at the second only gets its text") {
  LocalCluster cluster(real_engine());
  cluster.up();
  const std::string prompt = "Count from 1 to 39.";
  const std::string expected = cluster.chat(prompt, 120);
  CHECK(contains(expected, "1, 2, 3, 4, 5"));
  std::atomic<int> poison_pieces = 0, other_pieces = 0;
  std::string error, answer;
  std::thread poison([&] {
    const Json body = {{"messages", Json::array({{{"role", "user"}, {"content", "Count from 1 to 30."}}})},
                       {"max_tokens", 2000},
                       {"temperature", 0},
                       {"ignore_eos", true},
                       {"stream", true},
                       {"chat_template_kwargs", {{"enable_thinking", false}}}};
    try {
      cluster.stream(body, 120s, [&](const std::string&) { ++poison_pieces; });
    } catch (const std::exception& e) {
      error = e.what();
    }
  });
  const bool started = wait_for([&] { return poison_pieces >= 3; });
  const pid_t rank = cluster.process_pid("rank1");
  const bool first = started && rank > 0 && ::kill(rank, SIGKILL) == 0 && cluster.wait_up(1);
  std::thread other([&] {
    try {
      answer = cluster.stream_chat(prompt, 120, [&](const std::string&) { ++other_pieces; });
    } catch (const std::exception& e) {
      answer = e.what();
    }
  });
  const bool both = wait_for([&] { return other_pieces >= 1; });
  const pid_t pid = cluster.process_pid("rank1");
  const bool second = first && both && pid > 0 && ::kill(pid, SIGKILL) == 0;
  poison.join();
  other.join();
  CHECK(first);
  CHECK(second);
  CHECK(contains(error, "died twice"));
  CHECK(answer == expected);
  CHECK(cluster.wait_up(2));
  CHECK(cluster.status()["cluster"]["restarts"] == 2);
}
