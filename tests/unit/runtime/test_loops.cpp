// The loops of rank 0 and of a follower, with a hash for a model, a test for an API process, and threads for ranks.
#include <future>
#include <random>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/socket.h>

#include "common/error.h"
#include "common/json.h"
#include "common/socket.h"
#include "common/strings.h"
#include "engine/runtime/admin_server.h"
#include "engine/runtime/step_loop.h"
#include "hash_executor.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::test;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

std::chrono::steady_clock::time_point soon() {
  return std::chrono::steady_clock::now() + seconds(20);
}

SchedulerLimits small_limits() {
  SchedulerLimits l;
  l.max_context = 600;
  l.max_seqs = 2;
  l.max_rows = 200;
  l.prefill_chunk = 128;
  l.blocks = 20;
  return l;
}

StepPlan warm_up() {
  StepPlan plan;
  plan.generation = 3;
  SeqStep s;
  s.slot = SlotId{0};
  s.tokens = {0, 0, 0};
  s.append = {BlockId{1}};
  s.logits = 1;
  plan.seqs = {s};
  return plan;
}

std::vector<std::unique_ptr<ControlLink>> no_links() {
  return {};
}

/// Two connected control links.
std::pair<std::unique_ptr<ControlLink>, std::unique_ptr<ControlLink>> link_pair() {
  uint16_t port = 0;
  { port = local_port(listen_tcp("127.0.0.1", 0).get()); }
  const auto hello = [](int rank) {
    Hello h;
    h.rank = rank;
    h.size = 2;
    return h;
  };
  auto joined = std::async(std::launch::async, [&] { return join_rank0("127.0.0.1", port, hello(1), seconds(20)); });
  auto accepted = accept_ranks("127.0.0.1", port, hello(0), seconds(20));
  return {std::move(accepted.at(0)), joined.get()};
}

std::unique_ptr<RankGroup> make_group(int rank, std::unique_ptr<ControlLink> link) {
  std::vector<std::unique_ptr<ControlLink>> links;
  links.push_back(std::move(link));
  return std::make_unique<RankGroup>(rank, 2, std::move(links));
}

/// Rank 0 in a thread, this test as the API process.
struct Rank0 {
  explicit Rank0(std::unique_ptr<RankGroup> ranks = std::make_unique<RankGroup>(0, 1, no_links()))
      : group(std::move(ranks)),
        table(kSpace),
        scheduler(small_limits(), table, 3),
        executor(small_limits()),
        comm(make_single_communicator()) {
    listener = listen_unix(folder / "api.sock");
    hello.generation = 3;
    hello.model_digest = "digest";
    controls.open_gate(true);
    result = std::async(std::launch::async, [this] {
      StepLoop loop({*group, executor, *comm, notifier, controls}, scheduler, folder / "api.sock", hello);
      loop.run(warm_up(), [this] { was_ready = true; });
    });
  }
  ~Rank0() {
    controls.stop();
    if (result.valid()) result.wait();
  }
  /// The API side of a new connection, its hello read.
  UniqueFd accept() {
    UniqueFd fd = accept_until(listener.get(), soon());
    REQUIRE(fd);
    CHECK(std::get<wire::Hello>(wire::receive_frame(fd.get())) == hello);
    return fd;
  }
  void stop() {
    controls.stop();
    REQUIRE(result.wait_for(seconds(20)) == std::future_status::ready);
    result.get();
  }

  TempDir folder;
  UniqueFd listener;
  std::unique_ptr<RankGroup> group;
  SamplingTable table;
  Scheduler scheduler;
  HashExecutor executor;
  std::unique_ptr<Communicator> comm;
  Notifier notifier;
  Controls controls;
  wire::Hello hello;
  std::atomic<bool> was_ready = false;
  std::future<void> result;
};

wire::Submit make_request(uint64_t id, int32_t max_tokens) {
  wire::Submit r;
  r.id = id;
  r.prompt = {1, 2, static_cast<int32_t>(id)};
  r.sampling.max_tokens = max_tokens;
  r.sampling.ignore_eos = true;
  return r;
}

Tokens expected(const wire::Submit& r) {
  Tokens all = r.prompt;
  for (int32_t i = 0; i < r.sampling.max_tokens; ++i) all.push_back(next_token(all));
  return {all.begin() + static_cast<ptrdiff_t>(r.prompt.size()), all.end()};
}

