// Endpoints that generate: from a validated request to submitted sequences.
#include <cstdlib>
#include <ctime>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/service.h"
#include "engine/text/chat_template.h"

namespace glm53::api {

namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kCanaryTokens = 64;

uint64_t random_seed() {
  return std::strtoull(random_hex(8).c_str(), nullptr, 16);
}

std::string last_assistant_text(const ChatRequest& request) {
  std::string out;
  if (!request.echo || request.messages.back().role != text::Role::assistant) return out;
  for (const text::ContentPart& part : request.messages.back().content.parts) out += part.text;
  return out;
}

/// Collects the output of a canary and answers the agent.
class CanarySink final : public RequestSink {
 public:
  CanarySink(const text::Tokenizer& tokenizer, AdminReply reply) : tokenizer_(tokenizer), reply_(std::move(reply)) {}
  void on_delta(const wire::Delta& delta) override {
    ids_.insert(ids_.end(), delta.tokens.begin(), delta.tokens.end());
    if (delta.finish.empty()) return;
    reply_({{"ok", true}, {"text", tokenizer_.decode(ids_, true)}, {"tokens", ids_.size()}, {"finish", delta.finish}});
  }
  void on_failure(uint64_t, int, const std::string& message, uint32_t) override {
    reply_({{"ok", false}, {"error", message}});
  }

 private:
  const text::Tokenizer& tokenizer_;
  const AdminReply reply_;
  std::vector<int32_t> ids_;
};

std::string_view id_prefix(Api api) {
  switch (api) {
    case Api::completions:
      return "cmpl-";
    case Api::messages:
      return "msg_";
    case Api::responses:
      return "resp_";
    case Api::chat:
      break;
  }
  return "chatcmpl-";
}

AnswerHead answer_head(const GenerationRequest& request, const std::string& request_id,
                       const std::vector<std::vector<int32_t>>& prompts, std::vector<std::string> echo) {
  AnswerHead head;
  head.id = cat(id_prefix(request.api), request_id);
  head.created = static_cast<int64_t>(std::time(nullptr));
  head.model = request.model;
  head.logprobs = request.sampling.logprobs >= 0;
  head.top_logprobs = request.sampling.logprobs;
  head.tokens_as_ids = request.tokens_as_ids;
  head.token_ids = request.return_token_ids;
  head.include_usage = request.include_usage;
  if (request.return_token_ids) head.prompts = prompts;
  head.echo = std::move(echo);
  head.echoed_members = request.echoed;
  return head;
}

std::unique_ptr<ResponseFormat> format_of(Api api, AnswerHead head, const text::Tokenizer& tokenizer) {
  switch (api) {
    case Api::completions:
      return completion_format(std::move(head), tokenizer);
    case Api::messages:
      return messages_format(std::move(head));
    case Api::responses:
      return responses_format(std::move(head), tokenizer);
    case Api::chat:
      break;
  }
  return chat_format(std::move(head), tokenizer);
}

}  // namespace

RequestContext Service::context() const {
  const EngineStatus status = link_.status();
  int32_t longest = settings_.max_context;
  if (status.was_connected && status.hello.max_context > 0) longest = std::min(longest, status.hello.max_context);
  return {settings_, tokenizer_, longest};
}

void Service::chat(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  run_chat(parse_chat_request(parse_json(in.body, {.keep_big_integers = true}), context()), in, reply);
}

void Service::messages(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  std::vector<std::string> ignored;
  const Json body = chat_of_messages(parse_json(in.body, {.keep_big_integers = true}), false, ignored);
  ChatRequest request = parse_chat_request(body, context());
  request.api = Api::messages;
  request.ignored = std::move(ignored);
  run_chat(std::move(request), in, reply);
}

void Service::responses(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  std::vector<std::string> ignored;
  std::string echoed;
  const Json body = chat_of_responses(parse_json(in.body, {.keep_big_integers = true}), ignored, echoed);
  ChatRequest request = parse_chat_request(body, context());
  request.api = Api::responses;
  request.ignored = std::move(ignored);
  request.echoed = std::move(echoed);
  run_chat(std::move(request), in, reply);
}

