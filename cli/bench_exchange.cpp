// One streamed chat as its client sees it.
#include <algorithm>
#include <chrono>

#include <nlohmann/json.hpp>

#include "cli/api_target.h"
#include "cli/bench_client.h"
#include "common/error.h"
#include "common/http_client.h"
#include "common/json.h"

namespace glm53::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using namespace std::chrono_literals;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::chrono::milliseconds as_milliseconds(double seconds) {
  return std::max(1ms, std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::duration<double>(seconds)));
}

/// One streamed request.
class Exchange {
 public:
  Exchange(const StreamedRequest& request, Clock::time_point start, BenchSample about)
      : request_(request), start_(start), sample_(std::move(about)) {
    sample_.sent = seconds_since(start);
  }

  BenchSample run() {
    try {
      HttpClient client(request_.api, request_.key);
      const auto clock = request_.abort ? request_.abort->after_seconds : std::nullopt;
      client.set_timeout(5s, as_milliseconds(std::min(request_.timeout, clock.value_or(request_.timeout))));
      SseParser events([this](std::string_view, std::string_view data) { take(data); });
      const HttpAnswer answer =
          client.stream("POST", "/v1/chat/completions", request_.body, [&](std::string_view bytes) {
            sample_.status = 200;
            events.feed(bytes);
            return !time_to_leave();
          });
      sample_.status = answer.status;
      end(answer);
    } catch (const Error& e) {
      // A client that leaves by the clock while nothing comes is one whose patience (the read limit) is over.
      fail_or_abort(e.code() == Code::stalled && request_.abort && request_.abort->after_seconds, e.what());
    } catch (const std::exception& e) {
      fail_or_abort(false, e.what());
    }
    sample_.ended = seconds_since(start_);
    return std::move(sample_);
  }

 private:
  bool time_to_leave() {
    if (done_ || !request_.abort) return false;
    const bool by_clock =
        request_.abort->after_seconds && seconds_since(start_) - sample_.sent >= *request_.abort->after_seconds;
    left_ = by_clock || (request_.abort->after_pieces > 0 && pieces_ >= request_.abort->after_pieces);
    return left_;
  }

  void end(const HttpAnswer& answer) {
    if (answer.status != 200) {
      fail_or_abort(false, api_error_message(answer.body));
    } else if (left_) {
      fail_or_abort(true, "");
    } else if (!error_.empty() || !done_) {
      fail_or_abort(false, error_.empty() ? "the stream ended before [DONE]" : error_);
    } else {
      sample_.end = SampleEnd::finished;
    }
  }

  void fail_or_abort(bool aborted, const std::string& why) {
    sample_.end = aborted ? SampleEnd::aborted : SampleEnd::failed;
    if (aborted && sample_.output_tokens == 0) sample_.output_tokens = pieces_;
    if (!aborted) sample_.error = why;
  }

  void take(std::string_view data) {
    if (data == "[DONE]") {
      done_ = true;
      return;
    }
    const Json event = parse_json(data);
    if (event.contains("error")) error_ = api_error_message(std::string(data));
    if (const auto usage = event.find("usage"); usage != event.end() && usage->is_object()) take_usage(*usage);
    const auto choices = event.find("choices");
    if (choices == event.end() || !choices->is_array() || choices->empty()) return;
    const Json& choice = choices->front();
    if (const auto delta = choice.find("delta"); delta != choice.end() && delta->is_object()) take_delta(*delta);
    if (const auto finish = choice.find("finish_reason"); finish != choice.end() && finish->is_string()) {
      sample_.finish = finish->get<std::string>();
      sample_.last = seconds_since(start_);  // of the last token, which may have no text
    }
  }

  void take_delta(const Json& delta) {
    for (const char* member : {"reasoning_content", "content"}) {
      const auto text = delta.find(member);
      if (text == delta.end() || !text->is_string() || text->get_ref<const std::string&>().empty()) continue;
      if (member == std::string_view("content")) sample_.answer += text->get_ref<const std::string&>();
      piece();
    }
  }

  void take_usage(const Json& usage) {
    sample_.prompt_tokens = usage.value("prompt_tokens", int64_t{0});
    sample_.output_tokens = usage.value("completion_tokens", int64_t{0});
    const auto details = usage.find("prompt_tokens_details");
    if (details != usage.end() && details->is_object())
      sample_.cached_tokens = details->value("cached_tokens", int64_t{0});
    const auto output = usage.find("completion_tokens_details");
    if (output == usage.end() || !output->is_object()) return;
    sample_.accepted_drafts = output->value("accepted_prediction_tokens", int64_t{0});
    sample_.rejected_drafts = output->value("rejected_prediction_tokens", int64_t{0});
  }

  void piece() {
    const double now = seconds_since(start_);
    if (sample_.first) {
      sample_.gaps.push_back(now - sample_.last);
    } else {
      sample_.first = now;
    }
    sample_.last = now;
    ++pieces_;
  }

  const StreamedRequest& request_;
  const Clock::time_point start_;
  BenchSample sample_;
  int pieces_ = 0;
  bool done_ = false, left_ = false;
  std::string error_;
};

}  // namespace

BenchSample stream_chat(const StreamedRequest& request, Clock::time_point start, BenchSample about) {
  return Exchange(request, start, std::move(about)).run();
}

}  // namespace glm53::cli
