#include "engine/api/response.h"
#include "engine/api/response_common.h"
#include "engine/text/utf8.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

/// Offsets count characters, as clients index the text.
size_t characters(std::string_view text) {
  size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return n;
}

class CompletionFormat final : public ResponseFormat {
 public:
  CompletionFormat(AnswerHead head, const text::Tokenizer& tokenizer) : head_(std::move(head)), tokenizer_(tokenizer) {}

  std::string whole(const std::vector<ChoiceAnswer>& choices, const Usage& usage) override {
    Json list = Json::array();
    for (size_t i = 0; i < choices.size(); ++i) {
      const ChoiceAnswer& answer = choices[i];
      const int index = static_cast<int>(i);
      Json out = choice(index, echo(index) + answer.content);
      out["logprobs"] = head_.logprobs ? logprobs(index, answer.scores) : Json();
      out["finish_reason"] = answer.finish_reason;
      out["stop_reason"] = stop_reason_json(answer.stop_reason);
      out["prompt_logprobs"] = nullptr;
      if (head_.token_ids) {
        out["token_ids"] = answer.token_ids;
        out["prompt_token_ids"] = prompt_of(index, choices.size());
      }
      list.push_back(std::move(out));
    }
    Json body = head();
    body["choices"] = std::move(list);
    body["usage"] = usage_json(usage);
    return dump(body);
  }

  std::string begin(int index, const Usage&) override {
    return echo(index).empty() ? std::string() : sse(chunk(choice(index, echo(index)), nullptr));
  }

  std::string event(int index, const ChoiceEvent& event, const Usage* running) override {
    Json out = choice(index, event.text);
    add_tokens(index, out, event);
    return sse(chunk(std::move(out), running));
  }

  std::string end(int index, const ChoiceEvent& rest, const std::string& finish_reason, const StopReason& reason,
                  const Usage* running) override {
    Json out = choice(index, "");
    add_tokens(index, out, rest);
    out["finish_reason"] = finish_reason;
    out["stop_reason"] = stop_reason_json(reason);
    return sse(chunk(std::move(out), running));
  }

  std::string last(const Usage& usage) override {
    if (!head_.include_usage) return std::string(kDone);
    Json out = head();
    out["choices"] = Json::array();
    out["usage"] = usage_json(usage);
    return sse(out) + std::string(kDone);
  }

 private:
  const std::string& echo(int index) const {
    static const std::string none;
    const auto i = static_cast<size_t>(index);
    return i < head_.echo.size() ? head_.echo[i] : none;
  }

  Json prompt_of(int index, size_t choices) const {
    if (head_.prompts.empty()) return nullptr;
    return head_.prompts[static_cast<size_t>(index) / (choices / head_.prompts.size())];
  }

  Json head() const {
    return {{"id", head_.id}, {"object", "text_completion"}, {"created", head_.created}, {"model", head_.model}};
  }

  static Json choice(int index, const std::string& text) {
    Json out;
    out["index"] = index;
    out["text"] = text;
    out["logprobs"] = nullptr;
    out["finish_reason"] = nullptr;
    out["stop_reason"] = nullptr;
    return out;
  }

  Json chunk(Json choice, const Usage* running) const {
    Json out = head();
    out["choices"] = Json::array({std::move(choice)});
    if (running != nullptr) {
      out["usage"] = usage_json(*running);
    } else if (head_.include_usage) {
      out["usage"] = nullptr;
    }
    return out;
  }

  void add_tokens(int index, Json& choice, const ChoiceEvent& event) {
    if (head_.logprobs && !event.scores.empty()) choice["logprobs"] = logprobs(index, event.scores);
    if (head_.token_ids) choice["token_ids"] = event.token_ids;
  }

  Json logprobs(int index, const std::vector<ScoredToken>& scores) {
    const auto i = static_cast<size_t>(index);
    if (offsets_.size() <= i) offsets_.resize(i + 1);
    size_t& offset = offsets_[i];
    Json text_offset = Json::array(), token_logprobs = Json::array(), tokens = Json::array(), top = Json::array();
    for (const ScoredToken& s : scores) {
      const std::string token = token_text(tokenizer_, s.token, head_.tokens_as_ids);
      text_offset.push_back(offset);
      offset += characters(tokenizer_.bytes(s.token));
      token_logprobs.push_back(printable_logprob(s.score.logprob));
      tokens.push_back(token);
      Json best = Json::object();
      best[token] = printable_logprob(s.score.logprob);
      int32_t n = 0;
      for (const auto& [id, logprob] : s.score.top) {
        if (n++ >= head_.top_logprobs) break;
        best[token_text(tokenizer_, id, head_.tokens_as_ids)] = printable_logprob(logprob);
      }
      top.push_back(std::move(best));
    }
    return {{"text_offset", std::move(text_offset)},
            {"token_logprobs", std::move(token_logprobs)},
            {"tokens", std::move(tokens)},
            {"top_logprobs", std::move(top)}};
  }

  AnswerHead head_;
  const text::Tokenizer& tokenizer_;
  std::vector<size_t> offsets_;  ///< characters so far, by choice
};

}  // namespace

std::unique_ptr<ResponseFormat> completion_format(AnswerHead head, const text::Tokenizer& tokenizer) {
  return std::make_unique<CompletionFormat>(std::move(head), tokenizer);
}

}  // namespace glm53::api
