// Drafters behind the trained model: taps, greedy decoding with verification (the text of decoding without drafts), and
// how many drafts are accepted, against the figures of the drafters' own reports.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "engine/draft/dflash.h"
#include "engine/draft/mtp.h"
#include "engine/text/tokenizer.h"
#include "tests/golden/draft_harness.h"

namespace glm53::golden {
namespace {

const std::string kDflash = "models/glm53-tiny-dflash2";

ModelLimits tapped(std::vector<int> taps) {
  ModelLimits l = trained_limits();
  l.taps = std::move(taps);
  return l;
}

TEST_CASE("taps are the means of the streams behind their layers, in the order asked for") {
  for (const auto& ops : test_backends()) {
    const auto comm = make_single_communicator();
    const std::vector<int> layers = {6, 0, 7, 4, 0};
    Runner run(source_path(kTrained), tapped(layers), 1, *ops, *comm);
    run.watch();
    const std::vector<int32_t> ids = samples()[1].prompt;
    run.step({{0, ids, Regime::chunk}}, false, 3);
    const Values whole = fetch(*ops, run.out().taps);
    const auto rows = static_cast<int64_t>(ids.size());
    const int64_t h = run.model().config().hidden, streams = run.model().config().streams;
    REQUIRE(whole.rows() == rows + 3);
    REQUIRE(whole.width() == h * std::ssize(layers));
    const double tolerance = ops->activation() == Dtype::f32 ? 1e-6 : 5e-3;
    for (int64_t t = 0; t < std::ssize(layers); ++t) {
      const Values& x = run.seen(cat("layer", layers[static_cast<size_t>(t)], ".streams"));
      double worst = 0, largest = 0;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < h; ++i) {
          double mean = 0;
          for (int64_t s = 0; s < streams; ++s)
            mean += static_cast<double>(x.data[static_cast<size_t>((r * streams + s) * h + i)]);
          const double tap = static_cast<double>(whole.row(r)[static_cast<size_t>(t * h + i)]);
          largest = std::max(largest, std::fabs(tap));
          worst = std::max(worst, std::fabs(tap - mean / static_cast<double>(streams)));
        }
      }
      CHECK(worst < tolerance * largest);
    }
    // In parts, other work between them: the same bits.
    ops->slot_reset(run.caches(), SlotId{0});
    Model& model = run.model();
    model.set_probe({});
    CHECK(model.forward_part(run.batch(), run.caches(), {0, 3}).taps.empty());
    CHECK(model.forward_part(run.batch(), run.caches(), {3, 7}).taps.empty());
    const ForwardOut parts = model.forward_part(run.batch(), run.caches(), {7, 8});
    CHECK(same_bits(fetch(*ops, parts.taps).part(0, rows), whole.part(0, rows)));
    Runner plain(source_path(kTrained), trained_limits(), 1, *ops, *comm);
    plain.step({{0, ids, Regime::chunk}});
    CHECK(plain.out().taps.empty());
    for (const int wrong : {-1, 8})
      CHECK_THROWS_AS(load_model(source_path(kTrained), FormatPolicy::as_stored(), tapped({wrong}), *ops, *comm),
                      Error);
  }
}

/// Greedy decoding of one sequence with drafts that are verified, as the runtime does it.
struct Decoding {
  std::vector<int32_t> text;
  int steps = 0;
  std::array<int, 16> accepted{};  ///< steps whose first i + 1 drafts were all accepted
};

