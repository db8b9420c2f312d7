// bench decode: options, prompts, what counts as an answer, statistics, report, and a run against a small server.
#include <algorithm>
#include <functional>
#include <mutex>
#include <set>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "cli/bench_decode.h"
#include "common/error.h"
#include "common/http_server.h"
#include "common/json.h"
#include "common/strings.h"

using namespace glm53;
using namespace glm53::cli;

namespace {

std::string refused(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& e) {
    CHECK(e.code() == Code::usage);
    return e.what();
  }
  return "accepted";
}

DecodePlan plan_of(const std::function<void(DecodeOptions&)>& change, const PromptSet& prompts) {
  DecodeOptions options;
  change(options);
  return checked_decode(options, prompts);
}

std::string fault_of(const DecodePrompt& prompt, std::string_view answer, bool whole = true) {
  return incoherent(prompt, answer, whole).value_or("sound");
}

DecodePrompt counting(int64_t from, int64_t to) {
  DecodePrompt prompt;
  prompt.messages.push_back({"user", cat("Count from ", from, " to ", to, ".")});
  prompt.count = DecodePrompt::Range{from, to};
  return prompt;
}

/// An answer of so many tokens, its first at `first` and its last at `last`.
BenchSample answered(double first, double last, int64_t tokens, int64_t accepted = 0, int64_t rejected = 0) {
  BenchSample s;
  s.end = SampleEnd::finished;
  s.status = 200;
  s.sent = 1;
  s.first = first;
  s.last = last;
  s.output_tokens = tokens;
  s.accepted_drafts = accepted;
  s.rejected_drafts = rejected;
  s.answer = "1, 2, 3.";
  s.finish = "stop";
  return s;
}

}  // namespace

TEST_CASE("bench decode: defaults, and mistakes named") {
  const PromptSet prompts = builtin_prompts("glm53-tiny");
  const DecodePlan plan = plan_of([](DecodeOptions&) {}, prompts);
  CHECK(plan.phases == std::vector<std::string>{"structured", "prose", "code", "edit", "mixed"});
  CHECK(plan.streams == std::vector<size_t>{1, 2, 4, 8});
  CHECK(plan.modes == std::vector<std::string>{"auto"});
  CHECK(plan.coherence);
  CHECK(plan_of([](DecodeOptions& o) { o.compare_off = true; }, prompts).modes ==
        std::vector<std::string>{"auto", "off"});
  const auto with = [&](const std::function<void(DecodeOptions&)>& change) {
    return refused([&] { plan_of(change, prompts); });
  };
  CHECK(with([](DecodeOptions& o) { o.runs = 0; }).starts_with("--runs must be"));
  CHECK(with([](DecodeOptions& o) { o.streams = "1,,2"; }).starts_with("--streams must be"));
  CHECK(with([](DecodeOptions& o) { o.streams = "0"; }).starts_with("--streams"));
  CHECK(with([](DecodeOptions& o) { o.max_tokens = 1; }).starts_with("--max-tokens"));
  CHECK(with([](DecodeOptions& o) { o.speculation = "on"; }).starts_with("--speculation"));
  CHECK(with([](DecodeOptions& o) { o.timeout = "soon"; }).starts_with("--timeout"));
  CHECK(with([](DecodeOptions& o) { o.phases = {"poetry"}; }) == "there are no prompts of class 'poetry'");
  CHECK(with([](DecodeOptions& o) {
          o.compare_off = true;
          o.speculation = "off";
        }).starts_with("--compare-off"));
}

