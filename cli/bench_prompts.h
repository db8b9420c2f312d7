// What `glm53ctl bench decode` asks: prompts by class, and what a sane answer to each looks like. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace glm53::cli {

struct DecodePrompt {
  struct Message {
    std::string role, text;
  };
  struct Range {
    int64_t from = 0, to = 0;
  };
  std::vector<Message> messages;
  // What the answer is held to, besides being no repetition of itself.
  std::optional<Range> count;  ///< the whole numbers of this range, in order
  bool json = false;           ///< one JSON value
  std::string contains;        ///< this text
  std::string like;            ///< at least four of five words of this text
};

/// Prompts by class: the stream i of a run asks the prompt i modulo their number, with --same all ask the first.
using PromptSet = std::map<std::string, std::vector<DecodePrompt>, std::less<>>;

/// The classes that are there without --prompts, in the order in which they are measured. "mixed" takes turns with the
/// prompts of all others.
inline constexpr std::string_view kPhases[] = {"structured", "prose", "code", "edit", "mixed"};
inline constexpr std::string_view kMixed = "mixed";

/// Built-in prompts for a model of this name: those that the shipped small checkpoint knows when the name has "tiny" in
/// it, else those for a large one.
PromptSet builtin_prompts(std::string_view model);

/// Prompts of a file: {"CLASS": ["prompt" or {"prompt": "…" or "messages": [{"role", "content"}], "count": [1, 200],
/// "json": true, "contains": "…", "like": "…"}]}. Throws Error(usage) saying what is wrong where.
PromptSet prompts_of(const nlohmann::ordered_json& file);

/// The prompts of a class; those of all others in turn for "mixed". Throws Error(usage) naming the classes there are.
std::vector<DecodePrompt> prompts_of_phase(const PromptSet& set, std::string_view phase);

/// Why an answer is none to this prompt; nullopt when it is one. `whole`: the model ended it, so that nothing is
/// missing at its end.
std::optional<std::string> incoherent(const DecodePrompt& prompt, std::string_view answer, bool whole);

}  // namespace glm53::cli
