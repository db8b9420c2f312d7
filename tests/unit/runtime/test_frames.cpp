#include <cstring>
#include <random>
#include <thread>

#include <doctest/doctest.h>
#include <sys/socket.h>

#include "common/error.h"
#include "common/file.h"
#include "engine/runtime/plan.h"
#include "engine/runtime/wire.h"

using namespace glm53;

namespace {

using Frame = std::vector<std::byte>;

wire::Submit full_submit() {
  wire::Submit m;
  m.id = 0x123456789abcdef0;
  m.prompt = {1, 2, 3, 70000};
  m.emitted = {9};
  m.seed = ~uint64_t{0};
  m.priority = -3;
  m.salt = "salt";
  m.key = std::string("k\0y", 3);
  m.cache_write = false;
  m.speculate = false;
  m.boundaries = {1, 2};
  m.sampling = {.temperature = 0.5f,
                .top_p = 0.25f,
                .min_p = 0.125f,
                .presence = -1,
                .frequency = 2,
                .repetition = 1.5f,
                .top_k = 40,
                .max_tokens = 100,
                .min_tokens = 3,
                .logprobs = 5,
                .ignore_eos = true,
                .stop_ids = {7, 8},
                .bias = {{5, -1.5f}, {6, 100}},
                .allowed = {1, 2, 3}};
  m.grammar = "root ::= \"x\"";
  m.deadline_ms = 1234567890123;
  m.replayed = true;
  return m;
}

std::vector<wire::Message> messages() {
  wire::Hello hello;
  hello.generation = 4;
  hello.model_digest = "abc";
  hello.vocab = 154880;
  hello.max_context = 4096;
  hello.max_seqs = 8;
  hello.eos = {1, 2};
  wire::Delta delta;
  delta.id = 5;
  delta.index = 2;
  delta.tokens = {10, 11};
  delta.logprobs = {{-0.5f, {{10, -0.5f}, {4, -1.0f}}}, {-2.0f, {}}};
  delta.finish = "stop";
  delta.error = "why";
  delta.error_code = 400;
  delta.stop_token = 11;
  delta.cached_tokens = 64;
  delta.retry_after_s = 3;
  delta.draft_tokens = 4;
  delta.draft_accepted = 5;
  delta.queue_ms = 12;
  wire::Stats stats;
  stats.step = 1;
  stats.running = 2;
  stats.waiting = 3;
  stats.blocks_used = 4;
  stats.blocks_total = 5;
  stats.slots_used = 6;
  stats.slots_total = 7;
  stats.prompt_tokens = 8;
  stats.generated_tokens = 9;
  stats.blocks_cached = 12;
  stats.snaps_used = 13;
  stats.snaps_total = 14;
  stats.memory_available = 15;
  stats.memory_level = 2;
  stats.prefix_queries = 15;
  stats.prefix_hits = 16;
  stats.snaps_written = 17;
  stats.snaps_evicted = 18;
  stats.blocks_evicted = 19;
  stats.preemptions = 20;
  stats.spill_memory_bytes = 21;
  stats.spill_disk_bytes = 22;
  stats.spilled = 23;
  stats.spill_dropped = 24;
  stats.restores = 25;
  stats.restores_failed = 26;
  stats.spill_disk_ok = true;
  stats.draft_steps = 27;
  stats.draft_tokens = 28;
  stats.draft_accepted = 29;
  stats.draft_accepted_at = {30, 31};
  stats.drafter_paused = true;
  stats.stage_us[1] = 32;
  stats.stage_bytes[4] = 33;
  stats.step_us[2] = 34;
  stats.step_counts.back() = 35;
  stats.progress_age_ms = 10;
  stats.memory_bytes = 11;
  stats.gate_open = true;
  stats.peers_alive = false;
  return {hello,
          full_submit(),
          wire::Submit{},
          wire::Cancel{.id = 1, .keep_tokens = 7},
          wire::Cancel{.id = 2, .keep_tokens = {}},
          delta,
          wire::Delta{},
          stats};
}

StepPlan full_plan() {
  SeqStep window, chunk;
  window.request = 1;
  window.slot = SlotId{2};
  window.regime = Regime::window;
  window.start = 100;
  window.drafts = 3;
  window.propose = 5;
  window.replay = 4;
  window.tokens = {5, 6, 7, 8};
  window.logits = 4;
  chunk.request = 9;
  chunk.slot = SlotId{0};
  chunk.start = 64;
  chunk.tokens = {1, 2};
  chunk.append = {BlockId{3}, BlockId{4}};
  chunk.copy = {{BlockId{1}, BlockId{2}}};
  chunk.restore = SnapId{6};
  chunk.exports = {{64, SnapId{1}}, {66, SnapId{2}}};
  StepPlan plan;
  plan.generation = 3;
  plan.step = 77;
  plan.bucket = 16;
  plan.piece = {3, 5};
  plan.seqs = {window, chunk, SeqStep{}};
  plan.flush = {{SlotId{5}, int16_t{2}}};
  plan.save = {{SlotId{5}, SnapId{3}}};
  plan.release = {SlotId{1}, SlotId{3}};
  SpillItem item;
  item.meta.name.kind = spill::Kind::snapshot;
  item.meta.name.hash[15] = 9;
  item.meta.cls = 2;
  item.meta.position = 128;
  item.meta.tokens[63] = 77;
  item.id = 4;
  plan.spill = {item, SpillItem{}};
  plan.load = {{5, true}, {6, false}};
  return plan;
}

/// Decodes whatever comes; anything but a value or Error(corrupt) fails the test by escaping.
template <class Decode>
bool decodes(const Frame& frame, const Decode& decode) {
  // A copy of exact size, so that a sanitizer sees every byte read past the end.
  const std::unique_ptr<std::byte[]> exact(new std::byte[frame.size()]);
  if (!frame.empty()) std::memcpy(exact.get(), frame.data(), frame.size());
  try {
    decode(std::span<const std::byte>(exact.get(), frame.size()));
    return true;
  } catch (const Error& e) {
    REQUIRE(e.code() == Code::corrupt);
    return false;
  }
}

template <class Decode>
void mutate(const Frame& good, const Decode& decode, unsigned seed) {
  std::mt19937 random(seed);
  for (size_t n = 0; n < good.size(); ++n)
    CHECK_FALSE(decodes(Frame(good.begin(), good.begin() + static_cast<ptrdiff_t>(n)), decode));
  Frame longer = good;
  longer.push_back(std::byte{0});
  CHECK_FALSE(decodes(longer, decode));
  for (size_t at = 0; at + 4 <= good.size(); ++at) {  // every possible count lies
    Frame lie = good;
    std::memset(lie.data() + at, 0xff, 4);
    decodes(lie, decode);
    lie[at + 3] = std::byte{0x7f};
    decodes(lie, decode);
  }
  for (int round = 0; round < 2000; ++round) {
    Frame bad = good;
    const int changes = 1 + static_cast<int>(random() % 4);
    for (int c = 0; c < changes; ++c) bad[random() % bad.size()] = static_cast<std::byte>(random());
    decodes(bad, decode);
  }
}

}  // namespace

