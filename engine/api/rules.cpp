// What a request demands of its output, in the words of engine/runtime/token_rules.h.
#include "common/strings.h"
#include "engine/api/request.h"

namespace glm53::api {

namespace {

using Ids = std::vector<int32_t>;

void rule(std::string& out, std::string_view word, const Ids& ids) {
  out += word;
  for (const int32_t id : ids) out += cat(" ", id);
  out += '\n';
}

void call_rules(std::string& out, const ChatRequest& chat, const text::Tokenizer& tokenizer) {
  const text::ChatTokens& t = tokenizer.chat();
  rule(out, "call", {t.tool_call, t.tool_call_end, t.arg_key});
  if (chat.calls.single) rule(out, "single", {});
  for (const text::Tool& tool : chat.tools) {
    if (!chat.named_tool || *chat.named_tool == tool.name) rule(out, "name", tokenizer.encode(tool.name));
  }
}

}  // namespace

std::string token_rules(const GenerationRequest& request, const ChatRequest* chat, bool starts_in_reasoning,
                        const text::Tokenizer& tokenizer) {
  std::string out;
  if (chat != nullptr && chat->needs_call) call_rules(out, *chat, tokenizer);
  for (const std::string& text : request.choices) rule(out, "choice", tokenizer.encode(text));
  const bool may_call = chat != nullptr && chat->calls.tools != nullptr && !chat->needs_call;
  if (!request.choices.empty() && may_call) rule(out, "alternative", {tokenizer.chat().tool_call});
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
