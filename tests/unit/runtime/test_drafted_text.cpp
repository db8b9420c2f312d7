// Drafts on the model of the repository: they change how many steps a text takes, and nothing else.
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "tests/unit/runtime/tiny_server.h"

using namespace glm53;
using namespace glm53::test;

namespace {

/// Proposes what it knows of the texts that will come, with mistakes; checks that it is called as a drafter may be.
class Scripted final : public Drafter {
 public:
  Scripted(std::vector<Tokens> texts, int wrong_percent) : texts_(std::move(texts)), wrong_percent_(wrong_percent) {}

  DraftTraits traits() const override {
    return {.name = "scripted", .taps = false, .max_drafts = 7, .context_window = 0};
  }
  std::vector<std::pair<std::string, size_t>> weight_bytes() const override { return {}; }
  PoolUnit pool_unit() const override { return {}; }
  void make_pools(const PoolSizes&) override {}
  void observe(const Batch& batch, const ForwardOut&) override {
    const auto* slot = static_cast<const int32_t*>(batch.slot.data);
    const auto* begin = static_cast<const int32_t*>(batch.row_begin.data);
    const auto* position = static_cast<const int32_t*>(batch.position.data);
    for (int i = 0; i < batch.seqs; ++i) {
      if (slot[i] < 0) continue;
      int32_t& reached = reached_[SlotId{slot[i]}];
      REQUIRE(position[begin[i]] <= reached);
      reached = position[begin[i + 1] - 1] + 1;
    }
  }
  void propose(std::span<const DraftRequest> requests, std::span<Draft> drafts) override {
    for (size_t i = 0; i < requests.size(); ++i) {
      const DraftRequest& r = requests[i];
      REQUIRE(r.drafts <= 7);
      REQUIRE(r.position <= reached_[r.slot]);
      REQUIRE(r.table.size() * kBlockTokens >= static_cast<size_t>(r.position + r.drafts + 1));
      const auto n = static_cast<size_t>(r.position);
      const auto known =
          std::find_if(texts_.begin(), texts_.end(), [&](const Tokens& t) { return n < t.size() && t[n] == r.anchor; });
      for (size_t d = 1; d <= static_cast<size_t>(r.drafts); ++d) {
        if (random_() % 10 == 0) break;  // it may give fewer
        const bool right =
            known != texts_.end() && n + d < known->size() && static_cast<int>(random_() % 100) >= wrong_percent_;
        drafts[i].tokens.push_back(right ? (*known)[n + d] : static_cast<int32_t>(random_() % 2000));
        drafts[i].confidence.push_back(0.5F);
      }
    }
  }
  void reset(SlotId slot) override { reached_[slot] = 0; }
  void save(SlotId slot, int32_t position, SnapId) override { REQUIRE(position <= reached_[slot]); }
  void restore(SnapId, SlotId slot, int32_t position) override { reached_[slot] = position; }
  void forget(SnapId) override {}
  void invalidate(SlotId slot, int32_t position) override { reached_[slot] = position; }
  void copy_block(BlockId, BlockId) override {}
  void set_probe(Probe) override {}

 private:
  const std::vector<Tokens> texts_;
  const int wrong_percent_;
  std::mt19937_64 random_{17};
  std::map<SlotId, int32_t> reached_;
};

/// Requests of all kinds, and what each gets without drafts.
struct Texts {
  std::vector<wire::Submit> requests;
  std::map<uint64_t, Tokens> output;
  std::map<uint64_t, std::vector<wire::TokenLogprobs>> logprobs;
  std::map<uint64_t, std::string> finish;

