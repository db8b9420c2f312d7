#include "agent/api/canary.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <poll.h>

#include <nlohmann/json.hpp>
#include <sys/socket.h>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::steady_clock;
/// One answer may take this long (a cold GPU compiles and captures); refusals are tried again for the second time,
/// because rank 0 reaches the API process only after it reported ready.
constexpr auto kAnswerLimit = std::chrono::seconds(240);
constexpr auto kRefusalLimit = std::chrono::seconds(20);
constexpr auto kRetry = std::chrono::milliseconds(200);
constexpr int kPollMs = 100;
constexpr std::string_view kPrompt = "Count from one to ten.";
constexpr int kTokens = 8;

/// One request, one line back. Throws Error; Error(cancelled) when told to stop.
std::string call(const std::string& socket, const std::string& line, const std::atomic<bool>& cancelled) {
  const auto deadline = steady_clock::now() + kAnswerLimit;
  const UniqueFd fd = connect_unix(socket);
  send_all(fd.get(), std::as_bytes(std::span(line)));
  std::string answer;
  std::array<char, 4096> buffer;
  while (answer.find('\n') == std::string::npos) {
    if (cancelled) throw Error(Code::cancelled, "the canary was called off");
    if (steady_clock::now() > deadline) throw Error(Code::stalled, "no answer within 240 s");
    pollfd p{fd.get(), POLLIN, 0};
    if (::poll(&p, 1, kPollMs) <= 0) continue;
    const ssize_t n = ::recv(fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) throw Error(Code::peer_lost, "the API process closed the connection");
    answer.append(buffer.data(), static_cast<size_t>(n));
    if (answer.size() > (1u << 20)) throw Error(Code::corrupt, "the answer has no end");
  }
  return answer.substr(0, answer.find('\n'));
}

}  // namespace

std::string refusal_text(const Json& answer) {
  const auto error = answer.is_object() ? answer.find("error") : answer.end();
  if (!answer.is_object()) return "refused: the answer is no object";
  if (error == answer.end()) return "refused";
  if (error->is_string()) return error->get<std::string>();
  const auto message = error->is_object() ? error->find("message") : error->end();
  const bool says = error->is_object() && message != error->end() && message->is_string();
  return says ? message->get<std::string>() : "refused, with an error of another form than documented";
}

std::string judge_canary(const std::string& answer_json) {
  Json j;
  try {
    j = parse_json(answer_json);
  } catch (const Error& e) {
    return cat("the answer is no JSON: ", e.what());
  }
  if (!j.is_object() || !j.contains("ok") || j["ok"] != true) {
    return refusal_text(j);
  }
  const auto tokens = j.find("tokens");
  if (tokens == j.end() || !tokens->is_number_integer() || tokens->get<int64_t>() < 1) return "it produced no token";
  const auto text = j.find("text");
  if (text != j.end() && text->is_string()) {
    const auto s = text->get<std::string>();
    if (s.size() >= 4 && std::all_of(s.begin(), s.end(), [](char c) { return c == '!'; }))
      return "degenerate text: " + s;
  }
  return {};
}

void CanaryRunner::start(uint64_t generation, const std::string& socket) {
  cancel();
  cancelled_ = false;
  {
    const std::lock_guard lock(mutex_);
    generation_ = generation;
    state_ = reconcile::Canary::running;
    error_.clear();
  }
  thread_ = std::thread([this, socket] { run(socket); });
}

reconcile::Canary CanaryRunner::state(uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return generation == generation_ ? state_ : reconcile::Canary::none;
}

std::string CanaryRunner::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void CanaryRunner::cancel() {
  cancelled_ = true;
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  generation_ = 0;
  state_ = reconcile::Canary::none;
}

void CanaryRunner::run(const std::string& socket) {
  const std::string line = dump(Json{{"do", "canary"}, {"prompt", kPrompt}, {"max_tokens", kTokens}}) + "\n";
  const auto give_up = steady_clock::now() + kRefusalLimit;
  std::string error;
  while (!cancelled_) {
    try {
      error = judge_canary(call(socket, line, cancelled_));
    } catch (const std::exception& e) {
      error = e.what();
    }
    if (error.empty() || steady_clock::now() >= give_up) break;
    std::this_thread::sleep_for(kRetry);
  }
  if (cancelled_) return;
  {
    const std::lock_guard lock(mutex_);
    state_ = error.empty() ? reconcile::Canary::passed : reconcile::Canary::failed;
    error_ = log::redact(error);
  }
  on_done_();
}

}  // namespace glm53::agent