void Service::count_tokens(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  const RequestContext c = context();
  std::vector<std::string> ignored;
  const Json body = chat_of_messages(parse_json(in.body, {.keep_big_integers = true}), true, ignored);
  HttpResponse response;
  response.body = dump({{"input_tokens", chat_prompt(parse_chat_request(body, c), c).size()}});
  response.headers = answer_headers(in.request_id, ignored);
  reply->send(std::move(response));
}

void Service::run_chat(ChatRequest request, const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  const RequestContext c = context();
  if (!request.include_reasoning) request.sampling.logprobs = -1;
  std::vector<int32_t> prompt = chat_prompt(request, c);
  request.sampling.max_tokens = fit(prompt, request, c);
  const text::OutputStart begin = output_start(tokenizer_, prompt, request.chat.continue_final_message);
  std::vector<std::string> echo;
  if (std::string text = last_assistant_text(request); !text.empty()) {
    echo.assign(static_cast<size_t>(request.n), text);
  }
  start(request, &request, {std::move(prompt)}, std::move(echo), {begin}, in, reply);
}

void Service::completion(const Incoming& in, const std::shared_ptr<HttpReply>& reply) {
  const RequestContext c = context();
  CompletionRequest request = parse_completion_request(parse_json(in.body), c);
  request.api = Api::completions;
  std::vector<std::string> echo;
  for (std::vector<int32_t>& prompt : request.prompts) {
    request.sampling.max_tokens = fit(prompt, request, c);
    if (!request.echo) continue;
    const std::string text = tokenizer_.decode(prompt, request.skip_special);
    for (int k = 0; k < request.n; ++k) echo.push_back(text);
  }
  const std::vector<text::OutputStart> starts(request.prompts.size());
  std::vector<std::vector<int32_t>> prompts = std::move(request.prompts);
  start(request, nullptr, prompts, std::move(echo), starts, in, reply);
}

std::vector<wire::Submit> Service::submits(const GenerationRequest& request, const ChatRequest* chat,
                                           const std::vector<std::vector<int32_t>>& prompts,
                                           const std::vector<text::OutputStart>& starts, uint64_t first_id,
                                           const std::string& key) const {
  const uint64_t seed = request.seed ? static_cast<uint64_t>(*request.seed) : random_seed();
  std::vector<wire::Submit> out;
  for (size_t p = 0; p < prompts.size(); ++p) {
    const std::vector<int32_t>& prompt = prompts[p];
    const std::string rules = token_rules(request, chat, starts[p].reasoning, tokenizer_);
    for (int k = 0; k < request.n; ++k) {
      wire::Submit s;
      s.id = first_id + out.size();
      s.prompt = prompt;
      s.seed = seed + static_cast<uint64_t>(k);
      s.salt = request.salt;
      s.key = key;
      s.priority = request.priority;
      s.speculate = request.speculate;
      s.grammar = rules;
      if (chat != nullptr) s.boundaries = branch_points(prompt, tokenizer_);
      s.sampling = request.sampling;
      out.push_back(std::move(s));
    }
  }
  return out;
}

