// bench serve: options, workload, statistics, report, and the client against a small server.
#include <algorithm>
#include <atomic>
#include <functional>
#include <set>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "cli/bench_client.h"
#include "cli/bench_stats.h"
#include "cli/bench_workload.h"
#include "common/error.h"
#include "common/http_server.h"
#include "common/json.h"
#include "common/strings.h"

using namespace glm53;
using namespace glm53::cli;

namespace {

std::string refused(const BenchOptions& options) {
  try {
    checked_workload(options);
  } catch (const Error& e) {
    CHECK(e.code() == Code::usage);
    return e.what();
  }
  return "accepted";
}

Workload load_of(const std::function<void(BenchOptions&)>& change = {}) {
  BenchOptions options;
  if (change) change(options);
  return checked_workload(options);
}

BenchSample sample_of(size_t session, int turn, double sent, double first, double ended) {
  BenchSample s;
  s.session = session;
  s.turn = turn;
  s.end = SampleEnd::finished;
  s.status = 200;
  s.wanted = s.sent = sent;
  s.first = first;
  s.ended = ended;
  s.prompt_tokens = 100;
  s.output_tokens = 10;
  return s;
}

}  // namespace

TEST_CASE("options of bench serve: defaults by mode, and mistakes named") {
  const Workload closed = load_of();
  CHECK(closed.concurrency == 4);
  CHECK(closed.sessions == 4);
  CHECK(closed.requests == 32);
  const Workload open = load_of([](BenchOptions& o) {
    o.rate = 2;
    o.duration = "1m";
  });
  CHECK(open.concurrency == 256);
  CHECK(open.sessions == 0);
  CHECK(open.requests == 0);
  CHECK(open.duration == 60);
  CHECK(load_of([](BenchOptions& o) {
          o.keys = 2;
          o.key_weights = "9, 1";
        }).key_weights == std::vector<int>{9, 1});

  const auto with = [](const std::function<void(BenchOptions&)>& change) {
    BenchOptions o;
    change(o);
    return refused(o);
  };
  CHECK(with([](BenchOptions& o) { o.rate = -1; }).starts_with("--rate must be"));
  CHECK(with([](BenchOptions& o) { o.duration = "soon"; }).starts_with("--duration must be a time"));
  CHECK(with([](BenchOptions& o) { o.duration = "0s"; }).starts_with("--duration"));
  CHECK(with([](BenchOptions& o) { o.turns = 0; }).starts_with("--turns"));
  CHECK(with([](BenchOptions& o) { o.abort_share = 1.5; }).starts_with("--abort-share"));
  CHECK(with([](BenchOptions& o) { o.key_weights = "1,2"; }).starts_with("--key-weights must be one number"));
  CHECK(with([](BenchOptions& o) { o.key_weights = "0"; }).starts_with("--key-weights must be whole numbers"));
  CHECK(with([](BenchOptions& o) { o.concurrency = 5000; }).starts_with("--concurrency"));
  CHECK(with([](BenchOptions& o) {
          o.rate = 1;
          o.sessions = 3;
        }).starts_with("--sessions does not go with --rate"));
}

TEST_CASE("the same seed gives the same requests, another seed others") {
  const auto prompts = [](uint64_t seed) {
    SessionPool pool(load_of([&](BenchOptions& o) {
                       o.seed = seed;
                       o.abort_share = 0.5;
                     }),
                     1.0);
    std::string all;
    while (const auto turn = pool.take(0)) {
      all += turn->messages.back().text + (turn->abort ? "!" : "");
      pool.finished(*turn, 0, "yes");
    }
    return all;
  };
  CHECK(prompts(1) == prompts(1));
  CHECK(prompts(1) != prompts(2));
}

