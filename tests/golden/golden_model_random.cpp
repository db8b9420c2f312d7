// The whole text model against the vectors of tests/golden/data/tiny-random: logits, streams of every layer, decoding
// with caches.
#include <algorithm>
#include <cmath>
#include <set>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/golden/model_harness.h"

namespace glm53::golden {
namespace {

// Two right fp32 programs differ by 0.6e-5 to 2.5e-5 here (README of the data); its own limit is 1e-3.
constexpr float kTolerance = 1e-4f;

ModelLimits limits() {
  ModelLimits l;
  l.max_rows = 320;
  l.max_context = 512;
  l.max_logit_rows = 320;
  return l;
}

Runner runner(Ops& ops, Communicator& comm, int sequences = 1, KvFormat kv = KvFormat::f32) {
  ModelLimits l = limits();
  l.kv = kv;
  return Runner(tiny_random(), l, sequences, ops, comm);
}

TEST_CASE("tiny-random: logits of all prompts") {
  const Reference golden(tiny_random("golden_logits.safetensors"));
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run = runner(ops, *comm, 6);
    int sequence = 0;
    for (const int n : {1, 5, 17, 64, 65, 300}) {
      CAPTURE(n);
      const Values logits = run.prefill(sequence++, golden.ids(cat("ids.", n)), n);
      const Values expected = golden.values(cat("fp32.logits.", n));
      const float difference = largest_difference(logits.part(n - expected.rows(), n), expected);
      MESSAGE("prompt of " << n << ": " << difference);
      CHECK(difference < kTolerance);
    }
  });
}

TEST_CASE("tiny-random: streams after every layer, mean and final norm") {
  const Reference golden(tiny_random("golden_hidden.safetensors"));
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run = runner(ops, *comm, 2);
    run.watch();
    int sequence = 0;
    for (const int n : {17, 300}) {
      run.prefill(sequence++, golden.ids(cat("ids.", n)), n);
      const std::vector<int32_t> positions = golden.ids(cat("positions.", n));
      const auto compare = [&](const std::string& probe, const std::string& name) {
        const Values all = run.seen(probe), expected = golden.values(cat(name, ".", n));
        float worst = 0;
        for (size_t i = 0; i < positions.size(); ++i)
          worst =
              std::max(worst, largest_difference(all.part(positions[i], positions[i] + 1),
                                                 expected.part(static_cast<int64_t>(i), static_cast<int64_t>(i) + 1)));
        CAPTURE(name);
        CAPTURE(n);
        CHECK(worst < kTolerance);
      };
      for (int layer = 0; layer < 8; ++layer) compare(cat("layer", layer, ".streams"), cat("layer", layer));
      compare("mean", "mean");
      compare("norm", "norm");
    }
  });
}

/// Pools of one row of `topk` (token ids, -1 = none) that are complete at position t.
std::set<int> pools_of(std::span<const float> tokens, int kpool, int64_t t) {
  std::set<int> pools;
  for (const float token : tokens)
    if (token >= 0 && (static_cast<int>(token) / kpool + 1) * kpool <= t + 1)
      pools.insert(static_cast<int>(token) / kpool);
  return pools;
}

TEST_CASE("tiny-random: pools and experts that the whole model chooses") {
  const Reference golden(tiny_random("golden_modules.safetensors"));
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run = runner(ops, *comm, 2);
    run.watch();
    run.prefill(0, golden.ids("ids.300"), 300);
    const int kpool = run.model().config().kpool;
    for (const int layer : {3, 7}) {
      const Values topk = golden.values(cat("mla", layer, ".topk"));
      const Values &selected = run.seen(cat("mla", layer, ".selected")),
                   &count = run.seen(cat("mla", layer, ".n_selected"));
      int wrong = 0;
      for (int64_t t = 0; t < 300; ++t) {
        const auto row = selected.row(t);
        const std::set<int> ours(row.begin(), row.begin() + static_cast<int>(count.data[static_cast<size_t>(t)]));
        wrong += ours == pools_of(topk.row(t), kpool, t) ? 0 : 1;
      }
      CAPTURE(layer);
      CHECK(wrong == 0);
    }
    run.prefill(1, golden.ids("ids.65"), 65);
    const Values expected = golden.values("router2.index");
    const Values& index = run.seen("router2.index");
    for (int64_t t = 0; t < 65; ++t) {
      const auto a = index.row(t), b = expected.row(t);
      CHECK(std::set<float>(a.begin(), a.end()) == std::set<float>(b.begin(), b.end()));
    }
  });
}