TEST_CASE("wire messages come back as they went") {
  for (const wire::Message& m : messages()) {
    CAPTURE(m.index());
    CHECK(wire::decode(wire::encode(m)) == m);
  }
}

TEST_CASE("mutated wire frames are refused or decoded, never worse") {
  unsigned seed = 1;
  for (const wire::Message& m : messages())
    mutate(
        wire::encode(m), [](std::span<const std::byte> f) { wire::decode(f); }, seed++);
}

TEST_CASE("wire frames of unknown kind or another protocol are corrupt") {
  CHECK_THROWS_AS(wire::decode({}), Error);
  const std::byte unknown[] = {std::byte{9}};
  CHECK_THROWS_AS(wire::decode(unknown), Error);
  wire::Hello hello;
  hello.protocol = wire::kProtocol + 1;
  CHECK_THROWS_WITH_AS(wire::decode(wire::encode(hello)), doctest::Contains("this program protocol"), Error);
}

TEST_CASE("wire frames travel over a socket, and its end is peer_lost") {
  int fds[2];
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  UniqueFd a(fds[0]), b(fds[1]);
  std::thread writer([&] {
    for (const wire::Message& m : messages()) wire::send_frame(a.get(), m);
    a.reset();
  });
  for (const wire::Message& m : messages()) CHECK(wire::receive_frame(b.get()) == m);
  writer.join();
  try {
    wire::receive_frame(b.get());
    FAIL("the stream has ended");
  } catch (const Error& e) {
    CHECK(e.code() == Code::peer_lost);
  }
}

TEST_CASE("plans come back as they went") {
  CHECK(decode_plan(encode(full_plan())) == full_plan());
  CHECK(decode_plan(encode(StepPlan{})) == StepPlan{});
}

TEST_CASE("mutated plans are refused or decoded, never worse") {
  mutate(
      encode(full_plan()), [](std::span<const std::byte> f) { decode_plan(f); }, 99);
}