TEST_CASE("sessions share the system prompt, keep their history and take turns") {
  SessionPool pool(load_of([](BenchOptions& o) {
                     o.concurrency = 2;
                     o.turns = 2;
                     o.requests = 6;
                     o.system_tokens = 20;
                     o.prompt_tokens = 30;
                   }),
                   2.0);
  const auto a = pool.take(0);
  const auto b = pool.take(0);
  REQUIRE(a);
  REQUIRE(b);
  CHECK(a->session != b->session);
  CHECK_FALSE(pool.take(0));  // both are busy
  CHECK_FALSE(pool.next_ready());
  REQUIRE(a->messages.size() == 2);
  CHECK(a->messages[0].role == "system");
  CHECK(split(a->messages[0].text, ' ').size() == 10);
  CHECK(split(a->messages[1].text, ' ').size() == 15);
  CHECK(a->messages[0].text == b->messages[0].text);
  CHECK(a->messages[1].text != b->messages[1].text);

  pool.finished(*b, 1, "B1");
  pool.finished(*a, 2, "A1");
  const auto b2 = pool.take(3);
  REQUIRE(b2);
  CHECK(b2->session == b->session);  // waits longest
  CHECK(b2->turn == 1);
  REQUIRE(b2->messages.size() == 4);
  CHECK(b2->messages[1].text == b->messages[1].text);
  CHECK(b2->messages[2].role == "assistant");
  CHECK(b2->messages[2].text == "B1");

  pool.finished(*b2, 4, "B2");  // its last turn: a new session takes its place
  const auto a2 = pool.take(5);
  REQUIRE(a2);
  CHECK(a2->session == a->session);
  const auto c = pool.take(5);
  REQUIRE(c);
  CHECK(c->turn == 0);
  pool.finished(*c, 6, std::nullopt);  // aborted: the session is over
  const auto d = pool.take(7);
  REQUIRE(d);
  CHECK(d->turn == 0);
  CHECK(pool.exhausted());
  CHECK_FALSE(pool.take(8));
}

TEST_CASE("same prompts, thinking sessions, and an open loop that never waits for them") {
  SessionPool same(load_of([](BenchOptions& o) { o.same = true; }), 1.0);
  CHECK(same.take(0)->messages.back().text == same.take(0)->messages.back().text);

  SessionPool thinking(load_of([](BenchOptions& o) {
                         o.concurrency = 1;
                         o.turns = 2;
                         o.think = "10s";
                       }),
                       1.0);
  const auto first = thinking.take(0);
  thinking.finished(*first, 1, "x");
  REQUIRE(thinking.next_ready());
  const double ready = *thinking.next_ready();
  CHECK(ready > 1);
  CHECK_FALSE(thinking.take(1));
  CHECK(thinking.take(ready)->turn == 1);

  SessionPool open(load_of([](BenchOptions& o) { o.rate = 1; }), 1.0);
  std::set<size_t> sessions;
  for (int i = 0; i < 20; ++i) sessions.insert(open.take(0)->session);
  CHECK(sessions.size() == 20);
}

TEST_CASE("keys get their shares of the sessions, aborts their share of the requests") {
  SessionPool pool(load_of([](BenchOptions& o) {
                     o.rate = 1;
                     o.requests = 2000;
                     o.keys = 2;
                     o.key_weights = "3,1";
                     o.abort_share = 0.25;
                     o.max_tokens = 10;
                   }),
                   1.0);
  size_t second = 0, aborted = 0, by_clock = 0;
  while (const auto turn = pool.take(0)) {
    second += turn->key;
    if (!turn->abort) continue;
    ++aborted;
    if (turn->abort->after_seconds) {
      ++by_clock;
      CHECK(*turn->abort->after_seconds < 2);
    } else {
      CHECK(turn->abort->after_pieces >= 1);
      CHECK(turn->abort->after_pieces <= 10);
    }
  }
  CHECK(second == 500);
  CHECK(aborted > 400);
  CHECK(aborted < 600);
  CHECK(by_clock > 150);
  CHECK(by_clock < 350);
}

