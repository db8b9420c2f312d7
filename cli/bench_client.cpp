#include "cli/bench_client.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include <nlohmann/json.hpp>
#include <sys/resource.h>

#include "cli/api_target.h"
#include "common/error.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using namespace std::chrono_literals;

/// A closed loop whose request failed waits this long, so that a server that refuses at once is not stormed.
constexpr auto kAfterFailure = 100ms;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string body_of(const Workload& load, const Turn& turn) {
  Json messages = Json::array();
  for (const BenchMessage& message : turn.messages)
    messages.push_back({{"role", std::string(message.role)}, {"content", message.text}});
  return dump({{"messages", std::move(messages)},
               {"temperature", load.temperature},
               {"seed", turn.seed},
               {"max_tokens", load.max_tokens},
               {"ignore_eos", !load.stop_at_end},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}},
               {"chat_template_kwargs", {{"enable_thinking", false}}}});
}

/// The run: hands out turns to its threads and collects their samples.
class LoadRun {
 public:
  LoadRun(const BenchTarget& target, const Workload& load, double tokens_per_word)
      : target_(target), load_(load), pool_(load, tokens_per_word), arrivals_(load.rate, load.seed) {}

  std::vector<BenchSample> run() {
    const size_t threads = load_.requests > 0 ? std::min(load_.concurrency, load_.requests) : load_.concurrency;
    {
      std::vector<std::jthread> clients;
      for (size_t i = 0; i < threads; ++i) clients.emplace_back([this] { client(); });
    }
    if (thrown_) std::rethrow_exception(thrown_);
    return std::move(samples_);
  }

 private:
  struct Job {
    Turn turn;
    double wanted;
  };

  void client() noexcept {
    try {
      while (auto job = load_.rate > 0 ? next_arrival() : next_free()) {
        BenchSample sample = exchange(*job);
        const bool failed = sample.end == SampleEnd::failed;
        {
          const std::scoped_lock lock(mutex_);
          std::optional<std::string> answer;
          if (sample.end == SampleEnd::finished) answer = std::move(sample.answer);
          pool_.finished(job->turn, sample.ended, std::move(answer));
          samples_.push_back(std::move(sample));
        }
        changed_.notify_all();
        if (failed && load_.rate <= 0) std::this_thread::sleep_for(kAfterFailure);
      }
    } catch (...) {
      const std::scoped_lock lock(mutex_);
      thrown_ = std::current_exception();
      over_ = true;
    }
    changed_.notify_all();
  }

  BenchSample exchange(const Job& job) const {
    BenchSample sample;
    sample.session = job.turn.session;
    sample.turn = job.turn.turn;
    sample.key = job.turn.key;
    sample.wanted = job.wanted;
    return stream_chat(
        {target_.api, target_.keys.at(job.turn.key), body_of(load_, job.turn), load_.timeout, job.turn.abort}, start_,
        std::move(sample));
  }

  /// Open loop: requests come when they come, whatever the server does.
  std::optional<Job> next_arrival() {
    double wanted = 0;
    {
      const std::scoped_lock lock(mutex_);
      if (over_ || pool_.exhausted()) return std::nullopt;
      wanted = arrivals_.next();
      over_ = load_.duration > 0 && wanted >= load_.duration;
      if (over_) return std::nullopt;
    }
    std::this_thread::sleep_until(start_ +
                                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(wanted)));
    const std::scoped_lock lock(mutex_);
    auto turn = pool_.take(seconds_since(start_));
    if (!turn) return std::nullopt;
    return Job{std::move(*turn), wanted};
  }

  /// Closed loop: the next request as soon as a session wants one.
  std::optional<Job> next_free() {
    std::unique_lock lock(mutex_);
    while (true) {
      const double now = seconds_since(start_);
      if (over_ || pool_.exhausted() || (load_.duration > 0 && now >= load_.duration)) return std::nullopt;
      if (auto turn = pool_.take(now)) return Job{std::move(*turn), now};
      double wait = pool_.next_ready().value_or(now + 1) - now;
      if (load_.duration > 0) wait = std::min(wait, load_.duration - now);
      changed_.wait_for(lock, std::chrono::duration<double>(std::clamp(wait, 1e-4, 1.0)));
    }
  }

  const BenchTarget& target_;
  const Workload& load_;
  const Clock::time_point start_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable changed_;
  // guarded by mutex_
  SessionPool pool_;
  PoissonArrivals arrivals_;
  std::vector<BenchSample> samples_;
  std::exception_ptr thrown_;
  bool over_ = false;
};

}  // namespace

std::optional<int64_t> count_tokens(const BenchTarget& target, const std::string& text) {
  HttpClient client(target.api, target.keys.front());
  const HttpAnswer answer = client.request("POST", "/tokenize", dump({{"prompt", text}}));
  if (answer.status == 401 || answer.status == 403) {
    throw Error(Code::denied, cat("the API answered ", answer.status, ": ", api_error_message(answer.body)),
                "name the file of API keys with --key-file");
  }
  if (answer.status != 200) return std::nullopt;
  const Json json = parse_json(answer.body);
  const auto count = json.find("count");
  if (count == json.end() || !count->is_number_integer()) return std::nullopt;
  return count->get<int64_t>();
}

std::vector<BenchSample> run_load(const BenchTarget& target, const Workload& load, double tokens_per_word) {
  return LoadRun(target, load, tokens_per_word).run();
}

struct IdleConnections::Impl {
  const BenchTarget& target;
  std::vector<UniqueFd> sockets;
};

IdleConnections::IdleConnections(const BenchTarget& target, int count)
    : impl_(std::make_unique<Impl>(Impl{target, {}})) {
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);  // where it is refused, opening says so
  }
  std::string_view rest = target.api;
  if (!rest.starts_with("http://"))
    throw Error(Code::usage, "--idle-connections needs an API at http://ADDRESS:PORT", "leave the option out");
  rest.remove_prefix(7);
  const size_t colon = rest.rfind(':');
  const auto port = colon == std::string_view::npos ? std::optional<int64_t>(80) : parse_int(rest.substr(colon + 1));
  if (!port || *port < 1 || *port > 65535) throw Error(Code::usage, cat("'", target.api, "' has no port"));
  for (int i = 0; i < count; ++i) {
    impl_->sockets.push_back(
        connect_tcp(std::string(rest.substr(0, colon)), static_cast<uint16_t>(*port), Clock::now() + 10s));
  }
}

IdleConnections::~IdleConnections() = default;

IdleResult IdleConnections::measure() const {
  std::vector<double> times;
  for (int i = 0; i < 50; ++i) {
    HttpClient client(impl_->target.api, impl_->target.keys.front());
    const auto begin = Clock::now();
    const HttpAnswer answer = client.request("GET", "/v1/models");
    if (answer.status != 200) throw Error(Code::unavailable, cat("/v1/models answered ", answer.status));
    times.push_back(seconds_since(begin));
  }
  return {impl_->sockets.size(), spread_of(std::move(times))};
}

}  // namespace glm53::cli
