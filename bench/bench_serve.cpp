// Measures a running server over its API, as a client sees it: time to the first token, decode speed, throughput of
// several streams, and the cost of idle connections. Prints a table and, with --json, a file.
//
//   bench_serve --url http://127.0.0.1:8888 --streams 1,4 --prompt-tokens 200 --max-tokens 128 --runs 5 [--connections
//   5000 --api-pid N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using json = nlohmann::ordered_json;

struct Settings {
  std::string url = "http://127.0.0.1:8888", key_file, json_file;
  std::vector<int> streams{1, 2, 4};
  int prompt_tokens = 200, max_tokens = 128, runs = 5, connections = 0, api_pid = 0;
};

double milliseconds(Clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

HttpClient connect(const Settings& s) {
  HttpClient client(s.url, s.key_file.empty() ? std::string() : read_secret(s.key_file));
  client.set_timeout(std::chrono::seconds(5), std::chrono::seconds(120));
  return client;
}

/// A text of about `tokens` tokens by the server's own count.
std::string prompt_of(const Settings& s, int tokens) {
  HttpClient client = connect(s);
  std::string text = "Tell me a long story about a fox, a river and a barn.";
  for (int have = 0; have < tokens; text += " The fox wanted to learn to paint and asked a friend for help.") {
    const HttpAnswer answer = client.request("POST", "/tokenize", json{{"prompt", text}}.dump());
    if (answer.status != 200)
      throw Error(Code::unavailable, cat("/tokenize answered ", answer.status, ": ", answer.body));
    have = parse_json(answer.body).at("count").get<int>();
  }
  return text;
}

struct Sample {
  double first_ms = 0, decode_per_s = 0, total_ms = 0;
  int tokens = 0, prompt_tokens = 0;
  std::string error;
};

Sample one_stream(const Settings& s, const std::string& prompt) {
  Sample sample;
  try {
    HttpClient client = connect(s);
    const json body{{"messages", {{{"role", "user"}, {"content", prompt}}}},
                    {"temperature", 0},
                    {"max_tokens", s.max_tokens},
                    {"ignore_eos", true},
                    {"stream", true},
                    {"stream_options", {{"include_usage", true}}},
                    {"chat_template_kwargs", {{"enable_thinking", false}}}};
    const auto begin = Clock::now();
    Clock::time_point first{}, last{};
    SseParser events([&](std::string_view, std::string_view data) {
      if (data == "[DONE]") return;
      const json event = parse_json(data);
      if (event.contains("error")) sample.error = event["error"].dump();
      if (event.contains("usage") && event["usage"].is_object()) {
        sample.tokens = event["usage"].at("completion_tokens").get<int>();
        sample.prompt_tokens = event["usage"].at("prompt_tokens").get<int>();
      }
      if (!event.contains("choices") || event["choices"].empty()) return;
      const json& delta = event["choices"][0]["delta"];
      if (!delta.contains("content") || !delta["content"].is_string() || delta["content"].get<std::string>().empty())
        return;
      last = Clock::now();
      if (first == Clock::time_point{}) first = last;
    });
    const HttpAnswer answer = client.stream("POST", "/v1/chat/completions", body.dump(), [&](std::string_view chunk) {
      events.feed(chunk);
      return true;
    });
    if (answer.status != 200) throw Error(Code::unavailable, cat("answered ", answer.status, ": ", answer.body));
    sample.first_ms = milliseconds(first - begin);
    sample.total_ms = milliseconds(Clock::now() - begin);
    if (sample.tokens > 1 && last > first)
      sample.decode_per_s = (sample.tokens - 1) * 1000.0 / milliseconds(last - first);
  } catch (const std::exception& e) {
    sample.error = e.what();
  }
  return sample;
}

json bench_streams(const Settings& s) {
  const std::string prompt = prompt_of(s, s.prompt_tokens);
  json rows = json::array();
  std::printf("%8s %10s %12s %16s %18s\n", "streams", "prompt", "first ms", "tok/s a stream", "tok/s in total");
  for (const int n : s.streams) {
    std::vector<double> first, each, total;
    int prompt_tokens = 0;
    for (int run = 0; run <= s.runs; ++run) {  // the first run warms up and does not count
      std::vector<Sample> samples(static_cast<size_t>(n));
      const auto begin = Clock::now();
      {
        std::vector<std::jthread> threads;
        for (int i = 0; i < n; ++i) {
          // Different prompts: the streams must not profit from each other's prefix.
          threads.emplace_back(
              [&, i] { samples[static_cast<size_t>(i)] = one_stream(s, cat("Story ", run * 100 + i, ". ", prompt)); });
        }
      }
      const double wall = milliseconds(Clock::now() - begin);
      int tokens = 0;
      for (const Sample& sample : samples) {
        if (!sample.error.empty()) throw Error(Code::unavailable, sample.error);
        tokens += sample.tokens;
        prompt_tokens = sample.prompt_tokens;
        if (run > 0) {
          first.push_back(sample.first_ms);
          each.push_back(sample.decode_per_s);
        }
      }
      if (run > 0) total.push_back(tokens * 1000.0 / wall);
    }
    std::printf("%8d %10d %12.1f %16.1f %18.1f\n", n, prompt_tokens, median(first), median(each), median(total));
    rows.push_back({{"streams", n},
                    {"prompt_tokens", prompt_tokens},
                    {"max_tokens", s.max_tokens},
                    {"runs", s.runs},
                    {"first_token_ms", median(first)},
                    {"decode_tokens_per_s", median(each)},
                    {"total_tokens_per_s", median(total)}});
  }
  return rows;
}

json bench_connections(const Settings& s) {
  const std::string rest = s.url.substr(s.url.find("//") + 2);
  const size_t colon = rest.rfind(':');
  const std::string host = rest.substr(0, colon);
  const auto port = static_cast<uint16_t>(std::stoi(rest.substr(colon + 1)));
  std::vector<UniqueFd> idle;
  idle.reserve(static_cast<size_t>(s.connections));
  for (int i = 0; i < s.connections; ++i)
    idle.push_back(connect_tcp(host, port, Clock::now() + std::chrono::seconds(10)));
  std::vector<double> times;
  for (int i = 0; i < 50; ++i) {
    HttpClient client = connect(s);
    const auto begin = Clock::now();
    if (client.request("GET", "/v1/models").status != 200)
      throw Error(Code::unavailable, "/v1/models did not answer 200");
    times.push_back(milliseconds(Clock::now() - begin));
  }
  const uint64_t rss = s.api_pid > 0 ? resident_bytes(s.api_pid) : 0;
  const double worst = *std::max_element(times.begin(), times.end());
  std::printf("%d idle connections: a new one answered in %.2f ms (median of 50, worst %.2f ms), api process %s\n",
              s.connections, median(times), worst, human_bytes(static_cast<int64_t>(rss)).c_str());
  return {
      {"connections", s.connections}, {"new_request_ms", median(times)}, {"worst_ms", worst}, {"api_rss_bytes", rss}};
}

int run(int argc, char** argv) {
  Settings s;
  CLI::App app("Benchmark of a running server");
  app.add_option("--url", s.url, "Address of the API")->capture_default_str();
  app.add_option("--key-file", s.key_file, "File with the API key");
  app.add_option("--streams", s.streams, "Numbers of parallel streams")->delimiter(',');
  app.add_option("--prompt-tokens", s.prompt_tokens, "Prompt length")->capture_default_str();
  app.add_option("--max-tokens", s.max_tokens, "Output length")->capture_default_str();
  app.add_option("--runs", s.runs, "Runs that count")->capture_default_str();
  app.add_option("--connections", s.connections, "Idle connections to hold; 0: leave this part out")
      ->capture_default_str();
  app.add_option("--api-pid", s.api_pid, "Process whose memory is reported");
  app.add_option("--json", s.json_file, "Where to write the figures");
  CLI11_PARSE(app, argc, argv);
  json result{{"url", s.url}, {"streams", bench_streams(s)}};
  if (s.connections > 0) result["idle"] = bench_connections(s);
  if (!s.json_file.empty()) write_file(s.json_file, result.dump(1) + "\n");
  return 0;
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  try {
    return glm53::run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "bench_serve: " << e.what() << "\n";
    return 1;
  }
}
