// Following an operation: events in, lines or bars out.
#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/admin_client.h"

namespace glm53::cli {

/// How an operation ended.
struct Outcome {
  std::string state;  ///< done, failed, cancelled; "launched" when only that was waited for
  std::optional<Error> error;
  bool preflight_failed = false;  ///< a check before the start was why
};

/// What is known of an operation from its events. Pure: the caller prints.
class OperationView {
 public:
  /// Takes one event; returns the lines that a plain log should show for it (none for mere progress).
  std::vector<std::string> take(std::string_view event, std::string_view data);
  /// One line a process that is on its way: "rank0  head  load_target  [###---]  57%  8.1 MiB of 14.2 MiB".
  std::vector<std::string> bars(int width) const;
  const std::optional<Outcome>& outcome() const { return outcome_; }
  /// True once every rank that the operation starts was started.
  bool launched() const { return rank0_started_; }
  /// Last log lines of children, oldest first; shown when the operation fails.
  const std::vector<std::string>& log_lines() const { return log_lines_; }

 private:
  struct Process {
    std::string name, node, phase;
    int64_t done = 0, total = 0;
  };
  std::vector<std::string> take_action(const nlohmann::ordered_json& event);
  std::vector<std::string> take_progress(const nlohmann::ordered_json& event);
  void take_done(const nlohmann::ordered_json& event);
  std::map<std::string, Process> processes_;
  std::vector<std::string> log_lines_;
  std::optional<Outcome> outcome_;
  bool rank0_started_ = false, preflight_failed_ = false;
};

struct FollowOptions {
  bool json = false;                   ///< print nothing on the way
  bool until_launched = false;         ///< return when the ranks run, not when they are ready
  std::chrono::milliseconds limit{0};  ///< 0: none
};
/// Follows to the end; an agent that restarts on the way is found again. Throws Error(stalled) at the limit (the
/// operation goes on).
Outcome follow(AdminClient& agent, const std::string& operation, const FollowOptions& options);
/// For commands that only wait: follows (or not, when `detach`) and prints how it ended, `done` where it went well.
/// Returns the exit code; throws the operation's error where nothing machine-readable was asked for.
int follow_to_end(const GlobalOptions& global, AdminClient& agent, const std::string& operation, bool detach,
                  std::string_view done);

}  // namespace glm53::cli