void Service::start(const GenerationRequest& request, const ChatRequest* chat,
                    const std::vector<std::vector<int32_t>>& prompts, std::vector<std::string> echo,
                    const std::vector<text::OutputStart>& starts, const Incoming& in,
                    const std::shared_ptr<HttpReply>& reply) {
  const bool is_chat = chat != nullptr;
  const std::string id = request.request_id && !request.request_id->empty() ? *request.request_id : in.request_id;
  std::unique_ptr<ResponseFormat> format =
      format_of(request.api, answer_head(request, id, prompts, std::move(echo)), tokenizer_);

  GenerationOptions options;
  options.stream = request.stream;
  options.dialect = in.dialect;
  options.continuous_usage = request.continuous_usage;
  options.headers = answer_headers(in.request_id, request.ignored);
  for (const auto& prompt : prompts) options.prompt_tokens.push_back(static_cast<int64_t>(prompt.size()));
  options.n = request.n;
  if (settings_.log_requests) options.log_id = in.request_id;
  options.log_key = in.key;
  options.lease = admit(in.key);
  options.starts = starts;
  ChoiceOptions& choice = options.choice;
  choice.parse = is_chat;
  if (is_chat) {
    choice.calls = chat->calls;
    choice.named_call = chat->named_tool.has_value();
  }
  choice.stop = request.stop;
  choice.include_stop = request.include_stop;
  choice.skip_special = request.skip_special;
  choice.min_tokens = request.sampling.min_tokens;
  choice.stop_ids = request.sampling.stop_ids;
  choice.primary_eos = settings_.eos.empty() ? -1 : settings_.eos.front();
  choice.logprobs = request.sampling.logprobs >= 0;
  choice.token_ids = request.return_token_ids;
  choice.reasoning = request.include_reasoning;
  if (!request.ignored.empty()) metrics_.ignored_members(request.ignored.size());

  if (request.sampling.max_tokens == 0) {
    answer_echo(request, *format, options, reply);
    return;
  }
  int64_t prompt_tokens = 0;
  for (const int64_t n : options.prompt_tokens) prompt_tokens += n;
  const auto generation =
      std::make_shared<Generation>(tokenizer_, link_, metrics_, std::move(format), std::move(options), reply);
  const uint64_t first_id = link_.reserve(prompts.size() * static_cast<size_t>(request.n));
  generation->set_first_id(first_id);
  link_.submit(submits(request, chat, prompts, starts, first_id, in.key.empty() ? in.key : "key:" + in.key),
               generation);
  metrics_.submitted(request.n, prompt_tokens, request.sampling.max_tokens);
  generation->watch_client();
  if (request.stream) {
    const std::scoped_lock lock(streams_mutex_);
    streams_.push_back(generation);
  }
}

// Nothing to generate: the prompt is the answer.
void Service::answer_echo(const GenerationRequest& request, ResponseFormat& format, const GenerationOptions& options,
                          const std::shared_ptr<HttpReply>& reply) const {
  const size_t count = options.prompt_tokens.size() * static_cast<size_t>(request.n);
  Usage usage;
  for (const int64_t n : options.prompt_tokens) usage.prompt += n;
  if (!request.stream) {
    std::vector<ChoiceAnswer> answers(count);
    for (ChoiceAnswer& a : answers) a.finish_reason = "length";
    HttpResponse response;
    response.headers = options.headers;
    response.body = format.whole(answers, usage);
    reply->send(std::move(response));
    return;
  }
  reply->start_stream(200, "text/event-stream; charset=utf-8", options.headers);
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    const int index = static_cast<int>(i);
    out += format.begin(index, usage) + format.end(index, {}, "length", {}, nullptr);
  }
  out += format.last(usage);
  if (reply->write(std::move(out))) reply->finish();
}

void Service::keep_alive() {
  keys_.follow();
  std::vector<std::weak_ptr<Generation>> streams;
  {
    const std::scoped_lock lock(streams_mutex_);
    streams.swap(streams_);
  }
  std::erase_if(streams, [this](const std::weak_ptr<Generation>& weak) {
    const auto generation = weak.lock();
    return !generation || !generation->keep_alive(settings_.keepalive);
  });
  const std::scoped_lock lock(streams_mutex_);
  streams_.insert(streams_.end(), streams.begin(), streams.end());
}

void Service::canary(const Json& command, const AdminReply& reply) {
  const std::string prompt = command.value("prompt", "Hello!");
  text::Message message;
  message.content.parts.push_back({text::PartKind::text, prompt});
  wire::Submit submit;
  submit.id = link_.reserve(1);
  submit.prompt = tokenizer_.encode(text::render_chat({message}, {}, {}), text::Escape::media);
  submit.key = kCanaryKey;
  submit.cache_write = false;
  submit.sampling.temperature = 0;
  const int64_t room = settings_.max_context - static_cast<int64_t>(submit.prompt.size());
  const int64_t asked = command.value("max_tokens", int64_t{kCanaryTokens});
  if (asked < 1 || asked > room) throw Error(Code::usage, cat("max_tokens must be between 1 and ", room));
  submit.sampling.max_tokens = static_cast<int32_t>(asked);
  link_.submit({std::move(submit)}, std::make_shared<CanarySink>(tokenizer_, reply));
}

}  // namespace glm53::api
