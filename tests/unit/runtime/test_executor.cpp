// The executor on the model of the repository: what a request gets does not depend on who runs beside it.
#include <limits>

#include <doctest/doctest.h>

#include "common/error.h"
#include "tests/unit/runtime/tiny_server.h"

using namespace glm53;
using namespace glm53::test;

namespace {

/// The model, but for logits that are no numbers in the given forward pass.
class Poisoned final : public Model {
 public:
  Poisoned(Model& inner, int pass) : inner_(inner), left_(pass) {}
  const ModelConfig& config() const override { return inner_.config(); }
  const ModelLimits& limits() const override { return inner_.limits(); }
  CacheGeometry geometry() const override { return inner_.geometry(); }
  SharedWeights shared() const override { return inner_.shared(); }
  std::vector<std::pair<std::string, size_t>> weight_bytes() const override { return inner_.weight_bytes(); }
  ForwardOut forward(const Batch& batch, const Caches& caches) override {
    const ForwardOut out = inner_.forward(batch, caches);
    if (--left_ == 0) static_cast<float*>(out.logits.data)[7] = std::numeric_limits<float>::quiet_NaN();
    return out;
  }
  ForwardOut forward_part(const Batch& batch, const Caches& caches, LayerSpan layers) override {
    return inner_.forward_part(batch, caches, layers);
  }
  void flush(std::span<const SlotId> slots, std::span<const int> replay, const Caches& caches) override {
    inner_.flush(slots, replay, caches);
  }
  void set_probe(Probe probe) override { inner_.set_probe(std::move(probe)); }

 private:
  Model& inner_;
  int left_;
};

}  // namespace

TEST_CASE("greedy samples with clear margins come out as recorded") {
  int compared = 0;
  for (const Sample& s : samples()) {
    if (s.margin < 1.5) continue;  // the weights here are quantised, the record is not
    CAPTURE(s.name);
    const size_t n = std::min<size_t>(s.output.size(), 30);
    CHECK(server().alone(request(1, s.prompt, static_cast<int32_t>(n))) ==
          Tokens(s.output.begin(), s.output.begin() + static_cast<ptrdiff_t>(n)));
    ++compared;
  }
  CHECK(compared >= 5);
}

TEST_CASE("many at once, greedy and sampled, give what each gives alone; also aborted neighbours and replays") {
  Server& s = server();
  std::vector<wire::Submit> requests;
  for (const Sample& sample : samples()) {
    requests.push_back(request(requests.size() + 1, sample.prompt, 12));
    if (requests.size() % 3 == 0) requests.back().sampling.temperature = 0.8f;
  }
  Tokens lengthy;  // several prompt pieces, and pools beyond the dense range
  for (const Sample& sample : samples()) lengthy.insert(lengthy.end(), sample.prompt.begin(), sample.prompt.end());
  while (lengthy.size() < 400) lengthy.insert(lengthy.end(), lengthy.begin(), lengthy.begin() + 50);
  requests.push_back(request(requests.size() + 1, lengthy, 12));
  std::map<uint64_t, Tokens> alone;
  for (const wire::Submit& r : requests) alone[r.id] = s.alone(r);

  s.output.clear();
  for (const wire::Submit& r : requests) s.scheduler->submit(r);
  s.scheduler->submit(request(100, lengthy, 30));
  s.scheduler->submit(request(101, samples()[0].prompt, 30));
  s.parts = 0;
  for (int turn = 0; !s.scheduler->idle(); ++turn) {
    s.turn();
    if (turn == 3) s.scheduler->cancel(2);
    if (turn >= 20 && s.standing) s.scheduler->cancel(100);
  }
  CHECK(s.parts > 10);
  for (const wire::Submit& r : requests) {
    CAPTURE(r.id);
    if (r.id != 2) CHECK(s.output[r.id] == alone[r.id]);
  }

  s.output.clear();
  for (wire::Submit r : requests) {
    const Tokens& all = alone[r.id];
    r.emitted.assign(all.begin(), all.begin() + static_cast<ptrdiff_t>(all.size() * (r.id % 4) / 4));
    s.output[r.id] = r.emitted;
    s.scheduler->submit(r);
  }
  while (!s.scheduler->idle()) s.turn();
  for (const wire::Submit& r : requests) {
    CAPTURE(r.id);
    CHECK(s.output[r.id] == alone[r.id]);
  }
  s.scheduler->check();
}

