// /v1/chat/completions: members and their rules.
#include <array>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/members.h"
#include "engine/api/request.h"
#include "engine/text/chat_template.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

constexpr auto kHonoured = Use::honoured;
constexpr auto kAccepted = Use::accepted;
constexpr auto kRefused = Use::refused;

constexpr std::array kChatMembers = {
    MemberRule{"messages", kHonoured},
    MemberRule{"model", kHonoured},
    MemberRule{"temperature", kHonoured},
    MemberRule{"top_p", kHonoured},
    MemberRule{"top_k", kHonoured},
    MemberRule{"min_p", kHonoured},
    MemberRule{"presence_penalty", kHonoured},
    MemberRule{"frequency_penalty", kHonoured},
    MemberRule{"repetition_penalty", kHonoured},
    MemberRule{"seed", kHonoured},
    MemberRule{"n", kHonoured},
    MemberRule{"max_completion_tokens", kHonoured},
    MemberRule{"max_tokens", kHonoured},
    MemberRule{"min_tokens", kHonoured},
    MemberRule{"stop", kHonoured},
    MemberRule{"stop_token_ids", kHonoured},
    MemberRule{"include_stop_str_in_output", kHonoured},
    MemberRule{"ignore_eos", kHonoured},
    MemberRule{"skip_special_tokens", kHonoured},
    MemberRule{"spaces_between_special_tokens", kHonoured},
    MemberRule{"logprobs", kHonoured},
    MemberRule{"top_logprobs", kHonoured},
    MemberRule{"logit_bias", kHonoured},
    MemberRule{"allowed_token_ids", kHonoured},
    MemberRule{"stream", kHonoured},
    MemberRule{"stream_options", kHonoured},
    MemberRule{"response_format", kHonoured},
    MemberRule{"tools", kHonoured},
    MemberRule{"tool_choice", kHonoured},
    MemberRule{"parallel_tool_calls", kHonoured},
    MemberRule{"reasoning_effort", kHonoured},
    MemberRule{"thinking", kHonoured},
    MemberRule{"chat_template_kwargs", kHonoured},
    MemberRule{"include_reasoning", kHonoured},
    MemberRule{"add_generation_prompt", kHonoured},
    MemberRule{"continue_final_message", kHonoured},
    MemberRule{"echo", kHonoured},
    MemberRule{"add_special_tokens", kHonoured},
    MemberRule{"truncate_prompt_tokens", kHonoured},
    MemberRule{"truncation_side", kHonoured},
    MemberRule{"priority", kHonoured},
    MemberRule{"speculation", kHonoured},
    MemberRule{"cache_salt", kHonoured},
    MemberRule{"request_id", kHonoured},
    MemberRule{"return_token_ids", kHonoured},
    MemberRule{"return_tokens_as_token_ids", kHonoured},
    MemberRule{"user", kAccepted},
    MemberRule{"metadata", kAccepted},
    MemberRule{"store", kAccepted},
    MemberRule{"service_tier", kAccepted},
    MemberRule{"safety_identifier", kAccepted},
    MemberRule{"prompt_cache_key", kAccepted},
    MemberRule{"documents", kAccepted},
    MemberRule{"vllm_xargs", kAccepted},
    MemberRule{"media_io_kwargs", kAccepted},
    MemberRule{"thinking_token_budget", kHonoured},
    MemberRule{"prompt_logprobs", kRefused},
    MemberRule{"bad_words", kHonoured},
    MemberRule{"structured_outputs", kHonoured},
    MemberRule{"guided_json", kHonoured},
    MemberRule{"guided_regex", kHonoured},
    MemberRule{"guided_choice", kHonoured},
    MemberRule{"guided_grammar", kHonoured},
    MemberRule{"chat_template", kRefused},
    MemberRule{"mm_processor_kwargs", kRefused, "{}"},
    MemberRule{"use_beam_search", kRefused, "false"},
    MemberRule{"best_of", kRefused, "1"},
    MemberRule{"suffix", kRefused},
    MemberRule{"logits_processors", kRefused, "[]"},
    MemberRule{"audio", kRefused},
    MemberRule{"modalities", kRefused, "[\"text\"]"},
    MemberRule{"functions", kRefused},
    MemberRule{"function_call", kRefused},
    MemberRule{"prediction", kRefused},
    MemberRule{"web_search_options", kRefused},
    MemberRule{"kv_transfer_params", kRefused},
    MemberRule{"length_penalty", kRefused, "1.0"},
};

/// "messages[2].content: …" -> "messages".
std::string member_of(std::string_view message) {
  const size_t end = message.find_first_of(".[: ");
  return std::string(message.substr(0, end));
}

