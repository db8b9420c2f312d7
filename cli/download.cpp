// glm53ctl download.
#include "cli/agent_program.h"
#include "cli/commands.h"
#include "common/strings.h"

namespace glm53::cli {

std::vector<std::string> download_arguments(const std::string& program, const GlobalOptions& global,
                                            const DownloadOptions& options) {
  std::vector<std::string> argv{program, "download"};
  // "--name=value": a value may begin with a dash.
  const auto add = [&](const char* name, const std::string& value) {
    if (!value.empty()) argv.push_back(cat(name, "=", value));
  };
  add("--config", global.config);
  add("--cache", options.cache);
  for (const std::string& glob : options.include) add("--include", glob);
  for (const std::string& glob : options.exclude) add("--exclude", glob);
  add("--limit-rate", options.limit_rate);
  for (const auto& [name, on] : {std::pair{"--offline", options.offline},
                                 {"--verify", options.verify},
                                 {"--dry-run", options.dry_run},
                                 {"--no-env", options.no_env},
                                 {"--json", global.json}}) {
    if (on) argv.emplace_back(name);
  }
  if (!options.repo.empty()) {
    argv.emplace_back("--");
    argv.push_back(options.repo);
  }
  return argv;
}

int run_download(const GlobalOptions& global, const DownloadOptions& options) {
  become(download_arguments(agent_program(), global, options));
}

}  // namespace glm53::cli
