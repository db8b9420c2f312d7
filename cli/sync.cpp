// glm53ctl sync.
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
  return follow_to_end(global, agent, answer.at("operation").get<std::string>(), options.detach, "the worker has it");
}

}  // namespace glm53::cli