TEST_CASE("sixteen streams ask sixteen things in every class, for small and large models") {
  for (const char* model : {"glm53-tiny", "GLM-5.3-Flash"}) {
    const PromptSet set = builtin_prompts(model);
    for (const std::string_view phase : kPhases) {
      CAPTURE(phase);
      std::set<std::string> texts;
      const std::vector<DecodePrompt> prompts = prompts_of_phase(set, phase);
      REQUIRE(prompts.size() >= 16);
      for (size_t i = 0; i < 16; ++i) {
        std::string all;
        for (const auto& message : prompts[i].messages) all += message.text;
        texts.insert(all);
        CHECK(prompts[i].messages.back().role == "user");
      }
      CHECK(texts.size() == 16);
    }
  }
  CHECK(builtin_prompts("GLM-5.3-Flash").at("structured").front().count->to == 200);
}

TEST_CASE("prompts of a file") {
  const PromptSet set = prompts_of(parse_json(
      R"({"sums": ["What is 1 + 1?", {"prompt": "What is 12 + 30?", "contains": "42"}],
          "talk": [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
                                 {"role": "user", "content": "Count."}], "count": [1, 3], "json": false, "like": "1 2"}]})"));
  REQUIRE(set.at("sums").size() == 2);
  CHECK(set.at("sums")[1].contains == "42");
  REQUIRE(set.at("talk")[0].messages.size() == 3);
  CHECK(set.at("talk")[0].count->to == 3);
  CHECK(prompts_of_phase(set, "mixed").size() == 4);  // in turns, the shorter class again
  CHECK(plan_of([](DecodeOptions&) {}, set).phases == std::vector<std::string>{"sums", "talk", "mixed"});

  const auto mistake = [](const char* text) { return refused([&] { prompts_of(parse_json(text)); }); };
  CHECK(mistake("[]").find("it is no object of classes") != std::string::npos);
  CHECK(mistake(R"({"a": []})").find("a is no array of prompts") != std::string::npos);
  CHECK(mistake(R"({"a": [""]})").find("a[0] is neither text nor object") != std::string::npos);
  CHECK(mistake(R"({"a": [{"json": true}]})").find("a[0] has neither prompt nor messages") != std::string::npos);
  CHECK(mistake(R"({"a": [{"prompt": "x", "count": [2, 1]}]})").find("a[0].count is no") != std::string::npos);
  CHECK(mistake(R"({"a": [{"prompt": "x", "jsn": true}]})").find("a[0].jsn is none of") != std::string::npos);
  CHECK(mistake(R"({"a": [{"messages": [{"role": "user"}]}]})").find("without role or content") != std::string::npos);
}

