// The scheduler and the prefix cache of a rank, as they are, against the cost model of two GB10 (cost_gb10.h), in
// simulated time: no model runs. Prints a table and one JSON line.
//   bench_sim [--dense bf16|fp8|int4] [--experts alike|independent] [--prefill TOKENS_A_SECOND] [--chunk ROWS]
//             [--share PART] [--piece MS] [--agents N] [--context TOKENS] [--prompt TOKENS] [--decoders N]
//             [--layers N]   (1: a piece of a prompt passes the whole model in one step)
#include <algorithm>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "bench/cost_gb10.h"
#include "common/error.h"
#include "common/strings.h"
#include "engine/runtime/scheduler.h"

namespace glm53 {
namespace {

using Json = nlohmann::ordered_json;
using Tokens = std::vector<int32_t>;

constexpr int32_t kVocab = 154880;
constexpr uint64_t kSettled = 50;  // tokens of each decoder, before anything is measured
constexpr uint64_t kLong = 1000;   // the long prompt's number
constexpr int64_t kBlockBytes = 394944, kSnapshotBytes = 73820000, kKvBytes = int64_t{14} << 30;

struct Settings {
  Gb10Cost cost;
  int32_t chunk = 2048, agents = 4, context = 60000, prompt = 300000, decoders = 3;
  int32_t layers = 45;  // between which pieces of prompts may stop
  double share = 0.4, piece_ms = 600;
};

int32_t token_of(uint64_t seed, uint64_t position) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + position * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 31) * 0x94D049BB133111EBu;
  return static_cast<int32_t>((x ^ x >> 29) % kVocab);
}

void extend(Tokens& tokens, uint64_t seed, size_t to) {
  for (size_t p = tokens.size(); p < to; ++p) tokens.push_back(token_of(seed, p));
}

/// A rank whose steps take as long as the model of costs says.
class Simulation {
 public:
  using Seen = std::function<void(const wire::Delta&)>;
  explicit Simulation(const Settings& s)
      : cost_(s.cost),
        layers_(s.layers),
        table_({.vocab = kVocab, .text_vocab = kVocab, .eos = {}}),
        scheduler_(limits(s), table_, 1) {
    scheduler_.set_gate(true);
  }
  double now_ms() const { return now_; }
  const Scheduler& scheduler() const { return scheduler_; }
  void submit(wire::Submit request) { scheduler_.submit(std::move(request)); }

  /// One step, or, when there is nothing to do, the time until `next`. Deltas go to `seen` when the step has ended.
  void turn(double next, const Seen& seen) {
    const auto plan = scheduler_.plan(Scheduler::Time(static_cast<int64_t>(now_)));
    if (plan) {
      StepResult result;
      result.step = plan->step;
      result.device_ms = run(*plan, result);
      now_ += result.device_ms;
      scheduler_.complete(result);
    }
    const std::vector<wire::Delta> deltas = scheduler_.take_deltas();
    for (const wire::Delta& d : deltas) {
      if (d.finish == "error") throw Error(Code::internal, cat("request ", d.id, " was refused: ", d.error));
      seen(d);
    }
    if (!plan && deltas.empty()) now_ = std::max(now_, next);
  }

  /// Milliseconds of a step, and the tokens that it gives.
  double run(const StepPlan& plan, StepResult& result) {
    const auto give = [&](const SeqStep& s) {
      if (s.logits > 0)
        result.seqs.push_back({s.request, {{token_of(s.request, static_cast<uint64_t>(s.start)), 0, {}}}, 0});
    };
    const bool apart = plan.piece != LayerSpan{};
    if (apart && plan.piece.first == 0) held_ = {};
    Gb10Cost::Step step;
    for (const SeqStep& s : plan.seqs) {
      const auto rows = static_cast<int32_t>(s.tokens.size());
      const bool window = s.regime == Regime::window;
      (apart && !window ? held_.step : step).add(window, rows, s.start + rows);
      if (apart && !window)
        held_.seqs.push_back(s);
      else
        give(s);
    }
    if (!apart) return cost_.ms(step);
    if (plan.piece.last == layers_)
      for (const SeqStep& s : held_.seqs) give(s);
    return cost_.ms(step) + cost_.part_ms(held_.step, plan.piece.last - plan.piece.first, layers_);
  }

  static SchedulerLimits limits(const Settings& s) {
    SchedulerLimits l;
    l.max_context = 1 << 20;
    l.prefill_chunk = s.chunk;
    l.max_rows = s.chunk + kChunk;
    l.blocks = static_cast<int32_t>(kKvBytes / kBlockBytes);
    l.snaps = static_cast<int32_t>(std::clamp<int64_t>(kKvBytes * 15 / 100 / kSnapshotBytes, 8, 64));
    l.prefill_share = s.share;
    l.max_piece_ms = s.piece_ms;
    l.layers = s.layers;
    return l;
  }

 private:
  const Gb10Cost cost_;
  const int32_t layers_;
  SamplingTable table_;
  Scheduler scheduler_;
  double now_ = 0;
  struct {
    Gb10Cost::Step step;
    std::vector<SeqStep> seqs;
  } held_;  // a piece between two layers
};

