// The JSON of answers: whole ones and stream events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/api/choice.h"
#include "engine/api/request.h"

namespace glm53::api {

struct Usage {
  int64_t prompt = 0, completion = 0, cached = 0, reasoning = 0;
  int64_t drafted = 0, accepted = 0;  ///< drafts that were verified; of these, accepted
};

struct ToolCallAnswer {
  std::string id, name, arguments;
};
/// A run of one kind in an answer, in the order the model wrote it.
struct AnswerPart {
  text::OutputKind kind = text::OutputKind::content;  ///< reasoning, content or call_name
  std::string text;                                   ///< of a call: its name
  std::string call_id, arguments;
  std::vector<ScoredToken> scores;
};
/// A finished choice of a whole answer.
struct ChoiceAnswer {
  std::string content, reasoning;
  std::vector<ToolCallAnswer> calls;
  std::vector<AnswerPart> parts;  ///< the same once more, in order
  std::vector<ScoredToken> scores;
  std::vector<int32_t> token_ids;
  std::string finish_reason;
  StopReason stop_reason;
};

/// What stays the same over one answer.
struct AnswerHead {
  std::string id;  ///< "chatcmpl-…"
  int64_t created = 0;
  std::string model;
  bool logprobs = false;
  int32_t top_logprobs = 0;
  bool tokens_as_ids = false, token_ids = false;
  bool include_usage = false;                 ///< of a stream
  std::vector<std::vector<int32_t>> prompts;  ///< for prompt_token_ids, when token_ids
  std::vector<std::string> echo;              ///< text before each choice's own; empty = none
  std::string echoed_members;                 ///< responses: JSON object of the request's members in every answer
};

/// An answer's text, whole or as stream events ("data: …\n\n", with an "event: …" line where the protocol names them).
/// Objects are printed on one line.
class ResponseFormat {
 public:
  virtual ~ResponseFormat() = default;
  virtual std::string whole(const std::vector<ChoiceAnswer>& choices, const Usage& usage) = 0;
  /// First event of a choice; "" = none. `now`: what is known before the first token.
  virtual std::string begin(int index, const Usage& now) = 0;
  virtual std::string event(int index, const ChoiceEvent& event, const Usage* running) = 0;
  /// The one event with finish_reason; `rest` holds tokens that produced no text.
  virtual std::string end(int index, const ChoiceEvent& rest, const std::string& finish_reason,
                          const StopReason& reason, const Usage* running) = 0;
  /// What follows the last choice's end.
  virtual std::string last(const Usage& usage) = 0;
  /// Ends a stream that cannot go on.
  virtual std::string failure(int status, std::string_view message);
  /// Sent when a stream has been silent for long.
  virtual std::string keep_alive() { return ": ping\n\n"; }
};

std::unique_ptr<ResponseFormat> chat_format(AnswerHead head, const text::Tokenizer& tokenizer);
std::unique_ptr<ResponseFormat> completion_format(AnswerHead head, const text::Tokenizer& tokenizer);
/// /v1/messages.
std::unique_ptr<ResponseFormat> messages_format(AnswerHead head);
/// /v1/responses.
std::unique_ptr<ResponseFormat> responses_format(AnswerHead head, const text::Tokenizer& tokenizer);
/// {"token", "logprob", "bytes", "top_logprobs"} of a token, `top` alternatives of it.
nlohmann::ordered_json logprob_entry(const text::Tokenizer& tokenizer, const ScoredToken& scored, int32_t top,
                                     bool as_id);

inline constexpr std::string_view kDone = "data: [DONE]\n\n";

/// Text of a single token in log-probabilities: "token_id:N", or its bytes with U+FFFD for partial ones.
std::string token_text(const text::Tokenizer& tokenizer, int32_t token, bool as_id);
/// -infinity and below are printed as -9999.
double printable_logprob(float logprob);

}  // namespace glm53::api
