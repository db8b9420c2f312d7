#include "bench/step_bench.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <set>
#include <thread>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/loader/config.h"
#include "engine/loader/formats.h"
#include "engine/loader/generated.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr int kMostRowsOfOne = 8;  // rows of one sequence's window; more rows are more sequences

double us_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

/// One rank of several: what the others would bring is a copy of what is there.
class LoneRank final : public Communicator {
 public:
  LoneRank(Ops& ops, int size) : ops_(ops), size_(size) {}
  Shard shard() const override { return {0, size_}; }
  void all_reduce(Tensor io) override {
    if (size_ == 1) return;
    const Tensor flat = io.reshaped({io.elements()});
    if (sums_.bytes() < flat.bytes()) sums_ = ops_.allocate(flat.bytes(), Place::device);
    ops_.copy(sums_.view(flat.dtype, {flat.elements()}), flat);
  }
  void gather(Tensor in, Tensor out) override { all_gather(in, out); }
  void all_gather(Tensor in, Tensor out) override {
    const int64_t n = in.dim(1);
    for (int r = 0; r < size_; ++r) ops_.copy(out.columns(r * n, (r + 1) * n), in);
  }
  void broadcast(Tensor, int) override {}
  void abort() noexcept override {}

 private:
  Ops& ops_;
  int size_;
  Buffer sums_;
};

std::unique_ptr<Ops> best_backend() {
  try {
    return make_cuda_ops(0);
  } catch (const Error& e) {
    std::printf("cpu (no GPU: %s)\n", e.what());
    return make_cpu_ops(static_cast<int>(std::max(std::thread::hardware_concurrency(), 1U)));
  }
}

KvFormat kv_format(const std::string& text, const Ops& ops) {
  if (text == "auto") return ops.activation() == Dtype::f32 ? KvFormat::f32 : KvFormat::fp8_c528;
  if (text == "f32") return KvFormat::f32;
  if (text == "bf16") return KvFormat::bf16;
  if (text == "fp8_c528") return KvFormat::fp8_c528;
  if (text == "int8_c528") return KvFormat::int8_c528;
  throw Error(Code::usage, cat("--kv ", text), "auto, f32, bf16, fp8_c528 or int8_c528");
}

/// Bytes a second that a copy reads and writes together.
double measure_copy(Ops& ops) {
  const bool device = ops.activation() != Dtype::f32;
  const int64_t bytes = device ? int64_t{1} << 30 : int64_t{1} << 26;
  const Buffer from = ops.allocate(static_cast<size_t>(bytes), Place::device),
               to = ops.allocate(static_cast<size_t>(bytes), Place::device);
  double best = 1e30;
  for (int rep = 0; rep < 12; ++rep) {
    const auto begin = Clock::now();
    ops.copy(to.view(Dtype::u8, {bytes}), from.view(Dtype::u8, {bytes}));
    ops.synchronize();
    best = std::min(best, us_since(begin));
  }
  return 2.0 * static_cast<double>(bytes) / best / 1e3;
}

/// Rows of windows at the end of a context, and the memory they are in.
class Window {
 public:
  Window(Ops& ops, int rows, int context) : ops_(ops) {
    seqs = (rows + kMostRowsOfOne - 1) / kMostRowsOfOne;
    const int each = (rows + seqs - 1) / seqs, blocks = (context + each + kBlockTokens - 1) / kBlockTokens;
    std::vector<int32_t> token, position, row_seq, row_begin{0}, slot, committed, table;
    for (int s = 0; s < seqs; ++s) {
      const int mine = std::min(each, rows - s * each);
      for (int r = 0; r < mine; ++r) {
        token.push_back((s * 131 + r * 17 + 5) % 90);
        position.push_back(context + r);
        row_seq.push_back(s);
      }
      row_begin.push_back(static_cast<int32_t>(token.size()));
      slot.push_back(s);
      committed.push_back(context);
      for (int b = 0; b < blocks; ++b) table.push_back(1 + s * blocks + b);
    }
    pools = {1 + seqs * blocks, seqs, 1};
    const int64_t r = rows, n = seqs;
    batch.rows = batch.window_rows = batch.logit_rows = rows;
    batch.seqs = batch.window_seqs = seqs;
    batch.token = ints(token, {r});
    batch.position = ints(position, {r});
    batch.row_seq = ints(row_seq, {r});
    batch.row_begin = ints(row_begin, {n + 1});
    batch.slot = ints(slot, {n});
    batch.committed = ints(committed, {n});
    batch.replay = ints(std::vector<int32_t>(static_cast<size_t>(n), 0), {n});
    batch.block_table = ints(table, {n, blocks});
    std::vector<int32_t> all(static_cast<size_t>(rows));
    for (int i = 0; i < rows; ++i) all[static_cast<size_t>(i)] = i;
    batch.logit_row = ints(all, {r});
    const std::vector<int32_t> none(static_cast<size_t>(2 * n), -1);
    batch.export_pos = ints(none, {n, 2});
    batch.export_snap = ints(none, {n, 2});
  }