/// At least `tokens` of text, or until `stop` is among them; the last step may bring more.
Decoding decode(Runner& run, Drafter& drafter, int sequence, const std::vector<int32_t>& prompt, size_t tokens, int k,
                std::span<const int32_t> stop = {}) {
  Decoding d;
  drafter.reset(SlotId{sequence});
  Values logits = run.prefill(sequence, prompt, 448);
  drafter.observe(run.batch(), run.out());
  const std::vector<BlockId> table = run.table(sequence);
  auto anchor = static_cast<int32_t>(argmax(logits.row(logits.rows() - 1)));
  d.text.push_back(anchor);
  while (d.text.size() < tokens &&
         std::find_first_of(d.text.begin(), d.text.end(), stop.begin(), stop.end()) == d.text.end()) {
    std::vector<Draft> drafts(1);
    const std::vector<DraftRequest> request{{SlotId{sequence}, anchor, run.position(sequence), k, table}};
    drafter.propose(request, drafts);
    std::vector<int32_t> window{anchor};
    window.insert(window.end(), drafts[0].tokens.begin(), drafts[0].tokens.end());
    logits = run.step({{sequence, window, Regime::window}});
    drafter.observe(run.batch(), run.out());
    size_t a = 0;
    for (;; ++a) {
      anchor = static_cast<int32_t>(argmax(logits.row(static_cast<int64_t>(a))));
      d.text.push_back(anchor);
      if (a + 1 >= window.size() || window[a + 1] != anchor) break;
      ++d.accepted.at(a);
    }
    run.take_back(sequence, static_cast<int>(window.size() - a - 1));
    ++d.steps;
  }
  return d;
}

/// Both drafters behind one model.
struct World {
  std::unique_ptr<Communicator> comm = make_single_communicator();
  Runner run;
  std::unique_ptr<Drafter> dflash, mtp;
  World(Ops& ops, int sequences)
      : run(source_path(kTrained), tapped(load_dflash_config(source_path(kDflash)).tap_layers), sequences, ops, *comm),
        dflash(make_dflash_drafter(source_path(kDflash), FormatPolicy::as_stored(), run.model(), ops, *comm)),
        mtp(make_mtp_drafter(source_path(kTrained), FormatPolicy::as_stored(), {}, run.model(), ops, *comm)) {
    dflash->make_pools({2, sequences, 0});
    mtp->make_pools({1 + 8 * sequences, sequences, 0});
  }
};

TEST_CASE("greedy text with verified drafts is that of decoding without") {
  for_each_drafting_backend([&](Ops& ops) {
    World world(ops, 36);
    int sequence = 0;
    for (const Sample& sample : samples()) {
      CAPTURE(sample.name);
      const size_t n = std::min<size_t>(sample.output.size(), 64);
      const std::vector<int32_t> plain =
          world.run.greedy(sequence, world.run.prefill(sequence, sample.prompt, 448), static_cast<int>(n));
      Decoding with_dflash = decode(world.run, *world.dflash, sequence + 1, sample.prompt, n, 7);
      Decoding with_mtp = decode(world.run, *world.mtp, sequence + 2, sample.prompt, n, 4);
      for (Decoding* d : {&with_dflash, &with_mtp}) {
        CHECK(d->steps < static_cast<int>(n));
        d->text.resize(n);
        CHECK(d->text == plain);
      }
      sequence += 3;
    }
  });
}

/// Prompts like those of the drafter's report.
std::vector<std::string> prompts(const std::string& kind, int count) {
  constexpr std::array kNames = {"Anna", "Chloe", "Daisy", "Nelly", "Tom", "Ben"};
  constexpr std::array kPlaces = {"Paris", "Rome", "London", "Berlin"};
  std::mt19937 random(5);
  const auto in = [&](int low, int high) {
    return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1));
  };
  const auto one = [&](const auto& of) { return of.at(static_cast<size_t>(in(0, static_cast<int>(of.size()) - 1))); };
  std::vector<std::string> all;
  for (int i = 0; i < count; ++i) {
    const int from = in(1, 150), other = in(1, 99);
    if (kind == "counting") all.push_back(cat("Count from ", from, " to ", from + 50, "."));
    if (kind == "sum") all.push_back(cat("What is ", other, " + ", in(1, 99), "?"));
    if (kind == "json")
      all.push_back(cat("Make a JSON object for a person named ", one(kNames), " who is ", other,
                        " years old and lives in ", one(kPlaces), "."));
  }
  return all;
}

struct Reported {
  std::string kind;
  double tokens_per_step;
};

