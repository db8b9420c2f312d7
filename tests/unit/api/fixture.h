// What the tests of the API process share: the tiny model's tokenizer and settings, a fake rank, a running server.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>
#include <sys/socket.h>

#include "common/config.h"
#include "common/error.h"
#include "common/file.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/rank_contract.h"
#include "common/socket.h"
#include "engine/api/api_server.h"
#include "engine/api/request.h"
#include "engine/runtime/wire.h"
#include "engine/text/tokenizer.h"
#include "tests/temp_dir.h"

namespace api_test {

using Json = nlohmann::ordered_json;
using glm53::text::Tokenizer;
namespace wire = glm53::wire;

inline const std::string kModel = std::string(GLM53_SOURCE_DIR) + "/models/glm53-tiny";

inline const Tokenizer& tiny() {
  static const Tokenizer tokenizer = Tokenizer::load(kModel + "/tokenizer.json");
  return tokenizer;
}

/// A limit for things that happen soon; nothing is measured by it.
inline constexpr std::chrono::seconds kSoon{20};

template <class Condition>
bool eventually(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + kSoon;
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

using glm53::test::TempDir;

/// Rank 0 as far as the wire shows it. It answers what the test tells it to.
class FakeRank {
 public:
  explicit FakeRank(const std::string& socket, uint64_t generation = 1, const std::string& digest = "model-a",
                    bool gate_open = true)
      : fd_(glm53::connect_unix(socket)) {
    wire::Hello hello;
    hello.generation = generation;
    hello.model_digest = digest;
    hello.vocab = 2688;
    hello.max_context = 4096;
    hello.max_seqs = 4;
    hello.eos = {2624, 2631, 2633};
    send(hello);
    try {
      stats(gate_open);
    } catch (const glm53::Error& e) {  // turned away already; the reader sees the end
      if (e.code() != glm53::Code::peer_lost) throw;
    }
    reader_ = std::thread([this] { read(); });
  }
  ~FakeRank() { die(); }
  FakeRank(const FakeRank&) = delete;
  FakeRank& operator=(const FakeRank&) = delete;

  void stats(bool gate_open, bool peers_alive = true) {
    wire::Stats s;
    s.gate_open = gate_open;
    s.peers_alive = peers_alive;
    s.running = 1;
    s.blocks_used = 1;
    s.blocks_total = 4;
    send(s);
  }
  void send(const wire::Message& message) {
    const std::scoped_lock lock(write_mutex_);
    wire::send_frame(fd_.get(), message);
  }
  /// Waits for the next Submit.
  wire::Submit submitted() { return take(submits_); }
  wire::Cancel cancelled() { return take(cancels_); }
  size_t submits_waiting() {
    const std::scoped_lock lock(mutex_);
    return submits_.size();
  }
  /// Sends tokens of `text` one delta each, then the end by `stop_token` (or "length" when -1).
  void answer(const wire::Submit& s, const std::string& text, int32_t stop_token = 2631) {
    uint32_t index = static_cast<uint32_t>(s.emitted.size());
    for (const int32_t id : tiny().encode(text)) tokens(s.id, index++, {id});
    end(s.id, index, stop_token);
  }
  void tokens(uint64_t id, uint32_t index, std::vector<int32_t> ids) {
    wire::Delta d;
    d.id = id;
    d.index = index;
    d.tokens = std::move(ids);
    d.cached_tokens = 3;
    send(d);
  }
  void end(uint64_t id, uint32_t index, int32_t stop_token) {
    wire::Delta d;
    d.id = id;
    d.index = index;
    if (stop_token >= 0) d.tokens = {stop_token};
    d.stop_token = stop_token;
    d.finish = stop_token >= 0 ? "stop" : "length";
    send(d);
  }
  void die() {
    ::shutdown(fd_.get(), SHUT_RDWR);
    if (reader_.joinable()) reader_.join();
    fd_.reset();
  }

 private:
  void read() {
    try {
      while (true) {
        wire::Message m = wire::receive_frame(fd_.get());
        const std::scoped_lock lock(mutex_);
        if (auto* s = std::get_if<wire::Submit>(&m)) submits_.push_back(std::move(*s));
        if (auto* c = std::get_if<wire::Cancel>(&m)) cancels_.push_back(*c);
        changed_.notify_all();
      }
    } catch (const glm53::Error&) {
      // The end of the connection ends the rank.
    }
  }
  template <class T>
  T take(std::deque<T>& queue) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kSoon, [&] { return !queue.empty(); })) {
      throw glm53::Error(glm53::Code::stalled, "the API process sent nothing");
    }
    T front = std::move(queue.front());
    queue.pop_front();
    return front;
  }

  glm53::UniqueFd fd_;
  std::mutex write_mutex_, mutex_;
  std::condition_variable changed_;
  std::deque<wire::Submit> submits_;
  std::deque<wire::Cancel> cancels_;
  std::thread reader_;
};

using Overrides = std::vector<std::pair<std::string, std::string>>;

inline glm53::ApiConfig api_config(const TempDir& dir, const Overrides& overrides = {}) {
  glm53::Config config;
  config.set("model.path", kModel, "test");
  for (const auto& [key, value] : overrides) config.set(key, value, "test");
  glm53::ApiConfig out;
  out.rank_socket = dir / "rank.sock";
  out.admin_socket = dir / "admin.sock";
  out.bind = "127.0.0.1";
  out.port = 0;
  out.version = "1.2.3 (test)";
  out.config_json = glm53::dump(config.to_json());
  return out;
}

