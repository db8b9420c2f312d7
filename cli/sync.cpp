// glm53ctl sync.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/operation.h"
#include "cli/terminal.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {

using Json = nlohmann::ordered_json;

Json sync_order(const std::string& what) {
  if (what.empty()) return Json::object();
  const size_t at = what.find('@');
  if (at == std::string::npos || at + 1 == what.size()) {
    throw Error(Code::usage, cat("'", what, "' names no commit"), "glm53ctl sync ORGANISATION/NAME@COMMIT");
  }
  return {{"repo", what.substr(0, at)}, {"revision", what.substr(at + 1)}};
}

int run_sync(const GlobalOptions& global, const SyncOptions& options) {
  AdminClient agent(resolve_target(global));
  const Json answer = agent.post("/sync", sync_order(options.what));
  const auto operation = answer.at("operation").get<std::string>();
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
    print_line(outcome.state == "done" ? "the worker has it" : outcome.state);
  }
  if (outcome.error) return std::max(1, ctl_exit(outcome.error->code()));
  return outcome.state == "done" ? 0 : 1;
}

}  // namespace glm53::cli
