#include "cli/bench_workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

constexpr std::array<std::string_view, 48> kWords = {
    "the",  "a",     "fox",   "river", "barn",  "friend", "wanted", "to",    "learn",  "paint", "and",  "asked",
    "for",  "help",  "small", "old",   "tree",  "house",  "walked", "over",  "under",  "hill",  "blue", "green",
    "sun",  "cat",   "dog",   "boat",  "found", "stone",  "garden", "said",  "looked", "at",    "sea",  "happy",
    "rain", "bread", "with",  "big",   "bird",  "sang",   "in",     "night", "story",  "told",  "of",   "day"};

void need(bool fine, std::string_view option, std::string_view what) {
  if (!fine) throw Error(Code::usage, cat(option, " must be ", what));
}

double seconds_of(const std::string& text, std::string_view option) {
  const auto time = parse_duration(text);
  need(time && time->count() >= 0, option, "a time such as 500ms, 30s or 5m");
  return std::chrono::duration<double>(*time).count();
}

std::vector<int> weights_of(const BenchOptions& options) {
  if (options.key_weights.empty()) return std::vector<int>(static_cast<size_t>(options.keys), 1);
  std::vector<int> weights;
  for (const std::string& part : split(options.key_weights, ',')) {
    const auto weight = parse_int(trim(part));
    need(weight && *weight >= 1 && *weight <= 1000, "--key-weights", "whole numbers from 1 to 1000, such as 9,1");
    weights.push_back(static_cast<int>(*weight));
  }
  need(weights.size() == static_cast<size_t>(options.keys), "--key-weights",
       cat("one number for each of --keys ", options.keys));
  return weights;
}

uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
  BenchRandom random(a);
  BenchRandom next(random.next() ^ b);
  return BenchRandom(next.next() ^ c).next();
}

size_t words(int tokens, double tokens_per_word) {
  return std::max<size_t>(1, static_cast<size_t>(std::lround(tokens / tokens_per_word)));
}

}  // namespace

Workload checked_workload(const BenchOptions& o) {
  need(std::isfinite(o.rate) && o.rate >= 0 && o.rate <= 1e5, "--rate", "between 0 and 100000 requests a second");
  need(o.concurrency >= 0 && o.concurrency <= 4096, "--concurrency", "between 1 and 4096");
  need(o.requests >= 0, "--requests", "at least 1");
  need(o.sessions >= 0, "--sessions", "at least 1");
  need(o.turns >= 1 && o.turns <= 100000, "--turns", "at least 1");
  need(o.system_tokens >= 0 && o.system_tokens <= 4000000, "--system-tokens", "between 0 and 4000000");
  need(o.prompt_tokens >= 1 && o.prompt_tokens <= 4000000, "--prompt-tokens", "between 1 and 4000000");
  need(o.max_tokens >= 1, "--max-tokens", "at least 1");
  need(o.abort_share >= 0 && o.abort_share <= 1, "--abort-share", "between 0 and 1");
  need(o.keys >= 1 && o.keys <= 1000, "--keys", "between 1 and 1000");
  need(std::isfinite(o.temperature) && o.temperature >= 0, "--temperature", "at least 0");
  need(o.idle_connections >= 0 && o.idle_connections <= 60000, "--idle-connections", "between 0 and 60000");

  Workload load;
  load.rate = o.rate;
  load.duration = o.duration.empty() ? 0 : seconds_of(o.duration, "--duration");
  need(o.duration.empty() || load.duration > 0, "--duration", "more than 0");
  load.think = seconds_of(o.think, "--think");
  load.abort_share = o.abort_share;
  load.abort_within = seconds_of(o.abort_within, "--abort-within");
  need(load.abort_within >= 0.001, "--abort-within", "at least 1ms");
  load.timeout = seconds_of(o.timeout, "--timeout");
  need(load.timeout >= 0.001, "--timeout", "at least 1ms");
  load.temperature = o.temperature;
  load.concurrency = static_cast<size_t>(o.concurrency > 0 ? o.concurrency : o.rate > 0 ? 256 : 4);
  load.requests = static_cast<size_t>(o.requests > 0 ? o.requests : load.duration > 0 ? 0 : 32);
  load.sessions = static_cast<size_t>(o.sessions > 0 ? o.sessions : 0);
  if (load.sessions == 0 && load.rate <= 0) load.sessions = load.concurrency;
  if (load.sessions > 0 && load.rate > 0) {
    throw Error(Code::usage, "--sessions does not go with --rate", "an open loop has as many sessions as come");
  }
  load.turns = o.turns;
  load.system_tokens = o.system_tokens;
  load.prompt_tokens = o.prompt_tokens;
  load.max_tokens = o.max_tokens;
  load.idle_connections = o.idle_connections;
  load.same = o.same;
  load.stop_at_end = o.stop_at_end;
  load.key_weights = weights_of(o);
  load.seed = o.seed;
  return load;
}