/// Reads deltas until `id` ends; what came for it.
std::pair<Tokens, wire::Delta> read_until_end(int fd, uint64_t id) {
  Tokens tokens;
  for (;;) {
    const wire::Message m = wire::receive_frame(fd);
    const auto* d = std::get_if<wire::Delta>(&m);
    if (d == nullptr || d->id != id) continue;
    tokens.insert(tokens.end(), d->tokens.begin(), d->tokens.end());
    if (!d->finish.empty()) return {tokens, *d};
  }
}

wire::Stats read_stats(int fd) {
  for (;;) {
    const wire::Message m = wire::receive_frame(fd);
    if (const auto* s = std::get_if<wire::Stats>(&m)) return *s;
  }
}

Code end_of(std::future<void>& result) {
  REQUIRE(result.wait_for(seconds(20)) == std::future_status::ready);
  try {
    result.get();
  } catch (const Error& e) {
    return e.code();
  }
  return Code::ok;
}

}  // namespace

TEST_CASE("rank 0 says hello, serves requests, reports, and stops when drained") {
  Rank0 rank;
  const UniqueFd api = rank.accept();
  CHECK(read_stats(api.get()).gate_open);
  CHECK(rank.was_ready);
  const wire::Submit a = make_request(1, 40), b = make_request(2, 30);
  wire::send_frame(api.get(), a);
  wire::send_frame(api.get(), b);
  const auto [tokens_b, end_b] = read_until_end(api.get(), 2);
  CHECK(tokens_b == expected(b));
  const wire::Submit c = make_request(3, 200);
  wire::send_frame(api.get(), c);
  Tokens tokens_c;
  while (tokens_c.empty()) {
    const wire::Message m = wire::receive_frame(api.get());
    if (const auto* d = std::get_if<wire::Delta>(&m); d != nullptr && d->id == 3) tokens_c = d->tokens;
  }
  rank.controls.stop();  // what runs is finished
  const auto [rest, end_c] = read_until_end(api.get(), 3);
  CHECK(end_c.finish == "length");
  tokens_c.insert(tokens_c.end(), rest.begin(), rest.end());
  CHECK(tokens_c == expected(c));
  rank.stop();
}

TEST_CASE("queue times run from the submit to the first step, and are forgotten with the request") {
  const QueueTimes::Clock::time_point start{};
  QueueTimes times;
  times.submitted(1, start);
  times.submitted(2, start);
  StepPlan plan;
  plan.seqs.resize(2);
  plan.seqs[0].request = 1;
  plan.seqs[1].request = 9;  // not known: a replay's, or gone
  times.planned(plan, start + milliseconds(30));
  times.planned(plan, start + milliseconds(60));  // only the first step counts
  wire::Delta d;
  d.id = 1;
  d.tokens = {5};
  times.stamp(d);
  CHECK(d.queue_ms == 30);
  d.finish = "stop";
  times.stamp(d);
  CHECK(d.queue_ms == 30);
  CHECK(times.size() == 1);
  wire::Delta cancelled;
  cancelled.id = 2;
  cancelled.finish = "abort";
  times.stamp(cancelled);
  CHECK(cancelled.queue_ms == 0);
  CHECK(times.size() == 0);
}

TEST_CASE("an idle rank 0 reports about once a second and its progress stays young") {
  Rank0 rank;
  const UniqueFd api = rank.accept();
  for (int i = 0; i < 3; ++i) CHECK(read_stats(api.get()).progress_age_ms < 2000);
  rank.stop();
}

TEST_CASE("cancel ends a request, and a closed gate refuses") {
  Rank0 rank;
  const UniqueFd api = rank.accept();
  wire::send_frame(api.get(), make_request(1, 500));
  wire::send_frame(api.get(), wire::Cancel{.id = 1, .keep_tokens = {}});
  const auto [tokens, end] = read_until_end(api.get(), 1);
  CHECK((end.finish == "abort" || end.finish == "length"));
  rank.controls.open_gate(false);
  wire::send_frame(api.get(), make_request(2, 5));
  CHECK(read_until_end(api.get(), 2).second.error_code == 503);
  wire::Submit canary = make_request(3, 5);
  canary.key = "canary";
  wire::send_frame(api.get(), canary);
  CHECK(read_until_end(api.get(), 3).first == expected(canary));
  rank.stop();
}