wire::Submit request_of(uint64_t id, Tokens prompt, int32_t output) {
  wire::Submit r;
  r.id = id;
  r.prompt = std::move(prompt);
  r.sampling.max_tokens = output;
  r.sampling.ignore_eos = true;
  return r;
}

Json quantiles(std::vector<double> values) {
  if (values.empty()) return nullptr;
  std::sort(values.begin(), values.end());
  const auto at = [&](double q) { return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))]; };
  return {{"count", values.size()}, {"p50", at(0.5)}, {"p95", at(0.95)}, {"p99", at(0.99)}, {"max", values.back()}};
}

/// Agents under one system prompt, each a conversation that grows to `context` tokens: the answer and a tool's result
/// are added, then the agent asks again.
Json agents(const Settings& s) {
  constexpr size_t kHead = 8000, kResult = 1700, kAnswer = 300;
  constexpr double kToolMs = 2000;
  struct Agent {
    Tokens text;
    double ready = 0, asked = 0;
    bool waits = false;
    size_t before = 0;  // tokens of its last prompt
  };
  std::vector<Agent> all(static_cast<size_t>(s.agents));
  for (size_t a = 0; a < all.size(); ++a) {
    extend(all[a].text, 1, kHead);
    all[a].ready = static_cast<double>(a) * 500;
  }
  Simulation sim(s);
  std::vector<double> first_token;
  uint64_t id = 0, prompts = 0, cached = 0, reusable = 0, turns = 0;
  bool anybody = false;
  std::map<uint64_t, size_t> agent_of;
  for (;;) {
    double next = 1e18;
    bool busy = false;
    for (size_t a = 0; a < all.size(); ++a) {
      Agent& agent = all[a];
      if (!agent.waits && agent.ready <= sim.now_ms() && agent.text.size() < static_cast<size_t>(s.context)) {
        extend(agent.text, 100 + a, agent.text.size() + kResult);
        wire::Submit r = request_of(++id, agent.text, kAnswer);
        r.boundaries = {static_cast<int32_t>(kHead), static_cast<int32_t>(agent.text.size()) - 4};
        prompts += r.prompt.size();
        reusable += agent.before > 0 ? agent.before : anybody ? kHead : 0;
        agent.before = r.prompt.size();
        agent.asked = sim.now_ms();
        agent.waits = true;
        agent_of[id] = a;
        ++turns;
        sim.submit(std::move(r));
      }
      const bool goes_on = agent.text.size() < static_cast<size_t>(s.context);
      busy = busy || agent.waits || goes_on;
      if (!agent.waits && goes_on) next = std::min(next, agent.ready);
    }
    if (!busy) break;
    sim.turn(next, [&](const wire::Delta& d) {
      Agent& agent = all[agent_of.at(d.id)];
      if (d.index == 0) {
        first_token.push_back(sim.now_ms() - agent.asked);
        cached += d.cached_tokens;
        anybody = true;
      }
      for (const int32_t t : d.tokens) agent.text.push_back(t);
      if (d.finish.empty()) return;
      agent.waits = false;
      agent.ready = sim.now_ms() + kToolMs;
    });
  }
  const wire::Stats stats = sim.scheduler().stats();
  return {{"agents", s.agents},
          {"context", s.context},
          {"turns", turns},
          {"hit_ratio", static_cast<double>(cached) / static_cast<double>(reusable)},
          {"cached_of_all", static_cast<double>(cached) / static_cast<double>(prompts)},
          {"snapshots", stats.snaps_total},
          {"snapshots_evicted", stats.snaps_evicted},
          {"first_token_ms", quantiles(first_token)},
          {"minutes", sim.now_ms() / 60000}};
}

/// Requests that generate, and a cold prompt that comes then: what they notice of it until its first token. With
/// prompt 0, nothing comes.
Json long_prompt(const Settings& s, int32_t prompt) {
  constexpr double kAlone = 20000;
  Simulation sim(s);
  for (int32_t d = 0; d < s.decoders; ++d) {
    Tokens text;
    extend(text, 200 + static_cast<uint64_t>(d), 2000);
    sim.submit(request_of(static_cast<uint64_t>(d) + 1, std::move(text), 500000));
  }
  std::map<uint64_t, double> last;
  std::map<uint64_t, uint64_t> count;
  std::vector<double> gaps;
  double asked = -1, first = -1;
  uint64_t tokens = 0;
  const auto settled = [&] {
    return std::count_if(count.begin(), count.end(), [](const auto& c) { return c.second >= kSettled; }) == s.decoders;
  };
  const auto seen = [&](const wire::Delta& d) {
    if (d.id == kLong) {
      first = first < 0 ? sim.now_ms() : first;
      return;
    }
    ++count[d.id];
    if (asked >= 0) {
      gaps.push_back(sim.now_ms() - last[d.id]);
      ++tokens;
    }
    last[d.id] = sim.now_ms();
  };
  while (first < 0) {
    if (asked < 0 && settled()) {
      asked = sim.now_ms();
      Tokens text;
      extend(text, 300, static_cast<size_t>(prompt));
      if (prompt > 0) sim.submit(request_of(kLong, std::move(text), 1));
    }
    if (prompt == 0 && asked >= 0 && sim.now_ms() >= asked + kAlone) first = sim.now_ms();
    if (first < 0) sim.turn(sim.now_ms() + 1, seen);
  }
  const double seconds = (first - asked) / 1000;
  return {{"prompt", prompt},
          {"decoders", s.decoders},
          {"first_token_s", seconds},
          {"prompt_tokens_per_s", prompt / seconds},
          {"tokens_per_s_each", s.decoders > 0 ? static_cast<double>(tokens) / seconds / s.decoders : 0},
          {"gap_ms", quantiles(gaps)}};
}