uint64_t BenchRandom::next() {
  state_ += 0x9E3779B97F4A7C15ULL;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

double BenchRandom::uniform() {
  return static_cast<double>(next() >> 11) * 0x1.0p-53;
}

double BenchRandom::exponential(double mean) {
  return -std::log1p(-uniform()) * mean;
}

size_t BenchRandom::below(size_t limit) {
  return static_cast<size_t>(next() % limit);
}

std::string random_text(uint64_t seed, size_t words) {
  BenchRandom random(seed);
  std::string text;
  size_t left = 0;  // in this sentence
  for (size_t i = 0; i < words; ++i) {
    std::string word(kWords[random.below(kWords.size())]);
    if (left == 0) {
      left = 6 + random.below(8);
      word[0] = static_cast<char>(word[0] - 'a' + 'A');
    }
    text += (text.empty() ? "" : " ") + word;
    if (--left == 0 || i + 1 == words) text += '.';
  }
  return text;
}

std::string system_prompt(const Workload& load, double tokens_per_word) {
  return random_text(mix(load.seed, 1, 0), words(load.system_tokens, tokens_per_word));
}

SessionPool::SessionPool(const Workload& load, double tokens_per_word)
    : load_(load), tokens_per_word_(tokens_per_word), think_(load.seed ^ 0x7411) {}

std::optional<Turn> SessionPool::take(double now) {
  if (exhausted()) return std::nullopt;
  if (!waiting_.empty() && waiting_.front().ready <= now) {
    Waiting session = std::move(waiting_.front());
    waiting_.pop_front();
    return make(std::move(session));
  }
  if (load_.sessions > 0 && live_ >= load_.sessions) return std::nullopt;
  Waiting fresh{now, begun_, 0, {}};
  if (load_.system_tokens > 0) {
    fresh.history.push_back({"system", system_prompt(load_, tokens_per_word_)});
  }
  ++begun_;
  ++live_;
  return make(std::move(fresh));
}

Turn SessionPool::make(Waiting session) {
  Turn turn;
  turn.session = session.session;
  turn.turn = session.turn;
  turn.key = key_of(session.session);
  turn.seed = mix(load_.seed, session.session + 2, static_cast<uint64_t>(session.turn)) >> 1;
  turn.ready = session.ready;
  turn.messages = std::move(session.history);
  const uint64_t text_seed = load_.same ? mix(load_.seed, 0, static_cast<uint64_t>(session.turn)) : turn.seed;
  turn.messages.push_back({"user", random_text(text_seed, words(load_.prompt_tokens, tokens_per_word_))});
  BenchRandom random(turn.seed ^ 0xAB047);
  if (random.uniform() < load_.abort_share) {
    AbortPoint point;
    // Half leave by the clock, mostly while they queue or are prefilled; half in the middle of the answer.
    if (random.uniform() < 0.5) {
      point.after_seconds = random.uniform() * load_.abort_within;
    } else {
      point.after_pieces = 1 + static_cast<int>(random.below(static_cast<size_t>(load_.max_tokens)));
    }
    turn.abort = point;
  }
  ++started_;
  return turn;
}

void SessionPool::finished(const Turn& turn, double now, std::optional<std::string> answer) {
  if (!answer || turn.turn + 1 >= load_.turns) {
    --live_;
    return;
  }
  Waiting session{now + think_.exponential(load_.think), turn.session, turn.turn + 1, turn.messages};
  session.history.push_back({"assistant", std::move(*answer)});
  const auto at = std::upper_bound(waiting_.begin(), waiting_.end(), session.ready,
                                   [](double ready, const Waiting& other) { return ready < other.ready; });
  waiting_.insert(at, std::move(session));
}

std::optional<double> SessionPool::next_ready() const {
  if (waiting_.empty()) return std::nullopt;
  return waiting_.front().ready;
}

size_t SessionPool::key_of(size_t session) const {
  const auto total = static_cast<size_t>(std::accumulate(load_.key_weights.begin(), load_.key_weights.end(), 0));
  if (total == 0) return 0;
  size_t place = session % total;
  for (size_t key = 0; key < load_.key_weights.size(); ++key) {
    const auto weight = static_cast<size_t>(load_.key_weights[key]);
    if (place < weight) return key;
    place -= weight;
  }
  return 0;
}

}  // namespace glm53::cli