  explicit Texts(Server& s) {
    const std::vector<Sample> all = samples();
    for (size_t i = 0; i < all.size(); ++i) {
      wire::Submit r = request(i + 1, all[i].prompt, 40);
      if (i % 4 == 1) r.prompt.insert(r.prompt.end(), all[i].prompt.begin(), all[i].prompt.end());
      r.boundaries = {static_cast<int32_t>(r.prompt.size()) - 2};
      r.sampling.ignore_eos = i % 3 == 0;
      if (i % 2 == 1) r.sampling.temperature = 0.9F;
      if (i % 5 == 0) r.sampling.top_p = 0.8F;
      if (i % 3 == 1) r.sampling.logprobs = 2;
      if (i % 4 == 2) r.sampling.repetition = 1.2F;
      if (i % 4 == 3) r.sampling.frequency = 0.4F;
      if (i % 5 == 4) r.sampling.min_tokens = 8;
      if (i % 6 == 5)
        r.grammar = cat("bad ", all[i].output[1], "\nbad ", all[i].output[0], " ", all[i].output[2], "\n");
      if (i % 7 == 6) r.sampling.bias = {{all[i].output[0], -100.0F}};
      requests.push_back(std::move(r));
    }
    // Several answers to one prompt.
    for (uint64_t n = 0; n < 4; ++n) {
      wire::Submit r = request(100 + n, all[0].prompt, 24);
      r.sampling.temperature = 1.2F;
      r.seed = 5 + n;
      requests.push_back(std::move(r));
    }
    s.drafter = nullptr;
    s.restart(0);
    for (const wire::Submit& r : requests) {
      output[r.id] = s.alone(r);
      logprobs[r.id] = s.logprobs[r.id];
      finish[r.id] = s.finish[r.id];
      REQUIRE(finish[r.id] != "error");
    }
  }
  std::vector<Tokens> whole() const {
    std::vector<Tokens> all;
    for (const wire::Submit& r : requests) {
      all.push_back(r.prompt);
      const Tokens& o = output.at(r.id);
      all.back().insert(all.back().end(), o.begin(), o.end());
    }
    return all;
  }
};

const Texts& texts() {
  static const Texts t(server());
  return t;
}

void check(const Server& s, const wire::Submit& r) {
  CAPTURE(r.id);
  const Texts& t = texts();
  CHECK(s.output.at(r.id) == t.output.at(r.id));
  CHECK(s.finish.at(r.id) == t.finish.at(r.id));
  CHECK(s.logprobs.at(r.id) == t.logprobs.at(r.id));
}

/// Every request alone, then all at once in batches of up to `seqs`.
void compare(Server& s, const std::function<void(SchedulerLimits&)>& change, Drafter* drafter, int seqs) {
  const Texts& t = texts();
  s.drafter = drafter;
  s.restart_with([&](SchedulerLimits& l) {
    l.always_draft = true;
    l.max_seqs = seqs;
    change(l);
  });
  for (const wire::Submit& r : t.requests) {
    s.alone(r);
    check(s, r);
  }
  s.forget();
  for (const wire::Submit& r : t.requests) s.scheduler->submit(r);
  for (int turns = 0; s.turn(); ++turns) REQUIRE(turns < 20000);
  for (const wire::Submit& r : t.requests) check(s, r);
  s.scheduler->check();
  MESSAGE(cat(s.scheduler->drafts().accepted, " of ", s.scheduler->drafts().drafted, " drafts accepted"));
  CHECK(s.scheduler->drafts().drafted > 100);
  CHECK(s.scheduler->drafts().accepted > 10);
  s.drafter = nullptr;
}

}  // namespace

TEST_CASE("glm53-tiny: drafts copied from the text change no token, logprob or end, alone and in batches") {
  compare(
      server(), [](SchedulerLimits& l) { l.lookup_drafts = 15; }, nullptr, 6);
}

TEST_CASE("glm53-tiny: drafts of a drafter change no token, logprob or end") {
  for (const int wrong : {0, 30, 100}) {
    CAPTURE(wrong);
    Scripted drafter(texts().whole(), wrong);
    Server& s = server();
    if (wrong < 100) {
      compare(
          s, [](SchedulerLimits& l) { l.model_drafts = 7; }, &drafter, 6);
      continue;
    }
    s.drafter = &drafter;
    s.restart_with([&](SchedulerLimits& l) {
      l.always_draft = true;
      l.model_drafts = 7;
    });
    for (const wire::Submit& r : texts().requests) {
      s.alone(r);
      check(s, r);
    }
    s.drafter = nullptr;
  }
}

