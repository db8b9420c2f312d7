// glm53ctl engine.
#include "cli/agent_program.h"
#include "cli/commands.h"
#include "common/strings.h"

namespace glm53::cli {

std::vector<std::string> engine_arguments(const std::string& program, const GlobalOptions& global,
                                          const EngineOptions& options) {
  std::vector<std::string> argv{program, "engine"};
  // "--name=value": a value may begin with a dash.
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) argv.push_back(cat(name, "=", value));
  };
  add("--config", global.config);
  add("--store", options.store);
  add("--file", options.file);
  if (options.use) argv.emplace_back("--use");
  if (global.json) argv.emplace_back("--json");
  argv.emplace_back("--");
  argv.push_back(options.action);
  if (!options.what.empty()) argv.push_back(options.what);
  return argv;
}

int run_engine(const GlobalOptions& global, const EngineOptions& options) {
  become(engine_arguments(agent_program(), global, options));
}

}  // namespace glm53::cli