Settings parse(const std::vector<std::string>& arguments) {
  Settings s;
  for (size_t i = 0; i < arguments.size(); i += 2) {
    const std::string& name = arguments[i];
    if (i + 1 == arguments.size()) throw Error(Code::usage, cat(name, " needs a value"));
    const std::string& value = arguments[i + 1];
    const auto number = [&] {
      const auto v = parse_double(value);
      if (!v || *v < 0 || *v > 1e6) throw Error(Code::usage, cat(name, " ", value), "a number from 0 to 1000000");
      return *v;
    };
    const auto whole = [&] { return static_cast<int32_t>(number()); };
    if (name == "--dense")
      s.cost.set_dense(value);
    else if (name == "--experts")
      s.cost.set_experts(value);
    else if (name == "--prefill")
      s.cost.prompt_tokens_per_s = std::max(number(), 1.0);
    else if (name == "--chunk")
      s.chunk = whole();
    else if (name == "--share")
      s.share = number();
    else if (name == "--piece")
      s.piece_ms = number();
    else if (name == "--agents")
      s.agents = whole();
    else if (name == "--context")
      s.context = whole();
    else if (name == "--prompt")
      s.prompt = whole();
    else if (name == "--layers")
      s.layers = whole();
    else if (name == "--decoders")
      s.decoders = whole();
    else
      throw Error(Code::usage, cat("unknown option '", name, "'"), "see the top of bench/bench_sim.cpp");
  }
  return s;
}

std::string fixed(double value, int digits) {
  std::string out(32, ' ');
  out.resize(static_cast<size_t>(std::snprintf(out.data(), out.size(), "%.*f", digits, value)));
  return out;
}

void run(const Settings& s) {
  const Json conversations = agents(s), alone = long_prompt(s, 0), loaded = long_prompt(s, s.prompt);
  Settings none = s;
  none.decoders = 0;
  const Json undisturbed = long_prompt(none, s.prompt);
  const auto of = [](const Json& j, const char* name) { return j[name].get<double>(); };
  std::cout << "simulated time, cost model of two GB10 (bench/cost_gb10.h): " << s.cost.text() << "; chunk " << s.chunk
            << ", share " << s.share << ", piece " << s.piece_ms << " ms, layers " << s.layers << "\n\n"
            << s.agents << " agents to " << s.context << " tokens, " << conversations["turns"] << " turns\n"
            << "  hit ratio                    " << fixed(of(conversations, "hit_ratio"), 4)
            << " of the reusable tokens (goal 0.95), " << fixed(of(conversations, "cached_of_all"), 4) << " of all\n"
            << "  first token                  " << fixed(of(conversations["first_token_ms"], "p50") / 1000, 1)
            << " s median, " << fixed(of(conversations["first_token_ms"], "max") / 1000, 1) << " s at most\n\n"
            << s.prompt << " tokens, cold, beside " << s.decoders << " decoders\n"
            << "  gap of a decoder             " << fixed(of(loaded["gap_ms"], "p50"), 0) << " ms median, "
            << fixed(of(loaded["gap_ms"], "p99"), 0) << " p99, " << fixed(of(loaded["gap_ms"], "max"), 0)
            << " at most (goal 150); alone " << fixed(of(alone["gap_ms"], "max"), 0) << "\n"
            << "  tokens/s of a decoder        " << fixed(of(loaded, "tokens_per_s_each"), 1) << ", alone "
            << fixed(of(alone, "tokens_per_s_each"), 1) << " ("
            << fixed(of(loaded, "tokens_per_s_each") / of(alone, "tokens_per_s_each"), 2) << ")\n"
            << "  first token of the prompt    " << fixed(of(loaded, "first_token_s"), 0) << " s, without decoders "
            << fixed(of(undisturbed, "first_token_s"), 0) << " s\n\n"
            << Json{{"model", s.cost.text()}, {"chunk", s.chunk},          {"share", s.share},
                    {"piece_ms", s.piece_ms}, {"agents", conversations},   {"alone", alone},
                    {"long_prompt", loaded},  {"undisturbed", undisturbed}}
                   .dump()
            << "\n";
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  try {
    glm53::run(glm53::parse({argv + 1, argv + argc}));
    return 0;
  } catch (const glm53::Error& e) {
    std::cerr << "bench_sim: " << e.line() << "\n";
    return glm53::ctl_exit(e.code());
  } catch (const std::exception& e) {
    std::cerr << "bench_sim: " << e.what() << "\n";
    return 1;
  }
}