TEST_CASE("Poisson arrivals have the rate and the scatter of their law") {
  PoissonArrivals arrivals(50, 7);
  std::vector<double> gaps;
  double last = 0;
  for (int i = 0; i < 20000; ++i) {
    const double at = arrivals.next();
    REQUIRE(at >= last);
    gaps.push_back(at - last);
    last = at;
  }
  const Spread spread = spread_of(gaps);
  CHECK(spread.mean == doctest::Approx(0.02).epsilon(0.03));
  CHECK(spread.p50 == doctest::Approx(0.02 * 0.6931).epsilon(0.05));  // median of an exponential: mean x ln 2
}

TEST_CASE("percentiles are nearest ranks") {
  CHECK(spread_of({}).p99 == 0);
  CHECK(spread_of({3}).p50 == 3);
  std::vector<double> values;
  for (int i = 100; i >= 1; --i) values.push_back(i);
  const Spread spread = spread_of(values);
  CHECK(spread.count == 100);
  CHECK(spread.p50 == 50);
  CHECK(spread.p95 == 95);
  CHECK(spread.p99 == 99);
  CHECK(spread.max == 100);
  CHECK(spread.mean == doctest::Approx(50.5));
}

TEST_CASE("Jain's index") {
  CHECK(jain_index(std::vector<double>{}) == 1);
  CHECK(jain_index(std::vector<double>{0, 0}) == 1);
  CHECK(jain_index(std::vector<double>{5, 5, 5}) == doctest::Approx(1));
  CHECK(jain_index(std::vector<double>{1, 0, 0, 0}) == doctest::Approx(0.25));
  CHECK(jain_index(std::vector<double>{1, 2, 3}) == doctest::Approx(36.0 / 42));
}

TEST_CASE("a summary counts outcomes, reuse and fairness") {
  const Workload load = load_of([](BenchOptions& o) {
    o.keys = 2;
    o.turns = 2;
  });
  std::vector<BenchSample> samples = {sample_of(0, 0, 0, 1, 2), sample_of(1, 0, 3, 4, 5), sample_of(0, 1, 5, 5.5, 6)};
  samples[0].gaps = {0.5, 0.5};
  samples[1].key = 1;
  samples[1].cached_tokens = 30;  // the shared 40 could have been
  samples[2].cached_tokens = 100;
  samples[2].prompt_tokens = 150;
  BenchSample aborted = sample_of(2, 0, 6, 6.5, 7);
  aborted.end = SampleEnd::aborted;
  aborted.output_tokens = 4;
  BenchSample refused_one = sample_of(3, 0, 7, 0, 7.5);
  refused_one.end = SampleEnd::failed;
  refused_one.status = 429;
  refused_one.error = "too many";
  refused_one.output_tokens = 0;
  BenchSample broken = refused_one;
  broken.status = 200;
  broken.error = "the stream ended before [DONE]";
  samples.insert(samples.end(), {aborted, refused_one, broken});

  const BenchSummary s = summarise(samples, load, 40);
  CHECK(s.started == 6);
  CHECK(s.finished == 3);
  CHECK(s.aborted == 1);
  CHECK(s.failed == 2);
  CHECK(s.errors == std::map<std::string, size_t>{{"429", 1}, {"stream", 1}});
  CHECK(s.error_example.at("429") == "too many");
  CHECK(s.wall == 7.5);
  CHECK(s.first_token.count == 3);
  CHECK(s.first_token.p50 == doctest::Approx(1));
  CHECK(s.gap.count == 2);
  CHECK(s.output_tokens == 34);
  CHECK(s.prompt_tokens == 350);
  CHECK(s.hit_ratio == doctest::Approx(130.0 / 350));
  CHECK(s.reusable_tokens == 140);  // 40 shared ones, then the 100 of the session's first prompt
  CHECK(s.reuse_ratio == doctest::Approx(130.0 / 140));
  CHECK(s.tokens_per_second_each == doctest::Approx(9));
  REQUIRE(s.keys.size() == 2);
  CHECK(s.keys[0].requests == 2);
  CHECK(s.keys[1].output_tokens == 10);
  CHECK(s.keys[0].rate == doctest::Approx(20.0 / 3));
  CHECK(s.keys[1].rate == doctest::Approx(5));
  CHECK(s.key_fairness < 1);

  const std::string table = render_bench(s, load, IdleResult{7, spread_of({0.001})});
  for (const char* part :
       {"first token", "3 finished, 1 aborted by us, 2 failed", "429", "too many", "key 2", "7: a small"}) {
    INFO(table);
    CHECK(table.find(part) != std::string::npos);
  }
  const auto json = bench_json(s, load, std::nullopt);
  CHECK(json["requests"]["finished"] == 3);
  CHECK(json["errors"]["429"]["count"] == 1);
  CHECK(json["first_token_ms"]["p50"].get<double>() == doctest::Approx(1000));
  CHECK_FALSE(json.contains("idle"));
}

