// /v1/completions: members and their rules.
#include <array>

#include <nlohmann/json.hpp>

#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/members.h"
#include "engine/api/request.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

constexpr auto kHonoured = Use::honoured;
constexpr auto kAccepted = Use::accepted;
constexpr auto kRefused = Use::refused;
constexpr int32_t kDefaultMaxTokens = 16;

constexpr std::array kCompletionMembers = {
    MemberRule{"prompt", kHonoured},
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
    MemberRule{"max_tokens", kHonoured},
    MemberRule{"min_tokens", kHonoured},
    MemberRule{"stop", kHonoured},
    MemberRule{"stop_token_ids", kHonoured},
    MemberRule{"include_stop_str_in_output", kHonoured},
    MemberRule{"ignore_eos", kHonoured},
    MemberRule{"skip_special_tokens", kHonoured},
    MemberRule{"spaces_between_special_tokens", kHonoured},
    MemberRule{"logprobs", kHonoured},
    MemberRule{"logit_bias", kHonoured},
    MemberRule{"allowed_token_ids", kHonoured},
    MemberRule{"stream", kHonoured},
    MemberRule{"stream_options", kHonoured},
    MemberRule{"response_format", kHonoured},
    MemberRule{"echo", kHonoured},
    MemberRule{"best_of", kHonoured},
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
    MemberRule{"service_tier", kAccepted},
    MemberRule{"safety_identifier", kAccepted},
    MemberRule{"prompt_cache_key", kAccepted},
    MemberRule{"vllm_xargs", kAccepted},
    MemberRule{"suffix", kRefused, "\"\""},
    MemberRule{"prompt_logprobs", kRefused},
    MemberRule{"prompt_embeds", kRefused},
    MemberRule{"bad_words", kHonoured},
    MemberRule{"structured_outputs", kHonoured},
    MemberRule{"guided_json", kHonoured},
    MemberRule{"guided_regex", kHonoured},
    MemberRule{"guided_choice", kHonoured},
    MemberRule{"guided_grammar", kHonoured},
    MemberRule{"use_beam_search", kRefused, "false"},
    MemberRule{"logits_processors", kRefused, "[]"},
    MemberRule{"kv_transfer_params", kRefused},
    MemberRule{"length_penalty", kRefused, "1.0"},
};

std::vector<int32_t> ids_prompt(const Json& array, const text::Tokenizer& tokenizer) {
  std::vector<int32_t> ids;
  ids.reserve(array.size());
  for (const Json& element : array) {
    if (!element.is_number_integer())
      Members::refuse("prompt", "an array must hold strings, token ids, or arrays of token ids");
    const auto id =
        element.is_number_unsigned() && element.get<uint64_t>() > INT32_MAX ? int64_t{-1} : element.get<int64_t>();
    if (id < 0 || id > INT32_MAX || !tokenizer.has_text(static_cast<int32_t>(id))) {
      Members::refuse("prompt", cat(element.dump(), " is no token of the vocabulary"));
    }
    ids.push_back(static_cast<int32_t>(id));
  }
  if (ids.empty()) Members::refuse("prompt", "must not be empty");
  return ids;
}

std::vector<int32_t> text_prompt(const Json& text, const text::Tokenizer& tokenizer) {
  std::vector<int32_t> ids = tokenizer.encode(text.get_ref<const std::string&>());
  if (ids.empty()) Members::refuse("prompt", "must not be empty");
  return ids;
}

std::vector<std::vector<int32_t>> parse_prompts(const Json& prompt, const text::Tokenizer& tokenizer) {
  if (prompt.is_null()) Members::refuse("prompt", "is missing");
  if (prompt.is_string()) return {text_prompt(prompt, tokenizer)};
  if (!prompt.is_array()) Members::refuse("prompt", "must be a string or an array");
  if (prompt.empty()) Members::refuse("prompt", "must not be empty");
  if (prompt[0].is_number()) return {ids_prompt(prompt, tokenizer)};
  if (prompt.size() > kMaxSequences) {
    Members::refuse("prompt", cat(prompt.size(), " prompts, at most ", kMaxSequences, " are allowed"));
  }
  std::vector<std::vector<int32_t>> prompts;
  for (const Json& p : prompt) {
    if (p.is_string()) {
      prompts.push_back(text_prompt(p, tokenizer));
    } else if (p.is_array()) {
      prompts.push_back(ids_prompt(p, tokenizer));
    } else {
      Members::refuse("prompt", "an array must hold strings, token ids, or arrays of token ids");
    }
  }
  return prompts;
}

}  // namespace

CompletionRequest parse_completion_request(const Json& body, const RequestContext& context) {
  const Members members(body);
  CompletionRequest out;
  out.ignored = members.check(kCompletionMembers);
  parse_common(members, context, out);
  out.prompts = parse_prompts(members.get("prompt"), context.tokenizer);
  if (out.prompts.size() * static_cast<size_t>(out.n) > kMaxSequences) {
    Members::refuse("n", cat("prompts times n must be at most ", kMaxSequences));
  }
  out.max_tokens = static_cast<int32_t>(members.integer("max_tokens", 0, INT32_MAX).value_or(kDefaultMaxTokens));
  if (out.max_tokens == 0 && !out.echo) Members::refuse("max_tokens", "must be at least 1 unless `echo` is true");
  if (const auto logprobs = members.integer("logprobs", 0, kMaxLogprobs)) {
    if (out.echo) Members::refuse("logprobs", "log-probabilities of the prompt (`echo`) are not supported");
    out.sampling.logprobs = static_cast<int32_t>(*logprobs);
  }
  if (const auto best = members.integer("best_of", 1, kMaxChoices); best && *best != out.n) {
    Members::refuse("best_of", "must equal `n`");
  }
  members.boolean("add_special_tokens", true);
  return out;
}

}  // namespace glm53::api
