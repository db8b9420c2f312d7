// `glm53-agent engine`: engine bundles of this node, without a running agent. `glm53ctl engine` runs it.
#pragma once

#include <string>

#include "agent/image/store.h"
#include "common/config.h"

namespace glm53::image {

struct CommandOptions {
  std::string action;              ///< install, list, use, rollback, verify, gc, import or export
  std::string what;                ///< reference, digest or first digits of one; "" = engine.image, or all
  std::string file;                ///< of import and export
  std::string config;              ///< file; "" = /etc/glm53/config.toml if it is there
  std::string store;               ///< "" = as configured
  bool json = false, use = false;  ///< use: what was installed becomes active
};

/// engine.store, or below paths.state.
std::string store_dir(const Config& config);

/// Runs it; the exit code of glm53ctl (docs/operating.md).
int engine_command(const CommandOptions& options);

}  // namespace glm53::image
