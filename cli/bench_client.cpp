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

std::chrono::milliseconds as_milliseconds(double seconds) {
  return std::max(1ms, std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds)));
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

/// One streamed request.
class Exchange {
 public:
  Exchange(const Workload& load, const Turn& turn, Clock::time_point start, double wanted)
      : load_(load), turn_(turn), start_(start) {
    sample_.session = turn.session;
    sample_.turn = turn.turn;
    sample_.key = turn.key;
    sample_.wanted = wanted;
    sample_.sent = seconds_since(start);
  }

  BenchSample run(const BenchTarget& target) {
    try {
      HttpClient client(target.api, target.keys.at(turn_.key));
      const auto clock = turn_.abort ? turn_.abort->after_seconds : std::nullopt;
      client.set_timeout(5s, as_milliseconds(std::min(load_.timeout, clock.value_or(load_.timeout))));
      SseParser events([this](std::string_view, std::string_view data) { take(data); });
      const HttpAnswer answer =
          client.stream("POST", "/v1/chat/completions", body_of(load_, turn_), [&](std::string_view bytes) {
            sample_.status = 200;
            events.feed(bytes);
            return !time_to_leave();
          });
      sample_.status = answer.status;
      end(answer);
    } catch (const Error& e) {
      // A client that leaves by the clock while nothing comes is one whose patience (the read limit) is over.
      fail_or_abort(e.code() == Code::stalled && turn_.abort && turn_.abort->after_seconds, e.what());
    } catch (const std::exception& e) {
      fail_or_abort(false, e.what());
    }
    sample_.ended = seconds_since(start_);
    return std::move(sample_);
  }

 private:
  bool time_to_leave() {
    if (done_ || !turn_.abort) return false;
    const bool by_clock =
        turn_.abort->after_seconds && seconds_since(start_) - sample_.sent >= *turn_.abort->after_seconds;
    left_ = by_clock || (turn_.abort->after_pieces > 0 && pieces_ >= turn_.abort->after_pieces);
    return left_;
  }

  void end(const HttpAnswer& answer) {
    if (answer.status != 200) {
      fail_or_abort(false, api_error_message(answer.body));
    } else if (left_) {
      fail_or_abort(true, "");
    } else if (!error_.empty() || !done_) {
      fail_or_abort(false, error_.empty() ? "the stream ended before [DONE]" : error_);
    } else {
      sample_.end = SampleEnd::finished;
    }
  }

  void fail_or_abort(bool aborted, const std::string& why) {
    sample_.end = aborted ? SampleEnd::aborted : SampleEnd::failed;
    if (aborted && sample_.output_tokens == 0) sample_.output_tokens = pieces_;
    if (!aborted) sample_.error = why;
  }

  void take(std::string_view data) {
    if (data == "[DONE]") {
      done_ = true;
      return;
    }
    const Json event = parse_json(data);
    if (event.contains("error")) error_ = api_error_message(std::string(data));
    if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) take_usage(*usage);
    const auto choices = event.find("choices");
    if (choices == event.end() || !choices->is_array() || choices->empty()) return;
    const Json& choice = choices->front();
    if (!choice.contains("delta") || !choice["delta"].is_object()) return;
    for (const char* member : {"reasoning_content", "content"}) {
      const auto text = choice["delta"].find(member);
      if (text == choice["delta"].end() || !text->is_string() || text->get_ref<const std::string&>().empty()) continue;
      if (member == std::string_view("content")) sample_.answer += text->get_ref<const std::string&>();
      piece();
    }
  }

  void take_usage(const Json& usage) {
    sample_.prompt_tokens = usage.value("prompt_tokens", int64_t{0});
    sample_.output_tokens = usage.value("completion_tokens", int64_t{0});
    const auto details = usage.find("prompt_tokens_details");
    if (details != usage.end() && details->is_object())
      sample_.cached_tokens = details->value("cached_tokens", int64_t{0});
  }

  void piece() {
    const double now = seconds_since(start_);
    if (sample_.first) {
      sample_.gaps.push_back(now - last_);
    } else {
      sample_.first = now;
    }
    last_ = now;
    ++pieces_;
  }

  const Workload& load_;
  const Turn& turn_;
  const Clock::time_point start_;
  BenchSample sample_;
  double last_ = 0;
  int pieces_ = 0;
  bool done_ = false, left_ = false;
  std::string error_;
};

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
        BenchSample sample = Exchange(load_, job->turn, start_, job->wanted).run(target_);
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
