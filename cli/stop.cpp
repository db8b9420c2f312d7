// glm53ctl stop.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/operation.h"
#include "cli/terminal.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {

using Json = nlohmann::ordered_json;

int run_stop(const GlobalOptions& global, const StopOptions& options) {
  const auto drain = parse_duration(options.drain);
  if (!drain) throw Error(Code::usage, cat("--drain ", options.drain, ": no duration"), "--drain 30s");
  AdminClient agent(resolve_target(global));
  const Json answer = agent.put("/wanted", {{"state", "stopped"},
                                            {"drain_ms", options.now ? 0 : drain->count()},
                                            {"preempt", options.preempt || options.now}});
  if (!answer.contains("operation") || !answer["operation"].is_string()) {
    print_line(global.json ? dump({{"operation", nullptr}, {"state", "unchanged"}}) : "already stopped");
    return 0;
  }
  const auto operation = answer["operation"].get<std::string>();
  if (options.detach) {
    print_line(global.json ? dump({{"operation", operation}, {"state", "running"}}) : operation);
    return 0;
  }
  const Outcome outcome = follow(agent, operation, {.json = global.json});
  if (outcome.error && !global.json) throw *outcome.error;
  if (global.json) {
    Json result = {{"operation", operation}, {"state", outcome.state}};
    if (outcome.error) {
      result["error"] = {{"code", std::string(name(outcome.error->code()))}, {"message", outcome.error->what()}};
    }
    print_line(dump(result));
  } else {
    print_line(outcome.state == "done" ? "stopped" : outcome.state);
  }
  if (outcome.error) return std::max(1, ctl_exit(outcome.error->code()));
  return outcome.state == "done" ? 0 : 1;
}

}  // namespace glm53::cli
