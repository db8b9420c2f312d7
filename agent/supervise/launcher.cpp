#include "agent/supervise/launcher.h"

namespace glm53::supervise {
namespace {

class ForkLauncher final : public Launcher {
 public:
  Child launch(const std::string&, const SpawnOptions& options) override { return spawn(options); }
};

}  // namespace

std::unique_ptr<Launcher> make_fork_launcher() {
  return std::make_unique<ForkLauncher>();
}

}  // namespace glm53::supervise