/// A server with its gate open, without a rank.
class Server {
 public:
  explicit Server(const Overrides& overrides = {}) : config_(api_config(dir_, overrides)), server_(config_) {
    admin("gate_open");
  }
  const std::string& rank_socket() const { return config_.rank_socket; }
  std::string url() const { return "http://127.0.0.1:" + std::to_string(server_.port()); }
  uint16_t port() const { return server_.port(); }
  Json admin(const std::string& command) {
    return glm53::parse_json(glm53::admin_call(config_.admin_socket, command, 20000));
  }
  /// Waits until the server has taken the rank's Hello and opened gate.
  void wait_ready() {
    if (!eventually([&] { return get("/ready").status == 200; })) {
      throw glm53::Error(glm53::Code::stalled, "the server does not become ready");
    }
  }
  glm53::HttpAnswer get(const std::string& path) { return glm53::HttpClient(url()).request("GET", path); }
  glm53::HttpAnswer post(const std::string& path, const std::string& body, const std::string& key = {}) {
    glm53::HttpClient client(url(), key);
    client.set_timeout(kSoon, kSoon);
    return client.request("POST", path, body);
  }
  glm53::api::ApiServer& operator*() { return server_; }
  const TempDir& dir() const { return dir_; }

 private:
  TempDir dir_;
  glm53::ApiConfig config_;
  glm53::api::ApiServer server_;
};

/// A server with a rank that answers what a test says.
class RankedServer {
 public:
  explicit RankedServer(const Overrides& overrides = {}) : server_(overrides), rank_(server_.rank_socket()) {
    server_.wait_ready();
  }
  /// The answer when the model writes `output` and ends by `stop_token` (-1: cut); the prompt it read goes to `prompt`.
  glm53::HttpAnswer answer(const std::string& path, const Json& body, const std::string& output, int32_t stop_token,
                           std::string* prompt = nullptr) {
    auto got = std::async(std::launch::async, [&] { return server_.post(path, glm53::dump(body)); });
    const wire::Submit s = rank_.submitted();
    if (prompt != nullptr) *prompt = tiny().decode(s.prompt);
    submitted = s;
    rank_.answer(s, output, stop_token);
    return got.get();
  }
  /// The answer of a request that never reaches the rank.
  glm53::HttpAnswer refused(const std::string& path, const Json& body) { return server_.post(path, glm53::dump(body)); }
  Server& server() { return server_; }
  FakeRank& rank() { return rank_; }

  wire::Submit submitted;  ///< what the rank got last

 private:
  Server server_;
  FakeRank rank_;
};

/// A connection on which a test writes HTTP by hand.
class RawClient {
 public:
  RawClient(uint16_t port, const std::string& path, const std::string& body)
      : fd_(glm53::connect_tcp("127.0.0.1", port, std::chrono::steady_clock::now() + kSoon)) {
    const std::string head =
        "POST " + path +
        " HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
        "\r\n\r\n" + body;
    glm53::send_all(fd_.get(), std::as_bytes(std::span(head)));
  }
  void close() { fd_.reset(); }

 private:
  glm53::UniqueFd fd_;
};

/// The whole answer to one request with headers of its own ("Name: value\r\n" each) on a connection of its own.
inline std::string raw_request(uint16_t port, const std::string& method_and_path, const std::string& headers,
                               const std::string& body) {
  glm53::UniqueFd fd(glm53::connect_tcp("127.0.0.1", port, std::chrono::steady_clock::now() + kSoon));
  const std::string text = method_and_path +
                           " HTTP/1.1\r\nConnection: close\r\nContent-Length: " + std::to_string(body.size()) + "\r\n" +
                           headers + "\r\n" + body;
  glm53::send_all(fd.get(), std::as_bytes(std::span(text)));
  return glm53::read_all(fd.get());
}

/// Events of an SSE body; the last one must be [DONE].
inline std::vector<Json> events_of(const std::string& body, bool* done = nullptr) {
  std::vector<Json> events;
  bool ended = false;
  glm53::SseParser parser([&](std::string_view, std::string_view data) {
    if (data == "[DONE]") {
      ended = true;
    } else {
      events.push_back(glm53::parse_json(data));
    }
  });
  parser.feed(body);
  if (done != nullptr) *done = ended;
  return events;
}

/// Events of an SSE body with their names; data that is no JSON fails.
inline std::vector<std::pair<std::string, Json>> named_events_of(const std::string& body) {
  std::vector<std::pair<std::string, Json>> events;
  glm53::SseParser parser(
      [&](std::string_view name, std::string_view data) { events.emplace_back(name, glm53::parse_json(data)); });
  parser.feed(body);
  return events;
}

inline std::string header(const glm53::HttpAnswer& answer, const std::string& name) {
  for (const auto& [key, value] : answer.headers) {
    if (key.size() == name.size() && std::equal(key.begin(), key.end(), name.begin(), [](char a, char b) {
          return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
        })) {
      return value;
    }
  }
  return {};
}

}  // namespace api_test
