// Renewal of nodes' certificates, over the connection that the head has to them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "agent/trust/trust.h"

namespace glm53::trust {

/// The head's side. One thread.
class Renewal {
 public:
  struct Answer {
    int status = 0;
    std::string body;
  };
  /// Sends a body to the worker's POST /node/certificate. Throws Error when it cannot be reached.
  using Ask = std::function<Answer(const std::string& body)>;
  Renewal(std::shared_ptr<Trust> trust, std::chrono::milliseconds pause = std::chrono::hours(1))
      : trust_(std::move(trust)), pause_(pause) {}
  /// To be called when the worker has just answered: renews what is due, at most one attempt a pause. True: the worker
  /// has another certificate now. Throws Error for a renewal that failed; the old certificate counts on.
  bool tend(const Ask& worker);

 private:
  const std::shared_ptr<Trust> trust_;
  const std::chrono::milliseconds pause_;
  std::optional<std::chrono::steady_clock::time_point> tried_;
};

/// The worker's side: {} asks for its name, fingerprint and a request, {"certificate"} brings what was asked for.
std::string renewal_answer(Trust& trust, const std::string& body);

}  // namespace glm53::trust