TEST_CASE("short of memory, new requests are refused with 503 and Retry-After, promised ones go on") {
  Rank0 rank;
  const UniqueFd api = rank.accept();
  rank.controls.set_memory(MemoryLevel::tight, 1000);
  const wire::Submit small = make_request(1, 5);
  wire::send_frame(api.get(), small);
  CHECK(read_until_end(api.get(), 1).first == expected(small));
  rank.controls.set_memory(MemoryLevel::low, 500);
  wire::send_frame(api.get(), make_request(2, 5));
  const wire::Delta refused = read_until_end(api.get(), 2).second;
  CHECK(refused.finish == "error");
  CHECK(refused.error_code == 503);
  CHECK(refused.retry_after_s > 0);
  wire::Submit canary = make_request(3, 5);
  canary.key = "canary";
  wire::send_frame(api.get(), canary);
  CHECK(read_until_end(api.get(), 3).first == expected(canary));
  wire::Submit replayed = make_request(4, 5);
  const Tokens all = expected(replayed);
  replayed.emitted = {all[0]};
  wire::send_frame(api.get(), replayed);
  CHECK(read_until_end(api.get(), 4).first == Tokens(all.begin() + 1, all.end()));
  for (;;) {
    const wire::Stats stats = read_stats(api.get());
    if (stats.memory_level == 0) continue;  // reported before
    CHECK(stats.memory_level <= 2);
    if (stats.memory_level == 2) break;
  }
  wire::Submit waited = make_request(6, 5);  // it had no token yet when its rank died
  waited.replayed = true;
  wire::send_frame(api.get(), waited);
  CHECK(read_until_end(api.get(), 6).first == expected(waited));
  rank.controls.set_memory(MemoryLevel::ok, 1 << 30);
  const wire::Submit last = make_request(5, 5);
  wire::send_frame(api.get(), last);
  CHECK(read_until_end(api.get(), 5).first == expected(last));
  rank.stop();
}

TEST_CASE("when the API process goes away its requests are dropped and rank 0 comes back") {
  Rank0 rank;
  {
    const UniqueFd api = rank.accept();
    wire::send_frame(api.get(), make_request(1, 590));
    wire::send_frame(api.get(), make_request(2, 590));
    wire::send_frame(api.get(), make_request(3, 590));
  }
  UniqueFd api = rank.accept();
  const wire::Submit again = make_request(1, 20);
  wire::send_frame(api.get(), again);
  CHECK(read_until_end(api.get(), 1).first == expected(again));
  // Nonsense ends the connection, not the rank.
  const std::string nonsense("\x05\x00\x00\x00hello", 9);
  send_all(api.get(), std::as_bytes(std::span(nonsense)));
  CHECK_THROWS_AS(read_until_end(api.get(), 99), Error);
  api = rank.accept();
  wire::send_frame(api.get(), again);
  CHECK(read_until_end(api.get(), 1).first == expected(again));
  rank.stop();
}

TEST_CASE("a follower runs the same plans and ends with rank 0") {
  auto [link0, link1] = link_pair();
  auto group1 = make_group(1, std::move(link1));
  HashExecutor executor1(small_limits());
  Controls controls1;
  Notifier notifier;
  const auto comm1 = make_single_communicator();
  std::atomic<bool> ready = false;
  auto follower = std::async(std::launch::async, [&] {
    follow({*group1, executor1, *comm1, notifier, controls1}, 3, [&] { ready = true; });
  });
  Rank0 rank(make_group(0, std::move(link0)));
  const UniqueFd api = rank.accept();
  wire::send_frame(api.get(), make_request(1, 30));
  CHECK(read_until_end(api.get(), 1).first == expected(make_request(1, 30)));
  controls1.set_memory(MemoryLevel::low, 1);  // the other machine's memory counts too
  while (read_stats(api.get()).memory_level != 2) {
  }
  wire::send_frame(api.get(), make_request(2, 30));
  CHECK(read_until_end(api.get(), 2).second.error_code == 503);
  rank.stop();
  CHECK(end_of(follower) == Code::ok);
  CHECK(ready);
  CHECK(controls1.stats().step == rank.controls.stats().step);
  CHECK(executor1.most_seqs == 1);
}

TEST_CASE("a lost rank is peer_lost on the other side") {
  {
    auto [link0, link1] = link_pair();
    Rank0 rank(make_group(0, std::move(link0)));
    const UniqueFd api = rank.accept();
    link1->close();
    CHECK(end_of(rank.result) == Code::peer_lost);
  }
  {
    auto [link0, link1] = link_pair();
    const auto group1 = make_group(1, std::move(link1));
    HashExecutor executor(small_limits());
    Controls controls;
    Notifier notifier;
    const auto comm = make_single_communicator();
    auto follower = std::async(std::launch::async, [&] {
      follow({*group1, executor, *comm, notifier, controls}, 3, [] {});
    });
    link0->close();
    CHECK(end_of(follower) == Code::peer_lost);
  }
}

