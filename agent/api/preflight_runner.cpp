#include "agent/api/preflight_runner.h"

#include <algorithm>

#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {

using reconcile::Preflight;

void PreflightRunner::wait() {
  if (thread_.joinable()) thread_.join();
}

void PreflightRunner::start(int64_t key, Run run) {
  wait();
  {
    const std::lock_guard lock(mutex_);
    key_ = key;
    state_ = Preflight::running;
    failures_.clear();
    warnings_.clear();
  }
  thread_ = std::thread([this, run = std::move(run)] { work(run); });
}

void PreflightRunner::work(const Run& run) {
  std::vector<std::string> failures, warnings;
  bool asked_all = true;
  try {
    const auto nodes = run();
    failures = preflight::failures(nodes);
    for (const auto& node : nodes) {
      for (const auto& r : node.checks) {
        if (r.verdict == preflight::Verdict::warn) warnings.push_back(line(node.node, r));
        asked_all = asked_all && !(r.name == "reach" && r.verdict == preflight::Verdict::fail);
      }
    }
  } catch (const std::exception& e) {
    failures.push_back(cat("the checks could not be done: ", std::string_view(e.what())));
  }
  for (std::string& text : failures) text = log::redact(text);
  {
    const std::lock_guard lock(mutex_);
    // A worker that went away in between is waited for, as ever.
    state_ = !asked_all ? Preflight::none : failures.empty() ? Preflight::passed : Preflight::failed;
    failures_ = std::move(failures);
    warnings_ = std::move(warnings);
  }
  on_done_();
}

Preflight PreflightRunner::state(int64_t key) const {
  const std::lock_guard lock(mutex_);
  return key == key_ ? state_ : Preflight::none;
}

std::vector<std::string> PreflightRunner::failures() const {
  const std::lock_guard lock(mutex_);
  return failures_;
}

std::vector<std::string> PreflightRunner::warnings() const {
  const std::lock_guard lock(mutex_);
  return warnings_;
}

void PreflightRunner::forget_failure() {
  const std::lock_guard lock(mutex_);
  if (state_ == Preflight::failed) state_ = Preflight::none;
}

}  // namespace glm53::agent
