// The JSON of answers: whole ones and stream events.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

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
/// A finished choice of a whole answer.
struct ChoiceAnswer {
  std::string content, reasoning;
  std::vector<ToolCallAnswer> calls;
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
};

/// "data: …\n\n" for each event. Objects are printed on one line.
class ResponseFormat {
 public:
  virtual ~ResponseFormat() = default;
  virtual std::string whole(const std::vector<ChoiceAnswer>& choices, const Usage& usage) = 0;
  /// First event of a choice; "" = none.
  virtual std::string begin(int index) = 0;
  virtual std::string event(int index, const ChoiceEvent& event, const Usage* running) = 0;
  /// The one event with finish_reason; `rest` holds tokens that produced no text.
  virtual std::string end(int index, const ChoiceEvent& rest, const std::string& finish_reason,
                          const StopReason& reason, const Usage* running) = 0;
  /// Event without choices, sent when stream_options.include_usage.
  virtual std::string usage(const Usage& usage) = 0;
};

std::unique_ptr<ResponseFormat> chat_format(AnswerHead head, const text::Tokenizer& tokenizer);
std::unique_ptr<ResponseFormat> completion_format(AnswerHead head, const text::Tokenizer& tokenizer);

inline constexpr std::string_view kDone = "data: [DONE]\n\n";

/// Text of a single token in log-probabilities: "token_id:N", or its bytes with U+FFFD for partial ones.
std::string token_text(const text::Tokenizer& tokenizer, int32_t token, bool as_id);
/// -infinity and below are printed as -9999.
double printable_logprob(float logprob);

}  // namespace glm53::api