  Batch batch;
  PoolSizes pools;
  int seqs = 0;

 private:
  Tensor ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
    const auto n = static_cast<int64_t>(values.size());
    memory_.push_back(ops_.allocate(values.size() * sizeof(int32_t), Place::device));
    ops_.copy(memory_.back().view(Dtype::i32, {n}), Tensor::of(const_cast<int32_t*>(values.data()), Dtype::i32, {n}));
    ops_.synchronize();
    return memory_.back().view(Dtype::i32, shape);
  }
  Ops& ops_;
  std::vector<Buffer> memory_;
};

/// The model, and how many bytes each of its parts holds.
struct Rank {
  Rank(Ops& ops, const StepOptions& o, const ModelLimits& limits)
      : config(load_model_config(o.model)), comm(ops, o.tp) {
    FormatPolicy policy = FormatPolicy::as_stored();
    const auto named = [](const std::string& text) { return text == "bf16" ? std::string("stored") : text; };
    set_format(policy, "dense", named(o.dense));
    set_format(policy, "head", named(o.head.empty() ? o.dense : o.head));
    auto source = make_generated_source(config, policy, comm.shard(), ops, {.expert_bits = o.expert_bits});
    const WeightSource& taken = *source;
    model = load_model(config, std::move(source), limits, ops, comm, [&](std::string_view) {
      const uint64_t before = parts.empty() ? 0 : total;
      total = taken.bytes_taken();
      parts.push_back(static_cast<double>(total - before));
    });
    for (const auto& [group, bytes] : model->weight_bytes())
      if (group == name(WeightGroup::routed_expert)) routed = static_cast<double>(bytes);
    sparse = static_cast<int>(std::count(config.mlp.begin(), config.mlp.end(), MlpKind::sparse));
  }

  /// Bytes of layer i that every step reads, without routed experts.
  double fixed(int i) const { return parts[static_cast<size_t>(i) + 1] - (is_sparse(i) ? routed / sparse : 0); }
  /// Of one expert of one layer.
  double expert() const { return sparse == 0 ? 0 : routed / sparse / config.experts; }
  bool is_sparse(int i) const { return config.mlp[static_cast<size_t>(i)] == MlpKind::sparse; }
  bool is_kda(int i) const { return config.attention[static_cast<size_t>(i)] == AttentionKind::kda; }
  /// Final norm and head; of the embedding only a few rows are read.
  double outer() const { return parts[0] - static_cast<double>(config.vocab * config.hidden * 2); }
  /// Caches that layer i reads and writes for sequences of that context.
  double cached(int i, int seqs, int context, Dtype activation) const {
    const CacheGeometry g = model->geometry();
    if (is_kda(i)) return 2.0 * 4 * seqs * g.kda_heads * g.head_dim * g.head_dim;
    const double latent = g.format == KvFormat::f32    ? 4.0 * g.latent
                          : g.format == KvFormat::bf16 ? 2.0 * g.latent
                                                       : 1.0 * g.latent + 16;
    return seqs * (std::min(context, config.index_topk) * latent +
                   1.0 * context / g.kpool * g.index_dim * static_cast<double>(size_of(activation)));
  }

  ModelConfig config;
  LoneRank comm;
  std::unique_ptr<Model> model;
  std::vector<double> parts;  ///< embedding, norm and head; then the layers
  uint64_t total = 0;
  double routed = 0;
  int sparse = 0;
};