TEST_CASE("a piece that stops between layers, beside others, gives the bits of one that does not") {
  Server& s = server();
  Tokens text;
  for (const Sample& sample : samples()) text.insert(text.end(), sample.prompt.begin(), sample.prompt.end());
  const auto prompt = [&](size_t begin, size_t end) {
    return Tokens(text.begin() + static_cast<ptrdiff_t>(begin), text.begin() + static_cast<ptrdiff_t>(end));
  };
  const int layers = s.model->config().layers;
  // Two prompts in one piece; a third sequence that generates beside it; the first of the two may be given up.
  const auto logprob = [&](bool stops, int given_up_at) {
    ModelExecutor executor(*s.model, s.caches.caches, *s.ops, s.table.get());
    StepPlan plan;
    const auto run = [&](std::vector<SeqStep> seqs, LayerSpan piece, std::vector<SlotId> release) {
      ++plan.step;
      plan.seqs = std::move(seqs);
      plan.piece = piece;
      plan.release = std::move(release);
      executor.submit(plan);
      return executor.poll().value().seqs;
    };
    const auto first_of = [&](uint64_t id, const Tokens& tokens, int block) {
      SeqStep step;
      step.request = id;
      step.slot = SlotId{static_cast<int32_t>(id)};
      step.tokens = tokens;
      for (size_t b = 0; b <= tokens.size() / kBlockTokens + 1; ++b)
        step.append.push_back(BlockId{block + static_cast<int32_t>(b)});
      step.logits = 1;
      return step;
    };
    run({first_of(1, prompt(0, 20), 1)}, {}, {});
    SeqStep next;
    next.request = 1;
    next.slot = SlotId{1};
    next.regime = Regime::window;
    next.tokens = {7};
    next.start = 20;
    std::vector<SeqStep> piece = {first_of(2, prompt(40, 110), 10), first_of(3, prompt(100, 190), 20)};
    piece[1].exports = {{64, SnapId{1}}};
    const std::vector<SeqStep> all = {next, piece[0], piece[1]};
    if (!stops) return run(all, {}, {}).at(1).tokens.at(0).logprob;
    for (int at = 0; at < layers; ++at) {
      std::vector<SlotId> release;
      if (at == given_up_at) release.push_back(SlotId{2});
      auto got = run(at == 0 ? all : std::vector<SeqStep>{next}, {at, at + 1}, release);
      const size_t expected = at + 1 < layers ? 0 : given_up_at > 0 ? 1 : 2;
      CHECK(got.size() == expected);
      if (at + 1 == layers) return got.back().tokens.at(0).logprob;
      next.replay = 1;
      ++next.start;
    }
    return 0.0F;
  };
  const float whole = logprob(false, 0);
  CHECK(whole < 0);
  CHECK(logprob(true, 0) == whole);
  CHECK(logprob(true, 1) == whole);
  CHECK(logprob(true, layers - 1) == whole);
}

TEST_CASE("a conversation goes on from its snapshots with the same text as without them") {
  Server& s = server();
  Tokens text;
  for (const Sample& sample : samples()) text.insert(text.end(), sample.prompt.begin(), sample.prompt.end());
  REQUIRE(text.size() > 330);
  // Three turns; the boundaries are where a chat template would put them.
  std::vector<wire::Submit> turns;
  for (const size_t end : {150u, 230u, 330u}) {
    turns.push_back(request(turns.size() + 1, Tokens(text.begin(), text.begin() + static_cast<ptrdiff_t>(end)), 24));
    turns.back().boundaries = {70, static_cast<int32_t>(end) - 4};
  }
  std::map<uint64_t, Tokens> cold;
  s.restart(0);
  for (const wire::Submit& r : turns) cold[r.id] = s.alone(r);
  s.restart(6);
  s.cached.clear();
  for (const wire::Submit& r : turns) {
    CAPTURE(r.id);
    CHECK(s.alone(r) == cold[r.id]);
  }
  CHECK(s.cached[1] == 0);
  CHECK(s.cached[2] == 128);
  CHECK(s.cached[3] == 192);
  // Once more, all at the same time, in a warm cache.
  s.output.clear();
  for (const wire::Submit& r : turns) s.scheduler->submit(r);
  while (!s.scheduler->idle()) s.turn();
  for (const wire::Submit& r : turns) CHECK(s.output[r.id] == cold[r.id]);
  CHECK(s.cached[1] == 128);
  s.scheduler->check();
  s.restart(0);
}