// The report's own prompts are not known; these are of the same kinds. Counting has little variety and must meet its
// figure within 3 %. Stories vary more (7.1 to 7.6 with animals of our choice): the recorded one must meet it. The last
// step of JSON and sums goes on behind the answer here, so they must reach theirs.
TEST_CASE("dflash2: tokens a step as reported") {
  const text::Tokenizer tokenizer = text::Tokenizer::load(source_path(kTrained + "/tokenizer.json"));
  for_each_drafting_backend([&](Ops& ops) {
    constexpr int kPrompts = 12;
    for (const auto& [kind, reported] : {Reported{"counting", 7.29}, {"story", 7.59}, {"json", 5.57}, {"sum", 3.13}}) {
      World world(ops, kPrompts);
      const bool counting = kind == "counting", story = kind == "story";
      int sequence = 0, steps = 0;
      size_t tokens = 0;
      std::array<int, 16> accepted{};
      for (const std::string& prompt :
           story ? std::vector<std::string>{"Tell me a story about a fox."} : prompts(kind, kPrompts)) {
        const std::vector<int32_t> eos = counting ? std::vector<int32_t>() : world.run.model().config().eos;
        const std::vector<int32_t> ids =
            tokenizer.encode(cat("[gMASK]<sop><|user|>", prompt, "<|assistant|><think></think>"));
        const Decoding d = decode(world.run, *world.dflash, sequence++, ids, 140, 7, eos);
        steps += d.steps;
        tokens += d.text.size() - 1;
        for (size_t i = 0; i < accepted.size(); ++i) accepted.at(i) += d.accepted.at(i);
      }
      const double rate = static_cast<double>(tokens) / steps;
      std::string line = cat(kind, ": ", rate, " tokens a step in ", steps, " steps; first n drafts accepted:");
      for (size_t i = 0; i < 7; ++i) line += cat(" ", std::round(100.0 * accepted.at(i) / steps) / 100);
      MESSAGE(line);
      CHECK(rate > 0.97 * reported);
      if (counting || story) CHECK(rate < 1.03 * reported);
    }
  });
}

/// Share of rows whose first draft, and whose first two, are what the sample goes on with.
struct MtpReport {
  std::string name;
  double first, both;
};

TEST_CASE("mtp: drafts along the samples accepted as reported") {
  const std::map<std::string, MtpReport> reported = {
      {"hello", {"", 1, 1}},         {"story", {"", 0.85, 0.7}},   {"story_thinking", {"", 0.867, 0.783}},
      {"count", {"", 1, 1}},         {"count_200", {"", 1, 1}},    {"capital", {"", 1, 1}},
      {"sum", {"", 1, 0.833}},       {"json", {"", 1, 1}},         {"tool", {"", 1, 1}},
      {"tool_thinking", {"", 1, 1}}, {"text", {"", 0.833, 0.683}}, {"list", {"", 1, 1}}};
  for_each_drafting_backend([&](Ops& ops) {
    World world(ops, 12);
    int sequence = 0;
    for (const Sample& sample : samples()) {
      CAPTURE(sample.name);
      world.mtp->reset(SlotId{sequence});
      world.run.prefill(sequence, sample.prompt, 448);
      world.mtp->observe(world.run.batch(), world.run.out());
      const std::vector<BlockId> table = world.run.table(sequence);
      int rows = 0, first = 0, both = 0;
      for (size_t i = 0; i + 2 < sample.output.size() && rows < 60; ++i) {
        std::vector<Draft> drafts(1);
        const std::vector<DraftRequest> request{
            {SlotId{sequence}, sample.output[i], world.run.position(sequence), 2, table}};
        world.mtp->propose(request, drafts);
        ++rows;
        const bool one = drafts[0].tokens.at(0) == sample.output[i + 1];
        first += one ? 1 : 0;
        both += one && drafts[0].tokens.at(1) == sample.output[i + 2] ? 1 : 0;
        world.run.step({{sequence, {sample.output[i]}, Regime::window}});
        world.mtp->observe(world.run.batch(), world.run.out());
      }
      ++sequence;
      MESSAGE(sample.name << ": " << first << ", " << both << " of " << rows);
      const MtpReport& report = reported.at(sample.name);
      CHECK(std::fabs(static_cast<double>(first) / rows - report.first) < 0.035);
      CHECK(std::fabs(static_cast<double>(both) / rows - report.both) < 0.035);
    }
  });
}

}  // namespace
}  // namespace glm53::golden