TEST_CASE("tiny-random: decoding in the window regime, with recurrent and convolution state") {
  const Reference golden(tiny_random("golden_decode.safetensors"));
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run = runner(ops, *comm);
    const Values prompt = run.prefill(0, golden.ids("decode.ids"), 40);
    Values rows;
    CHECK(run.greedy(0, prompt, 16, &rows) == golden.ids("decode.tokens"));
    CHECK(largest_difference(rows, golden.values("decode.logits")) < kTolerance);
    CHECK(largest_difference(rows, golden.values("decode.logits_full_recompute")) < kTolerance);

    run.flush(0);
    Values state = fetch(ops, run.caches().state[0][0]);
    CHECK(largest_difference(state, golden.values("decode.kda0.state")) < kTolerance);
    // The reference keeps four columns a channel, oldest first; only the newest three matter.
    const Values conv = fetch(ops, run.caches().conv[0][0]), expected = golden.values("decode.kda0.conv_state");
    float worst = 0;
    for (int64_t c = 0; c < expected.rows(); ++c)
      for (int64_t j = 0; j < 3; ++j)
        worst = std::max(worst,
                         std::abs(conv.row(j)[static_cast<size_t>(c)] - expected.row(c)[static_cast<size_t>(j + 1)]));
    CHECK(worst < kTolerance);
  });
}

TEST_CASE("tiny-random: a prompt in pieces") {
  const Reference golden(tiny_random("golden_logits.safetensors"));
  const std::vector<int32_t> ids = golden.ids("ids.300");
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run = runner(ops, *comm, 5);
    const Values whole = run.prefill(0, ids, 300);
    const std::vector<int32_t> next = run.greedy(0, whole, 8);
    const Values on_grid = run.prefill(1, ids, 64);
    CHECK(same_bits(whole, on_grid));
    CHECK(run.greedy(1, on_grid, 8) == next);
    int sequence = 2;
    for (const int piece : {1, 7}) {
      CAPTURE(piece);
      const Values off_grid = run.prefill(sequence, ids, piece);
      CHECK(largest_difference(whole, off_grid) < kTolerance);
      CHECK(run.greedy(sequence++, off_grid, 8) == next);
    }
    // The window family token by token is another order of sums, not another result.
    Values windows;
    for (size_t i = 0; i < ids.size(); ++i) {
      const Values row = run.step({{sequence, {ids[i]}, Regime::window}});
      windows.data.insert(windows.data.end(), row.data.begin(), row.data.end());
    }
    CHECK(largest_difference(whole, windows) < kTolerance);
  });
}

TEST_CASE("tiny-random: rows do not depend on their neighbours or on padding") {
  const Reference golden(tiny_random("golden_logits.safetensors"));
  const std::vector<int32_t> a = golden.ids("ids.65"), b = golden.ids("ids.17"), more{5, 900, 17, 333};
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner run = runner(ops, *comm, 4);
    const Values a_alone = run.prefill(0, a, 65), b_alone = run.prefill(1, b, 17);
    const Values both = run.step({{2, a, Regime::chunk}, {3, b, Regime::chunk}}, true, 5);
    CHECK(same_bits(both.part(0, 65), a_alone));
    CHECK(same_bits(both.part(65, 82), b_alone));
    // A window of four rows, beside a window of one, equals four single rows bit for bit.
    Values single;
    for (const int32_t id : more) {
      const Values row = run.step({{0, {id}, Regime::window}});
      single.data.insert(single.data.end(), row.data.begin(), row.data.end());
    }
    const Values other = run.step({{1, {7}, Regime::window}});
    const Values window = run.step({{2, more, Regime::window}, {3, {7}, Regime::window}}, true, 3);
    CHECK(same_bits(window.part(0, 4), single));
    CHECK(same_bits(window.part(4, 5), other));
  });
}

TEST_CASE("tiny-random: cache formats stay near") {
  const Reference golden(tiny_random("golden_logits.safetensors"));
  const std::vector<int32_t> ids = golden.ids("ids.65");
  const Values expected = golden.values("fp32.logits.65");
  for_each_backend([&](Ops& ops) {
    const auto comm = make_single_communicator();
    Runner exact = runner(ops, *comm);
    const Values reference = exact.prefill(0, ids, 65);
    for (const KvFormat kv : {KvFormat::bf16, KvFormat::fp8_c528}) {
      Runner run = runner(ops, *comm, 1, kv);
      const Values logits = run.prefill(0, ids, 65);
      const Values& hidden = logits;
      double error = 0, size = 0;
      for (size_t i = 0; i < hidden.data.size(); ++i) {
        error += static_cast<double>(hidden.data[i] - reference.data[i]) *
                 static_cast<double>(hidden.data[i] - reference.data[i]);
        size += static_cast<double>(reference.data[i]) * static_cast<double>(reference.data[i]);
      }
      const double relative = std::sqrt(error / size);
      MESSAGE("cache format " << static_cast<int>(kv) << ": relative error of logits " << relative);
      CHECK(relative > 0);     // the format is really used
      CHECK(relative < 0.25);  // a random network amplifies; experts flip
    }
  });
}

}  // namespace
}  // namespace glm53::golden
