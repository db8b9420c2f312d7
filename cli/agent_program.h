// Commands that the agent's program carries out without an agent that runs.
#pragma once

#include <string>
#include <vector>

namespace glm53::cli {

/// glm53-agent beside this program.
std::string agent_program();
/// This process becomes the program that the first argument names. Returns only by throwing Error(unavailable).
[[noreturn]] void become(std::vector<std::string> arguments);

}  // namespace glm53::cli