TEST_CASE("glm53-tiny: drafts of DFlash2 and of the MTP layer change no token, logprob or end") {
  Server& s = server();
  for (const char* kind : {"dflash2", "mtp"}) {
    CAPTURE(kind);
    compare(
        s,
        [](SchedulerLimits& l) {
          l.model_drafts = 4;
          l.snaps = 6;
          l.snap_interval = 64;
        },
        &s.real_drafter(kind), 6);
    // Most drafts come true: the drafter reads what it should.
    CHECK(s.scheduler->drafts().accepted * 2 > s.scheduler->drafts().drafted);
  }
}

TEST_CASE("glm53-tiny: a drafter and copied text together, beside putting back, aborts and cached beginnings") {
  Server& s = server();
  const Texts& t = texts();
  for (const char* kind : {"dflash2", "mtp"}) {
    CAPTURE(kind);
    s.drafter = &s.real_drafter(kind);
    s.restart_with([](SchedulerLimits& l) {
      l.always_draft = true;
      l.model_drafts = 4;
      l.lookup_drafts = 9;
      l.max_window = 10;
      l.prefill_chunk = 64;
      l.blocks = 14;
      l.max_seqs = 3;
      l.snaps = 6;
      l.snap_interval = 64;
      l.reserve_output = 4;
    });
    for (int round = 0; round < 2; ++round) {
      s.forget();
      std::set<uint64_t> gone;
      for (wire::Submit r : t.requests) {
        r.priority = -static_cast<int32_t>(r.id % 4);
        s.scheduler->submit(r);
        for (uint64_t turns = r.id % 3; turns > 0; --turns) s.turn();
        if (r.id % 5 == 2) gone.insert(r.id), s.scheduler->cancel(r.id);
      }
      for (int turns = 0; s.turn(); ++turns) REQUIRE(turns < 20000);
      for (const wire::Submit& r : t.requests)
        if (!gone.contains(r.id)) check(s, r);
    }
    s.scheduler->check();
    CHECK(s.scheduler->stats().preemptions > 0);
    CHECK(s.scheduler->stats().prefix_hits > 0);
    CHECK(s.scheduler->drafts().accepted > 100);
    s.drafter = nullptr;
  }
  s.restart(0);
}

TEST_CASE("glm53-tiny: drafts beside putting back, cached beginnings and small windows change no text") {
  Scripted drafter(texts().whole(), 20);
  compare(
      server(),
      [](SchedulerLimits& l) {
        l.model_drafts = 5;
        l.lookup_drafts = 6;
        l.max_window = 7;
        l.prefill_chunk = 64;
        l.blocks = 14;
        l.snaps = 6;
        l.snap_interval = 64;
        l.reserve_output = 4;
      },
      &drafter, 6);
}

TEST_CASE("glm53-tiny: drafts that are chosen by price change no text, and a request may go without") {
  Scripted drafter(texts().whole(), 20);
  Server& s = server();
  s.drafter = &drafter;
  s.restart_with([&](SchedulerLimits& l) {
    l.model_drafts = 7;
    l.lookup_drafts = 15;
  });
  const Texts& t = texts();
  s.forget();
  for (const wire::Submit& r : t.requests) s.scheduler->submit(r);
  while (s.turn()) {
  }
  for (const wire::Submit& r : t.requests) check(s, r);
  const uint64_t drafted = s.scheduler->drafts().drafted;
  CHECK(drafted > 0);
  for (wire::Submit r : t.requests) {
    r.speculate = false;
    s.alone(r);
    check(s, r);
  }
  CHECK(s.scheduler->drafts().drafted == drafted);
  s.drafter = nullptr;
  s.restart(0);
}
