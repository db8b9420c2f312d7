// What a request demands of its output, in the words of engine/runtime/token_rules.h.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/request.h"
#include "engine/grammar/compile.h"
#include "engine/text/json_text.h"

namespace glm53::api {

namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::ordered_json;

void rule(std::string& out, std::string_view word, const Ids& ids) {
  out += word;
  for (const int32_t id : ids) out += cat(" ", id);
  out += '\n';
}

/// How calls are written, and the functions that may be called.
void add_calls(Json& demand, const ChatRequest& chat, const text::Tokenizer& tokenizer, bool one) {
  const text::ChatTokens& t = tokenizer.chat();
  demand["calls"] = one ? "one" : "many";
  demand["markup"] = {t.tool_call, t.tool_call_end, t.arg_key, t.arg_key_end, t.arg_value, t.arg_value_end};
  demand["tools"] = Json::array();
  for (const text::Tool& tool : chat.tools) {
    if (chat.named_tool && *chat.named_tool != tool.name) continue;
    demand["tools"].push_back(
        {{"name", tool.name}, {"parameters", tool.parameters ? *tool.parameters : Json()}, {"strict", tool.strict}});
  }
}

/// What content and calls must be, as a grammar; null when token rules say it as well. With `within` the grammar is of
/// one call, and what is around calls is free.
Json demand_of(const GenerationRequest& request, const ChatRequest* chat, const text::Tokenizer& tokenizer,
               bool& within) {
  const bool calls = chat != nullptr && chat->calls.tools != nullptr;
  const bool strict =
      calls && std::any_of(chat->tools.begin(), chat->tools.end(), [](const text::Tool& t) { return t.strict; });
  Json demand;
  if (!request.structure.empty()) {
    demand = parse_json(request.structure);
  } else if (!request.choices.empty() && strict) {
    demand = {{"content", {{"choice", request.choices}}}};
  }
  within = demand.is_null() && strict && !chat->needs_call;
  const bool wanted = calls && (chat->needs_call || strict || !demand.is_null());
  if (wanted) add_calls(demand, *chat, tokenizer, chat->calls.single || within);
  return demand;
}

}  // namespace

std::string token_rules(const GenerationRequest& request, const ChatRequest* chat, bool starts_in_reasoning,
                        const text::Tokenizer& tokenizer) {
  std::string out;
  bool within = false;
  if (const Json demand = demand_of(request, chat, tokenizer, within); !demand.is_null()) {
    const std::string text = text::python_json(demand);
    if (demand.contains("calls")) {
      try {
        grammar::compile(text);
      } catch (const Error& e) {
        throw ApiError(400, e.line(), "tools");
      }
      rule(out, "opens", {tokenizer.chat().tool_call});
    }
    if (within) rule(out, "within", {});
    out += cat("grammar ", text, "\n");
  } else {
    for (const std::string& text : request.choices) rule(out, "choice", tokenizer.encode(text));
    const bool may_call = chat != nullptr && chat->calls.tools != nullptr;
    if (!request.choices.empty() && may_call) rule(out, "alternative", {tokenizer.chat().tool_call});
  }
  for (const std::string& word : request.bad_words) {
    rule(out, "bad", tokenizer.encode(word));
    if (!word.starts_with(' ')) rule(out, "bad", tokenizer.encode(" " + word));
  }
  if (starts_in_reasoning && request.thinking_budget) rule(out, "budget", {*request.thinking_budget});
  if (starts_in_reasoning && !out.empty()) {
    rule(out, "reasoning", {});
    rule(out, "think_end", {tokenizer.chat().think_end});
  }
  return out;
}

}  // namespace glm53::api
