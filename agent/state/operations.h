// Records of changes of the wanted state, and of the actions that followed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "agent/state/database.h"

namespace glm53::state {

struct StepRow {
  int64_t seq = 0;
  std::string action, node, detail, state;  ///< running, done, failed
  TimeMs started_at = 0, finished_at = 0;   ///< 0: not yet
  std::string error;
};
struct OperationRow {
  std::string id;                      ///< "op-7"
  std::string kind, args_json, state;  ///< start, stop, restart; running, done, failed, cancelled
  std::string requested_by;
  TimeMs created_at = 0, finished_at = 0;
  std::string error_code, error_text, error_remedy;
};

/// "op-7" -> 7; nullopt for anything else.
std::optional<int64_t> parse_operation_id(std::string_view id);

class Operations {
 public:
  explicit Operations(Database& db) : db_(db) {}
  /// A new one at work; returns its id.
  std::string create(const std::string& kind, const std::string& args_json, const std::string& requested_by,
                     TimeMs now);
  /// Does nothing to one that is finished already.
  void finish(const std::string& id, const std::string& state, TimeMs now, const std::string& code = {},
              const std::string& text = {}, const std::string& remedy = {});
  std::optional<OperationRow> get(const std::string& id);
  /// The one at work; at most one is.
  std::optional<OperationRow> running();
  std::vector<OperationRow> list(int limit);

  /// Returns the step's number.
  int64_t begin_step(const std::string& id, const std::string& action, const std::string& node,
                     const std::string& detail, TimeMs now);
  void end_step(const std::string& id, int64_t seq, const std::string& error, TimeMs now);
  /// Steps that an ended agent left at work.
  void interrupt_steps(TimeMs now);
  std::vector<StepRow> steps(const std::string& id);

 private:
  Database& db_;
};

}  // namespace glm53::state
