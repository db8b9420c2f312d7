// What happened, for people: the event ring, and the wake-up of everybody who follows it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "agent/state/history.h"

namespace glm53::agent {

/// Thread-safe.
class Journal {
 public:
  /// `on_event` is called after each event, on the caller's thread; it must not block.
  Journal(state::Database& db, std::function<void()> on_event) : events_(db), on_event_(std::move(on_event)) {}
  /// Records an event and logs its text (filtered for secrets). `data` is sent to those who follow `operation`.
  void add(const std::string& level, const std::string& kind, const std::string& text,
           const nlohmann::ordered_json& data, const std::string& operation = {}, uint64_t generation = 0);
  /// An event without data of its own: shown as a log line.
  void note(const std::string& level, const std::string& text, const std::string& operation = {},
            uint64_t generation = 0);
  std::vector<state::EventRow> after(int64_t id, int limit, const std::string& operation = {}) {
    return events_.after(id, limit, operation);
  }
  std::vector<state::EventRow> last(int limit) { return events_.last(limit); }

 private:
  state::Events events_;
  std::function<void()> on_event_;
};

}  // namespace glm53::agent
