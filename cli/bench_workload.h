// What `glm53ctl bench serve` asks the server for: sessions, their prompts, when they come and which are aborted. Pure:
// no thread, no clock, no network; the same options give the same requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace glm53::cli {

/// The command line of bench serve.
struct BenchOptions {
  std::string api, key_file;        ///< "" = asked from the agent
  double rate = 0;                  ///< requests a second, as a Poisson process; 0: closed loop
  int concurrency = 0;              ///< requests in flight, in an open loop at most; 0: 4, in an open loop 256
  int requests = 0;                 ///< to start; 0: no limit but the duration, 32 without one
  std::string duration;             ///< start none after this time; "" = no limit but `requests`
  int sessions = 0;                 ///< conversations that take turns; 0: concurrency, in an open loop as many as come
  int turns = 1;                    ///< requests of a session
  int system_tokens = 0;            ///< system prompt that all sessions share
  int prompt_tokens = 200;          ///< of what the user says in a turn
  int max_tokens = 128;             ///< of an answer
  bool same = false;                ///< every session says the same
  bool stop_at_end = false;         ///< let the model end answers; else they are max_tokens long
  std::string think = "0s";         ///< mean time of a session between answer and next turn
  double abort_share = 0;           ///< of requests whose client leaves at a random moment
  std::string abort_within = "2s";  ///< latest moment of the aborts that are set by time
  int keys = 1;                     ///< how many keys of the key file are used
  std::string key_weights;          ///< "9,1": shares of the sessions by key; "" = equal
  double temperature = 0;
  uint64_t seed = 1;
  int idle_connections = 0;      ///< open beside the load
  std::string timeout = "600s";  ///< longest silence of the server in a request
};

/// The options checked, with defaults filled in; times in seconds, 0 = none.
struct Workload {
  double rate = 0, duration = 0, think = 0, abort_share = 0, abort_within = 0, timeout = 0, temperature = 0;
  size_t concurrency = 0, requests = 0, sessions = 0;  ///< requests, sessions: 0 = no limit
  int turns = 1, system_tokens = 0, prompt_tokens = 0, max_tokens = 0, idle_connections = 0;
  bool same = false, stop_at_end = false;
  std::vector<int> key_weights;  ///< one a key
  uint64_t seed = 1;
};
/// Throws Error(usage) naming the option.
Workload checked_workload(const BenchOptions& options);

/// Random numbers that are the same on every machine (splitmix64).
class BenchRandom {
 public:
  explicit BenchRandom(uint64_t seed) : state_(seed) {}
  uint64_t next();
  double uniform();                 ///< 0 <= x < 1
  double exponential(double mean);  ///< 0 for mean 0
  size_t below(size_t limit);       ///< 0 ... limit - 1

 private:
  uint64_t state_;
};

/// `words` English words in sentences.
std::string random_text(uint64_t seed, size_t words);

/// The system prompt of a workload that has one.
std::string system_prompt(const Workload& load, double tokens_per_word);

struct BenchMessage {
  std::string_view role;
  std::string text;
};

/// When a client leaves: after a time, or after so many pieces of the answer.
struct AbortPoint {
  std::optional<double> after_seconds;
  int after_pieces = 0;
};

/// One request.
struct Turn {
  size_t session = 0;
  int turn = 0;  ///< 0 = the first of its session
  size_t key = 0;
  uint64_t seed = 0;
  double ready = 0;  ///< seconds since the start at which the session wanted it
  std::optional<AbortPoint> abort;
  std::vector<BenchMessage> messages;
};

/// The conversations and whose turn it is. One owner calls everything, with the seconds since the start.
class SessionPool {
 public:
  /// `tokens_per_word` of the server's tokenizer on random_text().
  SessionPool(const Workload& load, double tokens_per_word);
  /// The next request: of the session that waits longest, or of a new one. Nothing when all of `sessions` are busy or
  /// thinking, or when the limit of requests is reached (then exhausted()).
  std::optional<Turn> take(double now);
  /// The answer of a turn; nothing when it was aborted or failed, which ends the session.
  void finished(const Turn& turn, double now, std::optional<std::string> answer);
  /// When the next thinking session will be ready; nothing when none is thinking.
  std::optional<double> next_ready() const;
  bool exhausted() const { return load_.requests > 0 && started_ >= load_.requests; }
  size_t started() const { return started_; }

 private:
  struct Waiting {
    double ready;
    size_t session;
    int turn;
    std::vector<BenchMessage> history;
  };
  Turn make(Waiting session);
  size_t key_of(size_t session) const;

  const Workload load_;
  const double tokens_per_word_;
  BenchRandom think_;
  std::deque<Waiting> waiting_;  // by ready
  size_t live_ = 0, begun_ = 0, started_ = 0;
};

/// Arrival times of an open loop: seconds since the start, increasing.
class PoissonArrivals {
 public:
  PoissonArrivals(double rate, uint64_t seed) : rate_(rate), random_(seed ^ 0xA331) {}
  double next() { return at_ += random_.exponential(1 / rate_); }

 private:
  const double rate_;
  BenchRandom random_;
  double at_ = 0;
};

}  // namespace glm53::cli
