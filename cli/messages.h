// The message catalogue: every code that an agent prints, what it means and what to do. docs/troubleshooting.md is made
// of it.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace glm53::cli {

struct Message {
  std::string_view code;     ///< "E640"; a W only warns
  std::string_view meaning;  ///< one sentence
  std::string_view remedy;
};
/// In order of their numbers.
std::span<const Message> messages();
/// nullptr for a code that there is not; case does not count.
const Message* find_message(std::string_view code);
/// docs/troubleshooting.md.
std::string troubleshooting_page();

}  // namespace glm53::cli