/// Distinct experts of each layer for a batch.
std::vector<int> distinct_experts(Ops& ops, Rank& rank, const Batch& batch, const Caches& caches) {
  std::vector<int> out(static_cast<size_t>(rank.config.layers), 0);
  rank.model->set_probe([&](const std::string& what, const Tensor& value) {
    if (!what.starts_with("router") || !what.ends_with(".index")) return;
    const Buffer host = ops.allocate(value.bytes(), Place::pinned);
    const Tensor ids = host.view(Dtype::i32, {value.elements()});
    ops.copy(ids, value.reshaped({value.elements()}));
    ops.synchronize();
    const std::set<int32_t> distinct(ids.as<int32_t>(), ids.as<int32_t>() + ids.elements());
    out.at(static_cast<size_t>(std::stoi(what.substr(6)))) = static_cast<int>(distinct.size());
  });
  rank.model->forward(batch, caches);
  ops.synchronize();
  rank.model->set_probe({});
  return out;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// Median time of each of the calls, which take turns, so that the weights of one are cold again when it comes back.
std::vector<double> time_all(Ops& ops, const std::vector<std::function<void()>>& calls, int reps, bool graph) {
  std::vector<std::unique_ptr<Graph>> graphs;
  for (const auto& call : calls) call();  // scratch grows outside of graphs
  ops.synchronize();
  if (graph)
    for (const auto& call : calls) graphs.push_back(ops.capture(call));
  std::vector<std::vector<double>> us(calls.size());
  for (int rep = 0; rep < reps + 2; ++rep)
    for (size_t i = 0; i < calls.size(); ++i) {
      const auto begin = Clock::now();
      if (graph)
        graphs[i]->launch();
      else
        calls[i]();
      ops.synchronize();
      if (rep >= 2) us[i].push_back(us_since(begin));
    }
  std::vector<double> out;
  for (const auto& each : us) out.push_back(median(each));
  return out;
}

/// performance.md §6.2: bytes at the share of bandwidth reached here (0.93 at most), exchanges and graph nodes.
double projected_us(double bytes, double us, double copy_gbs, int layers) {
  constexpr double kGb10 = 235e3, kExchange = 11.5, kNode = 1.0, kNodes = 20;  // bytes a µs; µs; µs; a layer
  const double share = std::clamp(bytes / us / 1e3 / copy_gbs, 0.01, 0.93);
  return bytes / (share * kGb10) + layers * (2 * kExchange + kNodes * kNode);
}

void measure(Ops& ops, Rank& rank, const StepOptions& o, int rows, StepReport& report) {
  const Window window(ops, rows, o.context);
  const OwnedCaches owned = make_caches(rank.model->geometry(), window.pools, ops);
  const std::vector<int> experts = distinct_experts(ops, rank, window.batch, owned.caches);
  const auto bytes_of = [&](int i) {
    return rank.fixed(i) + experts[static_cast<size_t>(i)] * rank.expert() +
           rank.cached(i, window.seqs, o.context, ops.activation());
  };
  const int layers = rank.config.layers;
  std::vector<std::function<void()>> calls;
  if (o.layers) {
    for (int i = 0; i < layers; ++i)
      calls.emplace_back([&, i] { rank.model->forward_part(window.batch, owned.caches, {i, i + 1}); });
  } else {
    calls.emplace_back([&] { rank.model->forward(window.batch, owned.caches); });
  }
  const std::vector<double> us = time_all(ops, calls, o.reps, o.graph);
  for (size_t i = 0; i < us.size(); ++i) {
    const auto layer = static_cast<int>(i);
    StepResult r{.name = "step", .rows = rows, .us = us[i], .bytes = rank.outer()};
    if (o.layers) {
      r.name =
          cat("layer ", layer, rank.is_kda(layer) ? " (kda, " : " (mla, ", rank.is_sparse(layer) ? "moe)" : "dense)");
      r.bytes = bytes_of(layer) + (layer + 1 == layers ? rank.outer() : 0);
      r.experts = experts[i];
    } else {
      for (int l = 0; l < layers; ++l) r.bytes += bytes_of(l);
      for (const int n : experts) r.experts += rank.sparse == 0 ? 0 : static_cast<double>(n) / rank.sparse;
    }
    if (report.backend == "cuda") r.projected = projected_us(r.bytes, r.us, report.copy_gbs, o.layers ? 1 : layers);
    report.results.push_back(r);
  }
}

Json to_json(const StepReport& report, const StepOptions& o) {
  Json results = Json::array();
  for (const StepResult& r : report.results) {
    const double gbs = r.bytes / r.us / 1e3;
    results.push_back({{"name", r.name},
                       {"rows", r.rows},
                       {"us", r.us},
                       {"bytes", r.bytes},
                       {"gbs", gbs},
                       {"of_copy", gbs / report.copy_gbs},
                       {"experts", r.experts},
                       {"gb10_us_projected", r.projected}});
  }
  return {{"bench", o.layers ? "layer" : "step"},
          {"backend", report.backend},
          {"activation", report.activation},
          {"copy_gbs", report.copy_gbs},
          {"model", o.model},
          {"tp", o.tp},
          {"context", o.context},
          {"dense", o.dense},
          {"head", o.head.empty() ? o.dense : o.head},
          {"graph", o.graph},
          {"results", results}};
}

/// Times of an earlier run beside those of this one.
void compare(const Json& now, const std::string& path) {
  const Json old = parse_json(read_file(path));
  std::printf("\nagainst %s (copy %.0f GB/s there)\n", path.c_str(), old.at("copy_gbs").get<double>());
  for (const Json& r : now.at("results"))
    for (const Json& before : old.at("results"))
      if (before.at("name") == r.at("name") && before.at("rows") == r.at("rows"))
        std::printf("%-22s %4d rows %10.1f -> %10.1f us  %.3f\n", r.at("name").get<std::string>().c_str(),
                    r.at("rows").get<int>(), before.at("us").get<double>(), r.at("us").get<double>(),
                    r.at("us").get<double>() / before.at("us").get<double>());
}

}  // namespace

