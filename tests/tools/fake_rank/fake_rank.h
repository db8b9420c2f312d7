// A rank without a model: one thread, one poll loop.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "common/file.h"
#include "common/rank_contract.h"
#include "engine/runtime/wire.h"
#include "tests/tools/fake_rank/rules.h"

namespace glm53::fake {

class FakeRank {
 public:
  FakeRank(RankConfig config, Rules rules);
  /// Start, serve, stop; returns the exit code. Throws Error.
  int run();

 private:
  using Clock = std::chrono::steady_clock;
  struct Request {
    std::vector<int32_t> answer;  ///< what is still to be said
    uint32_t said = 0;
    int32_t left = 0;  ///< max_tokens minus said
    Clock::time_point next;
  };
  struct AdminClient {
    UniqueFd fd;
    std::string line;
  };

  void enter(Phase phase);
  void misbehave(const Rule& rule);
  /// Serves sockets and signals for that long. Throws Error(cancelled) when told to stop at once.
  void pump(std::chrono::milliseconds time);
  void serve_ready();
  void meet_peers();
  void accept_peers();
  void join_rank0();
  void on_signal();
  void on_peer(size_t index);
  void on_admin(size_t index);
  std::string answer_admin(const std::string& line);
  void connect_api();
  void drop_api();
  void on_api_frame();
  void admit();
  void speak();
  void say(uint64_t id, Request& request);
  wire::Stats stats() const;

  RankConfig config_;
  Rules rules_;
  Notifier notifier_;
  UniqueFd signals_, admin_, api_;
  std::vector<UniqueFd> peers_;
  std::vector<AdminClient> admin_clients_;
  std::map<uint64_t, Request> running_;
  std::deque<std::pair<uint64_t, wire::Submit>> waiting_;
  Clock::time_point next_api_try_{}, next_stats_{}, next_watchdog_{}, ready_since_{};
  uint64_t steps_ = 0, prompt_tokens_ = 0, generated_tokens_ = 0;
  bool ready_ = false, gate_open_ = false, draining_ = false;
};

}  // namespace glm53::fake
