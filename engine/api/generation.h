// One HTTP request for generation, from submission to its last byte.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/http_server.h"
#include "engine/api/choice.h"
#include "engine/api/engine_link.h"
#include "engine/api/errors.h"
#include "engine/api/metrics.h"
#include "engine/api/quota.h"
#include "engine/api/response.h"

namespace glm53::api {

struct GenerationOptions {
  bool stream = false, continuous_usage = false;
  Dialect dialect = Dialect::openai;                         ///< of errors before the first byte of a stream
  std::vector<std::pair<std::string, std::string>> headers;  ///< of the answer
  std::vector<int64_t> prompt_tokens;                        ///< of each prompt
  int n = 1;                                                 ///< choices a prompt
  std::shared_ptr<QuotaLease> lease;                         ///< of the client's key; may be null
  std::string log_key;                                       ///< name of the key in that line
  std::string log_id;                                        ///< request id of its line in the log; "" = no line
  ChoiceOptions choice;                                      ///< of every choice, but for its start
  std::vector<text::OutputStart> starts;                     ///< of each prompt
};

/// Feeds the choices with tokens and the client with the answer. A client that left, or that does not read, cancels
/// what still runs. Thread-safe; no lock is held while the link is called.
class Generation final : public RequestSink, public std::enable_shared_from_this<Generation> {
 public:
  Generation(const text::Tokenizer& tokenizer, EngineLink& link, Metrics& metrics,
             std::unique_ptr<ResponseFormat> format, GenerationOptions options, std::shared_ptr<HttpReply> reply);

  /// Ids of the choices are first_id, first_id + 1, … Call before submitting.
  void set_first_id(uint64_t first_id);
  /// After submission: cancels when the client leaves.
  void watch_client();
  void on_delta(const wire::Delta& delta) override;
  void on_failure(uint64_t id, int status, const std::string& message, uint32_t retry_after_s) override;
  /// Writes a comment on a stream that has been silent for `limit`. False when there is nothing left to keep alive.
  bool keep_alive(std::chrono::milliseconds limit);
  /// The client is gone.
  void abandon();

 private:
  using Clock = std::chrono::steady_clock;
  struct Slot {
    Choice choice;
    ChoiceAnswer answer;  ///< collected when not streaming
    bool begun = false, ended = false;
  };
  struct Cancelled {
    uint64_t id;
    std::optional<uint32_t> keep;
  };

  void take(const wire::Delta& delta, std::vector<Cancelled>& cancelled);
  std::string stream_events(size_t index, std::vector<ChoiceEvent>& events);
  void collect(Slot& slot, std::vector<ChoiceEvent>& events);
  bool write(std::string chunk);
  void start_stream();
  void finish();
  void fail(int status, const std::string& message, std::vector<Cancelled>& cancelled, uint32_t retry_after_s = 0);
  void account(std::string_view finish) const;
  void end_all(std::string_view reason, std::vector<Cancelled>& cancelled);
  Usage usage() const;
  void cancel(const std::vector<Cancelled>& cancelled);

  EngineLink& link_;
  Metrics& metrics_;
  const GenerationOptions options_;
  const Clock::time_point begin_ = Clock::now();
  const std::shared_ptr<HttpReply> reply_;

  std::mutex mutex_;  ///< guards everything below
  std::unique_ptr<ResponseFormat> format_;
  std::vector<Slot> slots_;
  uint64_t first_id_ = 0;
  bool streaming_ = false, done_ = false, first_token_ = false;
  uint32_t queue_ms_ = 0;
  Clock::time_point first_at_ = begin_, last_token_ = begin_, last_write_ = begin_;
};

}  // namespace glm53::api
