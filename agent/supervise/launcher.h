// How a process is started: the seam between fork and, later, a systemd scope.
#pragma once

#include <memory>
#include <string>

#include "common/process.h"

namespace glm53::supervise {

class Launcher {
 public:
  virtual ~Launcher() = default;
  /// Starts a process named `name` (of the project, not of the system). Throws as spawn() does.
  virtual Child launch(const std::string& name, const SpawnOptions& options) = 0;
};
/// A child in its own session: it survives the agent where nothing kills the agent's whole control group.
std::unique_ptr<Launcher> make_fork_launcher();

}  // namespace glm53::supervise