TEST_CASE("what is no answer") {
  CHECK(fault_of(counting(1, 5), "1, 2, 3, 4, 5.") == "sound");
  CHECK(fault_of(counting(98, 102), "98, 99, 100, 10", false) == "sound");  // the budget ended within 101
  CHECK(fault_of(counting(1, 5), "1, 2, 4, 5.") == "counts 4 instead of 3");
  CHECK(fault_of(counting(1, 5), "1, 2, 3.") == "stops counting before 4");
  CHECK(fault_of(counting(1, 3), "1, 2, 3, 4.") == "counts 4 behind the last number");
  CHECK(fault_of(counting(1, 3), "one, two, three") == "counts nothing");
  CHECK(fault_of(counting(98, 102), "98, 99, 10") == "counts 10 instead of 100");
  CHECK(fault_of({}, "") == "the answer is empty");
  std::string text = "It went very";
  for (int i = 0; i < 17; ++i) text += " well";
  CHECK(fault_of({}, text) != "sound");
  std::string long_text;
  for (int i = 0; i < 100; ++i) long_text += cat("word", i, " ");
  CHECK(fault_of({}, long_text + "end") == "sound");
  for (int i = 0; i < 17; ++i) long_text += "and ";
  CHECK(fault_of({}, long_text + "end") == "'and' more than 16 times in succession");

  DecodePrompt json;
  json.json = true;
  json.contains = "Anna";
  CHECK(fault_of(json, R"({"name": "Anna"})") == "sound");
  CHECK(fault_of(json, "```json\n{\"name\": \"Anna\"}\n```") == "sound");
  CHECK(fault_of(json, R"({"name": "Anna")") == "is no JSON");
  CHECK(fault_of(json, R"({"name": "An)", false) == "sound");
  CHECK(fault_of(json, R"({"name": "Ben"})") == "does not contain 'Anna'");

  DecodePrompt edit;
  edit.like = "The old pilot sees the boats in the harbour";
  CHECK(fault_of(edit, "The young Anna sees the boats in the harbour") ==
        "has only 7 of 9 words of the text it should repeat");
  CHECK(fault_of(edit, "The old Anna sees the boats in the harbour") == "sound");
  CHECK(fault_of(edit, "The old Anna sees the", false) == "sound");
  CHECK(fault_of(edit, "The old Anna sees the") != "sound");
}

TEST_CASE("a run counts from the first to the last token") {
  const std::vector<BenchSample> samples = {answered(1.5, 2.5, 101, 60, 20), answered(2.0, 3.5, 31, 0, 0)};
  const DecodeRun run = decode_run(samples);
  CHECK(run.each == std::vector<double>{100, 20});
  CHECK(run.all == doctest::Approx(130 / 2.0));
  CHECK(run.first_token == doctest::Approx(0.75));
  CHECK(run.tokens_a_step == doctest::Approx(130.0 / 70));
  CHECK(run.accepted == 60);
  CHECK(run.rejected == 20);
  CHECK(run.failed == 0);

  BenchSample lost;
  lost.end = SampleEnd::failed;
  lost.error = "rank lost";
  const DecodeRun partly = decode_run(std::vector<BenchSample>{lost, answered(1.5, 2.5, 11), answered(1.5, 1.5, 1)});
  CHECK(partly.failed == 2);
  CHECK(partly.error == "rank lost");
  CHECK(partly.each == std::vector<double>{10});
  CHECK(decode_run(std::vector<BenchSample>{lost}).each.empty());
}

TEST_CASE("medians and extremes; runs without an answer do not count") {
  CHECK(middle_of({}).median == 0);
  CHECK(middle_of({3, 1, 2}).median == 2);
  CHECK(middle_of({4, 1, 2, 3}).median == 2.5);
  CHECK(middle_of({4, 1, 2, 3}).high == 4);
  const DecodeRun fast = decode_run(std::vector<BenchSample>{answered(1, 2, 101, 90, 10)});
  const DecodeRun slow = decode_run(std::vector<BenchSample>{answered(1, 2, 51, 30, 70)});
  const DecodeResult result = summarise_decode({"prose", "auto", 1}, {fast, DecodeRun{}, slow});
  CHECK(result.all.low == 50);
  CHECK(result.all.high == 100);
  CHECK(result.accepted_share == doctest::Approx(0.6));
}

TEST_CASE("the report names the gain of drafts, failures and faults") {
  const PromptSet prompts = builtin_prompts("tiny");
  const DecodePlan plan = plan_of(
      [](DecodeOptions& o) {
        o.compare_off = true;
        o.runs = 1;
      },
      prompts);
  const auto cell = [](const char* mode, int64_t tokens) {
    return summarise_decode({"prose", mode, 1}, {decode_run(std::vector<BenchSample>{answered(1, 2, tokens)})});
  };
  std::vector<DecodeResult> results = {cell("auto", 301), cell("off", 101)};
  Coherence coherence;
  coherence.take(counting(1, 3), "here", answered(1, 2, 4));
  CHECK(render_decode(results, plan, coherence).find("coherence: 1 answers are sound") != std::string::npos);
  BenchSample other = answered(1, 2, 4);
  other.answer = "1, 2, 3!";
  coherence.take(counting(1, 3), "there", other);
  other.answer = "1, 3!";
  coherence.take(counting(1, 3), "elsewhere", other);
  REQUIRE(coherence.faults().size() == 3);
  CHECK(coherence.faults()[0] == "there: not the answer of here; they differ from byte 7 on");
  CHECK(coherence.faults()[1] == "elsewhere: the answer counts 3 instead of 2");

  results[1].runs[0].failed = 2;
  results[1].runs[0].error = "rank lost";
  const std::string table = render_decode(results, plan, coherence);
  CAPTURE(table);
  CHECK(table.find("with/without") != std::string::npos);
  CHECK(table.find("3.00") != std::string::npos);
  CHECK(table.find("prose, 1 streams: 2 requests failed: rank lost") != std::string::npos);
  CHECK(table.find("coherence: 3 faults in 3 answers") != std::string::npos);
  const auto json = decode_json(results, plan, coherence, "tiny");
  CHECK(json["cells"][0]["gain"].get<double>() == doctest::Approx(3));
  CHECK_FALSE(json["cells"][1].contains("gain"));
  CHECK(json["cells"][0]["runs"][0]["tokens_per_s_all"].get<double>() == doctest::Approx(300));
  CHECK(json["coherence"]["faults"].size() == 3);
}

TEST_CASE("a run asks for what the plan says, with a salt of its own, and takes counts of drafts from the answers") {
  std::mutex mutex;
  std::vector<nlohmann::ordered_json> bodies;  // guarded by mutex
  HttpServer server({});
  server.route("POST", "/v1/chat/completions",
               [&](const HttpRequest& request, const std::shared_ptr<HttpReply>& reply) {
                 const auto body = parse_json(request.body);
                 {
                   const std::scoped_lock lock(mutex);
                   bodies.push_back(body);
                 }
                 reply->start_stream(200, "text/event-stream", {});
                 for (const char* text : {"1, ", "2, ", "3."})
                   reply->write(cat("data: {\"choices\":[{\"delta\":{\"content\":\"", text, "\"}}]}\n\n"));
                 reply->write("data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n");
                 const bool off = body.contains("speculation");
                 reply->write(cat("data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":9",
                                  off ? ""
                                      : ",\"completion_tokens_details\":{\"accepted_prediction_tokens\":6,"
                                        "\"rejected_prediction_tokens\":2}",
                                  "}}\n\ndata: [DONE]\n\n"));
                 reply->finish();
               });
  const uint16_t port = server.listen_tcp("127.0.0.1", 0);
  server.start();
  PromptSet prompts;
  prompts["count"] = {counting(1, 3), counting(1, 4)};
  const DecodePlan plan = plan_of(
      [](DecodeOptions& o) {
        o.phases = {"count"};
        o.streams = "2";
        o.runs = 2;
        o.compare_off = true;
        o.max_tokens = 17;
      },
      prompts);
  Coherence coherence;
  std::vector<std::string> said;
  const auto results = measure_decode(cat("http://127.0.0.1:", port), "", plan, prompts, coherence,
                                      [&](const std::string& what) { said.push_back(what); });
  server.stop(std::chrono::milliseconds(0));
  CHECK(said == std::vector<std::string>{"count, 2 streams"});
  REQUIRE(results.size() == 2);
  CHECK(results[0].cell.speculation == "auto");
  CHECK(results[0].tokens_a_step.median == doctest::Approx(4));  // 8 tokens in 2 steps, twice
  CHECK(results[0].accepted_share == doctest::Approx(0.75));
  CHECK(results[1].tokens_a_step.median == doctest::Approx(1));
  REQUIRE(results[1].runs.size() == 2);
  CHECK(bodies.size() == 12);  // a run to warm up and two, two streams, two modes
  CHECK(coherence.answers() == 12);
  CHECK(coherence.faults().size() == 6);  // the second prompt asks for a 4
  std::set<std::string> salts;
  for (const auto& body : bodies) {
    CHECK(body["max_tokens"] == 17);
    CHECK(body["temperature"] == 0);
    salts.insert(body["cache_salt"].get<std::string>());
  }
  CHECK(salts.size() == 6);
}