TEST_CASE("a follower refuses plans of another generation or out of order; asked to stop, it ends with rank 0") {
  const auto run = [](const StepPlan& plan, bool stopping) {
    auto [link0, link1] = link_pair();
    const auto group1 = make_group(1, std::move(link1));
    HashExecutor executor(small_limits());
    Controls controls;
    if (stopping) controls.stop();
    Notifier notifier;
    const auto comm = make_single_communicator();
    auto follower = std::async(std::launch::async, [&] {
      follow({*group1, executor, *comm, notifier, controls}, 3, [] {});
    });
    link0->send(encode(ControlFrame(plan)));
    if (stopping) link0->close();
    return end_of(follower);
  };
  StepPlan plan = warm_up();
  CHECK(run(plan, true) == Code::ok);
  plan.generation = 2;
  CHECK(run(plan, false) == Code::internal);
  plan = warm_up();
  plan.step = 1;
  CHECK(run(plan, false) == Code::internal);
}

TEST_CASE("ranks agree on machines and pools") {
  auto [link0, link1] = link_pair();
  const auto group0 = make_group(0, std::move(link0)), group1 = make_group(1, std::move(link1));
  for (const char* host : {"here", "there"}) {
    auto other = std::async(std::launch::async, [&] { return group1->ranks_on_host(host); });
    const int count = std::string(host) == "here" ? 2 : 1;
    CHECK(group0->ranks_on_host("here") == count);
    CHECK(other.get() == count);
  }
  auto other = std::async(std::launch::async, [&] { return group1->agree({.blocks = 5, .slots = 9, .snaps = 1}); });
  const PoolSizes mine = group0->agree({.blocks = 7, .slots = 2, .snaps = 1}), theirs = other.get();
  CHECK(mine.blocks == 5);
  CHECK(mine.slots == 2);
  CHECK(theirs.blocks == 5);
  CHECK(theirs.slots == 2);
}

TEST_CASE("mutated control frames are refused or decoded, never worse") {
  std::mt19937 random(5);
  for (const ControlFrame& f : {ControlFrame(warm_up()), ControlFrame(StopFrame{}), ControlFrame(HostFrame{"host"}),
                                ControlFrame(CountFrame{2}), ControlFrame(PoolsFrame{}),
                                ControlFrame(RestoreFrame{7, std::vector<SpillItem>(2)}),
                                ControlFrame(RestoredFrame{1, 7, true}), ControlFrame(ForgetSpilledFrame{})}) {
    const auto good = encode(f);
    CHECK(decode_control(good).index() == f.index());
    for (int i = 0; i < 1000; ++i) {
      auto bad = good;
      for (int c = 0; c < 2; ++c) bad[random() % bad.size()] = static_cast<std::byte>(random());
      bad.resize(random() % (bad.size() + 1));
      try {
        decode_control(bad);
      } catch (const Error& e) {
        REQUIRE(e.code() == Code::corrupt);
      }
    }
  }
}

TEST_CASE("the admin socket answers a line for a line, whatever comes") {
  const TempDir folder;
  const std::string path = folder / "admin.sock";
  const AdminServer server(path, [](const std::string& command) -> nlohmann::ordered_json {
    if (command == "fail") throw Error(Code::usage, "no such thing");
    return {{"command", command}};
  });
  CHECK(parse_json(admin_call(path, "counters")).at("command") == "counters");
  CHECK(parse_json(admin_call(path, "fail")).at("ok") == false);
  CHECK(parse_json(admin_call(path, "fail")).at("error") == "no such thing");
  const UniqueFd silent = connect_unix(path), talker = connect_unix(path), endless = connect_unix(path);
  const auto say = [](const UniqueFd& fd, const std::string& text) {
    send_all(fd.get(), std::as_bytes(std::span(text)));
  };
  const auto line = [](const UniqueFd& fd) {
    std::string text;
    for (char c = 0; c != '\n'; text += c) receive_all(fd.get(), std::as_writable_bytes(std::span(&c, 1)));
    return parse_json(text);
  };
  for (const char* bad : {"nonsense\n", "[1]\n", "{\"do\":5}\n", "\n"}) {
    say(talker, bad);
    CHECK(line(talker).at("ok") == false);
  }
  say(talker, "{\"do\":\"a\"}\n{\"do\":");
  CHECK(line(talker).at("command") == "a");
  say(talker, "\"b\"}\n");
  CHECK(line(talker).at("command") == "b");
  std::byte b;
  try {
    say(endless, std::string(100000, 'x'));
  } catch (const Error&) {
  }
  CHECK(::recv(endless.get(), &b, 1, 0) <= 0);
  CHECK(parse_json(admin_call(path, "still")).at("command") == "still");
}
