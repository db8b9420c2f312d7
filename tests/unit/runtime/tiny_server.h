// One rank of the model of the repository: scheduler, executor, caches.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/json.h"
#include "engine/draft/dflash.h"
#include "engine/draft/mtp.h"
#include "engine/runtime/model_executor.h"
#include "engine/runtime/scheduler.h"

namespace glm53::test {

using Tokens = std::vector<int32_t>;
inline const std::string kModel = GLM53_SOURCE_DIR "/models/glm53-tiny";
inline const std::string kDflash = GLM53_SOURCE_DIR "/models/glm53-tiny-dflash2";

struct Sample {
  std::string name;
  Tokens prompt, output;
  double margin;
};
inline std::vector<Sample> samples() {
  std::vector<Sample> all;
  for (const auto& s : parse_json(read_file(GLM53_SOURCE_DIR "/tests/golden/data/glm53-tiny/samples.json")))
    all.push_back({s["name"], s["prompt_ids"], s["output_ids"], s["smallest_margin"]});
  return all;
}

/// Model, caches, scheduler and executor of one rank.
struct Server {
  Server() : Server(1024) {}
  explicit Server(int max_context) {
    limits.max_rows = 256;
    limits.max_seqs = 6;
    limits.max_context = max_context;
    limits.max_logit_rows = 6 * 16;
    limits.taps = load_dflash_config(kDflash).tap_layers;
    ops = make_cpu_ops(2);
    comm = make_single_communicator();
    model = load_model(kModel, FormatPolicy::as_stored(), limits, *ops, *comm);
    caches = make_caches(model->geometry(), {.blocks = 60, .slots = 6, .snaps = 6}, *ops);
    const auto vocab = static_cast<int32_t>(model->config().vocab);
    table = std::make_unique<SamplingTable>(TokenSpace{vocab, 2660, model->config().eos});
    restart();
  }
  /// Afresh, with settings of any kind; pools and model stay.
  template <class Change>
  void restart_with(Change change) {
    SchedulerLimits l;
    l.max_context = limits.max_context;
    l.max_seqs = 6;
    l.max_rows = limits.max_rows;
    l.prefill_chunk = 128;
    l.max_window = limits.max_window;
    l.layers = model->config().layers;
    l.blocks = 60;
    l.snap_interval = 0;
    change(l);
    scheduler = std::make_unique<Scheduler>(l, *table, 1);
    scheduler->set_gate(true);
    executor = std::make_unique<ModelExecutor>(*model, caches.caches, *ops, table.get(), nullptr, drafter);
  }
  void restart(int snaps = 0, int seqs = 6) {
    restart_with([&](SchedulerLimits& l) {
      l.snaps = snaps;
      l.max_seqs = seqs;
    });
  }
  /// The drafters of the repository, by name.
  Drafter& real_drafter(const std::string& kind) {
    std::unique_ptr<Drafter>& made = drafters[kind];
    if (!made) {
      made = kind == "mtp" ? make_mtp_drafter(kModel, FormatPolicy::as_stored(), {.max_drafts = 4}, *model, *ops, *comm)
                           : make_dflash_drafter(kDflash, FormatPolicy::as_stored(), *model, *ops, *comm);
      made->make_pools({.blocks = 60, .slots = 6, .snaps = 6});
    }
    return *made;
  }
  /// False when there was nothing to run.
  bool turn() {
    const auto plan = scheduler->plan(Scheduler::Time(0));
    if (!plan) return false;
    executor->submit(*plan);
    StepResult result = executor->poll().value();
    result.device_ms = cost(*plan);
    scheduler->complete(result);
    for (const wire::Delta& d : scheduler->take_deltas()) {
      Tokens& t = output[d.id];
      t.insert(t.end(), d.tokens.begin(), d.tokens.end());
      auto& l = logprobs[d.id];
      l.insert(l.end(), d.logprobs.begin(), d.logprobs.end());
      finish[d.id] = d.finish;
      cached[d.id] = std::max(cached[d.id], d.cached_tokens);
    }
    return true;
  }
  /// Milliseconds as the scheduler is to believe: a row of a prompt is half as long as a step of generation, so that
  /// pieces beside others pass the layers one by one.
  double cost(const StepPlan& plan) {
    double ms = 0;
    size_t prompt = 0;
    for (const SeqStep& s : plan.seqs) {
      if (s.regime == Regime::window)
        ms = 2;
      else
        prompt += s.tokens.size();
    }
    if (plan.piece == LayerSpan{}) return ms + static_cast<double>(prompt);
    ++parts;
    standing = plan.piece.last < model->config().layers;
    if (plan.piece.first == 0) piece_rows = prompt;
    return ms + static_cast<double>(piece_rows) * (plan.piece.last - plan.piece.first) / model->config().layers;
  }
  Tokens alone(const wire::Submit& r) {
    forget();
    scheduler->submit(r);
    while (!scheduler->idle()) turn();
    return output[r.id];
  }

  /// What requests were answered.
  void forget() {
    output.clear();
    logprobs.clear();
    finish.clear();
  }

  Drafter* drafter = nullptr;  // for the next restart
  ModelLimits limits;
  std::unique_ptr<Ops> ops;
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Model> model;
  OwnedCaches caches;
  std::map<std::string, std::unique_ptr<Drafter>> drafters;
  std::unique_ptr<SamplingTable> table;
  std::unique_ptr<Scheduler> scheduler;
  std::unique_ptr<ModelExecutor> executor;
  std::map<uint64_t, Tokens> output;
  std::map<uint64_t, std::vector<wire::TokenLogprobs>> logprobs;
  std::map<uint64_t, std::string> finish;
  std::map<uint64_t, uint32_t> cached;
  size_t parts = 0, piece_rows = 0;  // steps that took a piece through some of the layers; rows of the newest
  bool standing = false;             // a piece stands between two layers
};

inline Server& server() {
  static Server s;
  return s;
}

inline wire::Submit request(uint64_t id, const Tokens& prompt, int32_t max_tokens) {
  wire::Submit r;
  r.id = id;
  r.prompt = prompt;
  r.seed = id;
  r.sampling.temperature = 0;
  r.sampling.max_tokens = max_tokens;
  return r;
}

}  // namespace glm53::test
