// glm53ctl stop.
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
  return follow_to_end(global, agent, answer["operation"].get<std::string>(), options.detach, "stopped");
}

}  // namespace glm53::cli