StepOptions parse_step_options(int argc, char** argv, const char* program) {
  StepOptions o;
  const auto format = [](const std::string& text) {
    if (text != "bf16" && text != "fp8" && text != "int4")
      throw Error(Code::usage, cat("format ", text), "bf16, fp8 or int4");
    return text;
  };
  const auto number = [](const std::string& text, int low, int high) {
    const auto value = parse_int(text);
    if (!value || *value < low || *value > high) throw Error(Code::usage, cat("'", text, "'"), cat(low, " to ", high));
    return static_cast<int>(*value);
  };
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (i + 1 == argc) throw Error(Code::usage, cat(program, ": '", word, "' needs a value"));
    const std::string value = argv[++i];
    if (word == "--model")
      o.model = value;
    else if (word == "--json")
      o.json = value;
    else if (word == "--compare")
      o.compare = value;
    else if (word == "--dense")
      o.dense = format(value);
    else if (word == "--head")
      o.head = format(value);
    else if (word == "--kv")
      o.kv = value;
    else if (word == "--context")
      o.context = number(value, 1, 1 << 20);
    else if (word == "--tp")
      o.tp = number(value, 1, 64);
    else if (word == "--reps")
      o.reps = number(value, 1, 10000);
    else if (word == "--expert-bits")
      o.expert_bits = number(value, 0, 8);
    else if (word == "--graph")
      o.graph = number(value, 0, 1) == 1;
    else if (word == "--rows") {
      o.rows.clear();
      for (const std::string& part : split(value, ',')) o.rows.push_back(number(part, 1, 512));
    } else
      throw Error(Code::usage, cat(program, ": unknown option '", word, "'"), "the head of the source names them");
  }
  return o;
}

int run_step_bench(const StepOptions& o) {
  const std::unique_ptr<Ops> ops = best_backend();
  const int most = *std::max_element(o.rows.begin(), o.rows.end());
  ModelLimits limits;
  limits.max_rows = limits.max_logit_rows = most;
  limits.max_seqs = (most + kMostRowsOfOne - 1) / kMostRowsOfOne;
  limits.max_context = o.context + kMostRowsOfOne;
  limits.kv = kv_format(o.kv, *ops);
  StepReport report;
  report.backend = ops->backend();
  report.activation = name(ops->activation());
  report.copy_gbs = measure_copy(*ops);
  const auto begin = Clock::now();
  Rank rank(*ops, o, limits);
  std::printf("%s, activations %s; copy %.0f GB/s (read and written); %s of weights made in %.1f s\n",
              report.backend.c_str(), report.activation.c_str(), report.copy_gbs,
              human_bytes(static_cast<int64_t>(rank.total)).c_str(), us_since(begin) / 1e6);
  std::printf("%-22s %4s %10s %9s %8s %8s %8s  %s\n", "", "rows", "us", "MB", "GB/s", "of copy", "experts",
              "GB10 us, projected (no measurement)");
  for (const int rows : o.rows) {
    const size_t first = report.results.size();
    measure(*ops, rank, o, rows, report);
    for (size_t i = first; i < report.results.size(); ++i) {
      const StepResult& r = report.results[i];
      const double gbs = r.bytes / r.us / 1e3;
      std::printf("%-22s %4d %10.1f %9.2f %8.1f %8.2f %8.1f  %.0f\n", r.name.c_str(), r.rows, r.us, r.bytes / 1e6, gbs,
                  gbs / report.copy_gbs, r.experts, r.projected);
    }
    std::fflush(stdout);
  }
  const Json json = to_json(report, o);
  if (!o.json.empty()) write_file(o.json, dump(json) + "\n");
  if (!o.compare.empty()) compare(json, o.compare);
  return 0;
}

}  // namespace glm53
