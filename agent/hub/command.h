// `glm53-agent download`: a download without a running agent, GPU or engine. `glm53ctl download` runs it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "agent/hub/downloader.h"
#include "common/config.h"

namespace glm53::hub {

struct CommandOptions {
  std::string what;    ///< "REPO", "REPO@REVISION", or "": model.repo of the configuration
  std::string config;  ///< file; "" = /etc/glm53/config.toml if it is there
  std::string cache;   ///< "" = as configured
  std::vector<std::string> include, exclude;
  std::string limit_rate;  ///< "200M"; "" = as configured
  bool offline = false, json = false, verify = false, dry_run = false;
  bool no_env = false;  ///< do not look at HF_HOME and its like
};

/// Reads a variable of the environment.
using Environment = std::function<std::optional<std::string>(const std::string&)>;

/// Settings and request from options over environment over configuration. `note` gets a line for each value that the
/// environment decides. Throws Error(usage), Error(config).
std::pair<Settings, DownloadRequest> resolve_command(const CommandOptions& options, const Config& config,
                                                     const Environment& env,
                                                     const std::function<void(const std::string&)>& note);

/// "[####----] 41% 66.1 GiB of 164.2 GiB, 402.1 MiB/s, 4 min 10 s left, model-00031…", cut to `width` cells.
std::string progress_line(const Progress& progress, int width);

/// Runs it; the exit code of glm53ctl (docs/operating.md).
int download_command(const CommandOptions& options);

}  // namespace glm53::hub
