// Sampling state of requests, on rank 0: from parameters and past tokens to the rows of Ops::sample.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/runtime/wire.h"
#include "kernels/ops.h"

namespace glm53::grammar {
class Cache;
}

namespace glm53 {

/// What the model says about its tokens.
struct TokenSpace {
  int32_t vocab = 0;       ///< rows of the head
  int32_t text_vocab = 0;  ///< ids from here on have no text and are never chosen
  std::vector<int32_t> eos;
  std::shared_ptr<grammar::Cache> grammars{};  ///< null where the tokens' texts are not known
};

/// What is wrong with the parameters, as a sentence for the client; empty when nothing is.
std::string check_sampling(const wire::SamplingParams& params, const TokenSpace& space);

class TokenRules;

/// State of one request. Rows refer into it: it must not change while they are used.
class SamplingState {
 public:
  SamplingState(const wire::Submit& request, const TokenSpace& space);
  ~SamplingState();
  SamplingState(const SamplingState&) = delete;
  SamplingState& operator=(const SamplingState&) = delete;
  /// The row that samples output token number output().
  SampleRow row() const;
  /// The same row, and for as many of the drafts as can come true one after the other the row that samples behind it:
  /// each as row() would give it had the drafts before it been accepted. Fewer than there are drafts when one ends the
  /// request or is forbidden. The rows live until the next call or change.
  std::span<const SampleRow> rows(std::span<const int32_t> drafts);
  /// The token was chosen.
  void accept(int32_t token);
  uint32_t output() const { return output_; }
  /// True for tokens that end the request.
  bool stops(int32_t token) const;
  const wire::SamplingParams& params() const { return params_; }

 private:
  using Seen = std::vector<std::pair<int32_t, int32_t>>;
  /// What is different in a row behind drafts.
  struct Ahead {
    Seen seen;
    std::vector<uint32_t> allowed;
  };

  void see(int32_t token, int32_t times);
  void narrow(std::vector<uint32_t>& allowed) const;
  SampleRow row_at(uint32_t output, std::span<const uint32_t> allowed, const Seen& seen) const;

  const wire::SamplingParams params_;
  const uint64_t seed_;
  const bool penalties_;
  std::vector<uint32_t> allowed_;              // of the request, a bit a token; empty = all
  std::unique_ptr<TokenRules> rules_;          // null: none
  std::vector<uint32_t> now_;                  // with rules: what they and the request allow next
  std::vector<int32_t> ends_;                  // what min_tokens forbids: the model's end tokens and the request's
  std::vector<int32_t> stops_;                 // what ends the request
  Seen seen_;                                  // token, times in the output; kept only with penalties
  std::unordered_map<int32_t, size_t> place_;  // token -> index in seen_
  std::vector<Ahead> ahead_;                   // of rows()
  std::vector<SampleRow> rows_;                // of rows()
  uint32_t output_ = 0;
};

/// All requests that run.
class SamplingTable {
 public:
  explicit SamplingTable(TokenSpace space) : space_(std::move(space)) {}
  const TokenSpace& space() const { return space_; }
  /// `request.emitted` counts as sampled.
  void add(const wire::Submit& request);
  void remove(uint64_t id) { states_.erase(id); }
  /// Null for a request that ended while its step ran.
  SamplingState* find(uint64_t id);
  size_t size() const { return states_.size(); }

 private:
  const TokenSpace space_;
  std::unordered_map<uint64_t, std::unique_ptr<SamplingState>> states_;
};

}  // namespace glm53