TEST_CASE("requests that are put back go on with the same text, from their saved state or by computing it again") {
  Server& s = server();
  Tokens text;
  for (const Sample& sample : samples()) text.insert(text.end(), sample.prompt.begin(), sample.prompt.end());
  wire::Submit bulk = request(1, Tokens(text.begin(), text.begin() + 150), 60);
  bulk.sampling.ignore_eos = true;
  bulk.sampling.temperature = 0.7f;
  bulk.priority = 3;
  s.restart(0);
  const Tokens undisturbed = s.alone(bulk);
  for (const int snaps : {0, 4}) {
    CAPTURE(snaps);
    s.restart(snaps, 1);
    s.output.clear();
    s.scheduler->submit(bulk);
    for (int turn = 0; !s.scheduler->idle(); ++turn) {
      s.turn();
      // While it reads, and twice while it generates.
      if (turn == 0 || turn == 20 || turn == 40)
        s.scheduler->submit(request(100 + static_cast<uint64_t>(turn), samples()[0].prompt, 4));
    }
    CHECK(s.scheduler->stats().preemptions == 3);
    CHECK(s.output[1] == undisturbed);
    s.scheduler->check();
  }
  s.restart(0);
}

TEST_CASE("plans that contradict the state are refused") {
  Server& s = server();
  const auto refused = [&](auto change, const char* why) {
    ModelExecutor executor(*s.model, s.caches.caches, *s.ops, nullptr);
    StepPlan plan;
    plan.step = 1;
    SeqStep first;
    first.request = 1;
    first.slot = SlotId{0};
    first.tokens = {1, 2, 3};
    first.append = {BlockId{1}};
    plan.seqs.push_back(first);
    change(plan);
    CHECK_THROWS_WITH_AS(executor.submit(plan), doctest::Contains(why), Error);
  };
  refused([](StepPlan& p) { p.seqs[0].slot = SlotId{6}; }, "slot 6");
  refused([](StepPlan& p) { p.seqs[0].slot = SlotId::none; }, "slot");
  refused([](StepPlan& p) { p.seqs[0].start = 64; }, "follows 0 committed");
  refused([](StepPlan& p) { p.seqs[0].append = {BlockId{60}}; }, "block 60");
  refused([](StepPlan& p) { p.seqs[0].append = {BlockId::null}; }, "block 0");
  refused([](StepPlan& p) { p.seqs[0].append.clear(); }, "0 blocks");
  refused([](StepPlan& p) { p.seqs[0].tokens.assign(300, 1); }, "blocks");
  refused([](StepPlan& p) { p.seqs[0].replay = 1; }, "commits 1 records of 0");
  refused([](StepPlan& p) { p.seqs[0].restore = SnapId{6}; }, "snapshot");
  refused([](StepPlan& p) { p.seqs[0].tokens.clear(); }, "not supported");
  refused([](StepPlan& p) { p.release = {SlotId{-3}}; }, "slot -3");
  refused([](StepPlan& p) { p.flush = {{SlotId{0}, int16_t{1}}}; }, "flushes");
}

TEST_CASE("logits that are no numbers end the rank, naming the request") {
  Server& s = server();
  s.restart();
  Poisoned model(*s.model, 3);
  ModelExecutor executor(model, s.caches.caches, *s.ops, s.table.get());
  s.scheduler->submit(request(77, {1, 2, 3}, 8));
  for (int step = 1; step <= 2; ++step) {
    executor.submit(s.scheduler->plan(Scheduler::Time(0)).value());
    s.scheduler->complete(executor.poll().value());
  }
  const StepPlan third = s.scheduler->plan(Scheduler::Time(0)).value();
  try {
    executor.submit(third);
    FAIL("the step ended well");
  } catch (const Error& e) {
    CHECK(rank_exit(e.code()) == 70);
    CHECK(std::string(e.what()).find("request 77") != std::string::npos);
  }
  s.scheduler->cancel_all();
  s.restart();
}