TEST_CASE("the client measures streams, leaves early, and takes refusals as samples") {
  std::vector<std::shared_ptr<HttpReply>> unfinished;  // used by the server's one thread only
  std::atomic<int> asked = 0;
  HttpServer server({});
  server.route("POST", "/v1/chat/completions",
               [&](const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
                 const auto body = parse_json(request.body);
                 CHECK(body["stream"] == true);
                 const int number = asked++;
                 if (number == 1) {
                   HttpResponse response;
                   response.status = 429;
                   response.body = R"({"error":{"message":"the queue is full"}})";
                   reply->send(std::move(response));
                   return;
                 }
                 reply->start_stream(200, "text/event-stream", {});
                 for (int i = 0; i < 5; ++i) reply->write("data: {\"choices\":[{\"delta\":{\"content\":\"w\"}}]}\n\n");
                 if (number >= 4) {  // never ends: only leaving does
                   unfinished.push_back(reply);
                   return;
                 }
                 if (number == 2) {
                   reply->write("data: {\"error\":{\"message\":\"rank lost\"}}\n\n");
                 } else {
                   reply->write(
                       "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":5,"
                       "\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n");
                 }
                 reply->write("data: [DONE]\n\n");
                 reply->finish();
               });
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  const BenchTarget target{cat("http://127.0.0.1:", port), {""}};
  const auto samples = run_load(target, load_of([](BenchOptions& o) {
                                  o.concurrency = 1;
                                  o.requests = 4;
                                }),
                                1.3);
  REQUIRE(samples.size() == 4);
  CHECK(samples[0].end == SampleEnd::finished);
  CHECK(samples[0].gaps.size() == 4);
  CHECK(samples[0].prompt_tokens == 20);
  CHECK(samples[0].cached_tokens == 8);
  CHECK(samples[0].output_tokens == 5);
  CHECK(samples[1].status == 429);
  CHECK(samples[1].error == "the queue is full");
  CHECK(samples[2].end == SampleEnd::failed);
  CHECK(samples[2].status == 200);
  CHECK(samples[2].error == "rank lost");
  CHECK(samples[3].end == SampleEnd::finished);
  CHECK_FALSE(count_tokens(target, "no such route here"));

  const auto left = run_load(target, load_of([](BenchOptions& o) {
                               o.rate = 1000;
                               o.requests = 20;
                               o.max_tokens = 3;
                               o.abort_share = 1;
                               o.abort_within = "1ms";
                             }),
                             1.3);
  REQUIRE(left.size() == 20);
  CHECK(std::ranges::all_of(left, [](const BenchSample& s) { return s.end == SampleEnd::aborted; }));
  server.stop(std::chrono::milliseconds(0));
}

TEST_CASE("a server that is not there makes failed samples") {
  const BenchTarget target{"http://127.0.0.1:1", {""}};
  const auto samples = run_load(target, load_of([](BenchOptions& o) { o.requests = 2; }), 1.3);
  REQUIRE(samples.size() == 2);
  CHECK(samples[0].status == 0);
  CHECK(summarise(samples, load_of(), 0).errors.at("connection") == 2);
}