void parse_conversation(const Members& members, const Settings& settings, ChatRequest& out) {
  try {
    if (!members.given("messages")) Members::refuse("messages", "is missing");
    out.messages = text::parse_messages(members.get("messages"));
    out.tools = text::parse_tools(members.get("tools"));
    out.chat = text::parse_options(members.get("chat_template_kwargs"), members.get("thinking"),
                                   members.get("reasoning_effort"), settings.always_think);
  } catch (const Error& e) {
    throw ApiError(400, e.line(), member_of(e.what()));
  }
  const text::MediaCount media = text::count_media(out.messages);
  if (media.images + media.videos > 0) Members::refuse("messages", "image and video parts are not supported");
  if (media.audios > 0) Members::refuse("messages", "audio parts are not supported");
  out.chat.continue_final_message = members.boolean("continue_final_message", false);
  out.chat.add_generation_prompt = members.boolean("add_generation_prompt", true);
  if (out.chat.continue_final_message && out.chat.add_generation_prompt) {
    Members::refuse("continue_final_message", "needs `add_generation_prompt` to be false");
  }
  out.include_reasoning = members.boolean("include_reasoning", true);
}

void parse_tool_choice(const Members& members, ChatRequest& out) {
  out.calls.single = !members.boolean("parallel_tool_calls", true);
  const Json& choice = members.get("tool_choice");
  if (choice == "none") return;
  if (!choice.is_null() && out.tools.empty()) {
    Members::refuse("tool_choice", "When using `tool_choice`, `tools` must be set.");
  }
  if (out.tools.empty()) return;
  out.calls.tools = std::make_shared<const text::ToolSet>(out.tools);
  if (choice.is_null() || choice == "auto") return;
  if (choice.is_object()) {
    const Json* function = choice.contains("function") ? &choice["function"] : &choice;
    if (choice.value("type", Json()) != "function" || !function->is_object() || !function->contains("name") ||
        !(*function)["name"].is_string()) {
      Members::refuse("tool_choice", "must be {\"type\": \"function\", \"function\": {\"name\": …}}");
    }
    out.named_tool = (*function)["name"].get<std::string>();
    if (!out.calls.tools->contains(*out.named_tool)) {
      Members::refuse("tool_choice", cat("no function of the name \"", *out.named_tool, "\" is declared"));
    }
    out.calls.single = true;
  } else if (choice != "required") {
    Members::refuse("tool_choice", "must be \"auto\", \"none\", \"required\" or a function's name");
  }
  out.needs_call = true;
  if (out.sampling.ignore_eos) Members::refuse("ignore_eos", "does not go with a required call");
  if (!out.choices.empty()) Members::refuse("tool_choice", "a required call does not go with a choice of texts");
  if (!out.structure.empty()) Members::refuse("tool_choice", "a required call does not go with a form of the content");
}

void parse_logprobs(const Members& members, ChatRequest& out) {
  const bool logprobs = members.boolean("logprobs", false);
  const auto top = members.integer("top_logprobs", 0, kMaxLogprobs);
  if (top.value_or(0) > 0 && !logprobs) {
    Members::refuse("top_logprobs", "when using `top_logprobs`, `logprobs` must be set to true.");
  }
  if (logprobs) out.sampling.logprobs = static_cast<int32_t>(top.value_or(0));
}

}  // namespace

ChatRequest parse_chat_request(const Json& body, const RequestContext& context) {
  const Members members(body);
  ChatRequest out;
  out.ignored = members.check(kChatMembers);
  parse_common(members, context, out);
  parse_conversation(members, context.settings, out);
  parse_tool_choice(members, out);
  parse_logprobs(members, out);
  if (const auto budget = members.integer("thinking_token_budget", -1, INT32_MAX); budget && *budget >= 0) {
    out.thinking_budget = static_cast<int32_t>(*budget);
  }
  members.boolean("add_special_tokens", false);
  const char* name = members.given("max_completion_tokens") ? "max_completion_tokens" : "max_tokens";
  if (const auto max = members.integer(name, 1, INT32_MAX)) out.max_tokens = static_cast<int32_t>(*max);
  return out;
}

std::vector<int32_t> conversation_ids(const Members& members, const RequestContext& context) {
  ChatRequest request;
  parse_conversation(members, context.settings, request);
  return chat_prompt(request, context);
}

std::vector<int32_t> chat_prompt(const ChatRequest& request, const RequestContext& context) {
  const auto pieces = text::render_chat(request.messages, request.tools, request.chat);
  return context.tokenizer.encode(pieces,
                                  context.settings.escape_control_tokens ? text::Escape::control : text::Escape::media);
}

}  // namespace glm53::api
