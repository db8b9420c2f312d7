// Requests for generation, validated.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/api/settings.h"
#include "engine/runtime/wire.h"
#include "engine/text/chat_messages.h"
#include "engine/text/output_parser.h"
#include "engine/text/tokenizer.h"

namespace glm53::api {

inline constexpr int kMaxChoices = 64;        ///< `n`
inline constexpr size_t kMaxSequences = 256;  ///< prompts times `n` of one request
inline constexpr int kMaxLogprobs = 20;

/// What the parsers need to know.
struct RequestContext {
  const Settings& settings;
  const text::Tokenizer& tokenizer;
  int32_t max_context = 0;  ///< of the connected rank, or of the settings
};

/// Whose endpoint a request came to: the form of its answer.
enum class Api { chat, completions, messages, responses };

/// Members that /v1/chat/completions and /v1/completions share.
struct GenerationRequest {
  Api api = Api::chat;
  std::string model;  ///< the name the client used, or the served one
  std::optional<std::string> request_id;
  int n = 1;
  bool stream = false, include_usage = false, continuous_usage = false;
  std::vector<std::string> stop;
  bool include_stop = false, skip_special = true;
  std::optional<int64_t> seed;
  wire::SamplingParams sampling;  ///< max_tokens is set by fit()
  std::optional<int32_t> max_tokens;
  std::string salt;
  int32_t priority = 0;  ///< lower ones first
  bool speculate = true;
  bool return_token_ids = false, tokens_as_ids = false;
  std::optional<int64_t> truncate;  ///< keep that many prompt tokens; -1: what fits the context
  bool truncate_right = false;
  bool echo = false;
  bool include_reasoning = true;     ///< chat
  std::vector<std::string> choices;  ///< the texts one of which the output must be; empty = any
  std::string structure;             ///< what the content must be (engine/grammar/compile.h), a JSON object; "" = any
  std::vector<std::string> bad_words;
  std::optional<int32_t> thinking_budget;  ///< chat: tokens
  std::vector<std::string> ignored;        ///< unknown members
  std::string echoed;                      ///< responses: members that the answer repeats, a JSON object
};

struct ChatRequest : GenerationRequest {
  std::vector<text::Message> messages;
  std::vector<text::Tool> tools;
  text::ChatOptions chat;
  text::ToolParsing calls;                ///< of the answer; no tools: none are looked for
  bool needs_call = false;                ///< tool_choice required, or a function named
  std::optional<std::string> named_tool;  ///< the only one that may be called
};

struct CompletionRequest : GenerationRequest {
  std::vector<std::vector<int32_t>> prompts;
};

/// Throw ApiError: 400 naming the member, 404 for an unknown model.
ChatRequest parse_chat_request(const nlohmann::ordered_json& body, const RequestContext& context);
CompletionRequest parse_completion_request(const nlohmann::ordered_json& body, const RequestContext& context);

/// The same request in the words of /v1/chat/completions. Members that nobody knows are appended to `ignored`.
/// `counting`: of count_tokens, which needs no max_tokens. Throw ApiError(400) naming the client's member.
nlohmann::ordered_json chat_of_messages(const nlohmann::ordered_json& body, bool counting,
                                        std::vector<std::string>& ignored);
/// `echoed`: the members that the answer repeats, a JSON object.
nlohmann::ordered_json chat_of_responses(const nlohmann::ordered_json& body, std::vector<std::string>& ignored,
                                         std::string& echoed);

class Members;
/// Ids of a conversation given as `messages` with the template's members: what /tokenize answers.
std::vector<int32_t> conversation_ids(const Members& members, const RequestContext& context);
/// Ids of the conversation.
std::vector<int32_t> chat_prompt(const ChatRequest& request, const RequestContext& context);
/// Applies truncation, then sets the output limit: what was asked for, or the default, within the context. Throws
/// ApiError(400) when prompt and output do not fit.
int32_t fit(std::vector<int32_t>& prompt, const GenerationRequest& request, const RequestContext& context);
/// What rank 0 holds the output to (engine/runtime/token_rules.h): "" = nothing.
std::string token_rules(const GenerationRequest& request, const ChatRequest* chat, bool starts_in_reasoning,
                        const text::Tokenizer& tokenizer);
/// The served name a client may use; throws ApiError(404).
std::string check_model(const nlohmann::ordered_json& member, const Settings& settings);
/// Prompt positions where conversations branch: before the first turn of a user, and before the turn to be written.
std::vector<int32_t> branch_points(const std::vector<int32_t>& prompt, const text::Tokenizer& tokenizer);

/// Parses what both kinds share. `logprobs` of `sampling` and the default of max_tokens are left to the caller.
void parse_common(const Members& members, const RequestContext& context, GenerationRequest& out);

}  // namespace glm53::api
