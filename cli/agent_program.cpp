#include "cli/agent_program.h"

#include <cerrno>
#include <system_error>
#include <unistd.h>

#include "common/error.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::cli {

std::string agent_program() {
  return executable_dir() + "/glm53-agent";
}

void become(std::vector<std::string> arguments) {
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  ::execv(argv.front(), argv.data());
  throw Error(Code::unavailable, cat("cannot run ", arguments.front(), ": ", std::generic_category().message(errno)),
              "install glm53-agent beside glm53ctl");
}

}  // namespace glm53::cli
