// The journal of unfinished requests: what must be said again to the next generation of ranks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/runtime/wire.h"

namespace glm53::api {

/// Fairness key of canaries: they pass the gate, and are not replayed.
inline constexpr const char* kCanaryKey = "canary";

/// Where the tokens of a request go. Called by one thread at a time, in order, without locks held.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  /// Fresh tokens: never a repetition, never a gap. The last one has `finish`.
  virtual void on_delta(const wire::Delta& delta) = 0;
  /// The request has ended without an answer.
  virtual void on_failure(uint64_t id, int status, const std::string& message, uint32_t retry_after_s) = 0;
};

/// Not thread-safe; the engine link guards it. A request is *sent* while a rank works on it, and unsent before and
/// between generations.
class Journal {
 public:
  struct Failure {
    std::shared_ptr<RequestSink> sink;
    uint64_t id = 0;
    int status = 500;
    std::string message;
  };
  struct Fresh {
    std::shared_ptr<RequestSink> sink;
    wire::Delta delta;
  };

  void add(wire::Submit submit, std::shared_ptr<RequestSink> sink);
  /// Forgets a request; true when a rank works on it (and must be told).
  bool remove(uint64_t id);
  /// What a rank that serves `digest` should be sent now, in order of arrival, with the tokens emitted so far; canaries
  /// only unless `gate_open`. Requests begun with another model are removed and reported in `failures`.
  std::vector<wire::Submit> take_unsent(const std::string& digest, bool gate_open, std::vector<Failure>& failures);
  /// Takes a delta: the part of it that is new. nullopt for an unknown request or a pure repetition. A finished request
  /// is removed. Throws Error(corrupt) when tokens are missing in between.
  std::optional<Fresh> accept(const wire::Delta& delta);
  /// The connection is gone: everything sent becomes unsent; what was present at two deaths, and canaries, are removed
  /// and returned.
  std::vector<Failure> lost();
  /// Removes everything.
  std::vector<Failure> fail_all(int status, const std::string& message);

  size_t unfinished() const { return entries_.size(); }
  /// Requests without a token so far, and their prompt tokens.
  size_t waiting() const { return waiting_; }
  int64_t waiting_tokens() const { return waiting_tokens_; }

 private:
  struct Entry {
    wire::Submit submit;  ///< `emitted` grows with each delta
    std::shared_ptr<RequestSink> sink;
    std::string digest;  ///< of the model that began it
    bool sent = false, started = false;
    int deaths = 0;
  };
  using Entries = std::map<uint64_t, Entry>;
  void start(Entry& entry);
  Entries::iterator erase(Entries::iterator at);

  Entries entries_;  ///< ids ascend with time
  size_t waiting_ = 0;
  int64_t waiting_tokens_ = 0;
};

}  // namespace glm53::api
