#include "engine/runtime/sampling.h"

#include <algorithm>
#include <cmath>

#include "common/error.h"
#include "common/strings.h"
#include "engine/runtime/philox.h"
#include "engine/runtime/token_rules.h"

namespace glm53 {
namespace {

constexpr int32_t kMaxLogprobs = 100;

bool uses_penalties(const wire::SamplingParams& p) {
  return p.repetition != 1 || p.presence != 0 || p.frequency != 0;
}

}  // namespace

std::string check_sampling(const wire::SamplingParams& p, const TokenSpace& space) {
  const auto range = [](std::string_view what, double value, double low, double high) {
    const bool good = std::isfinite(value) && value >= low && value <= high;
    return good ? std::string() : cat(what, " is ", value, ": expected ", low, " to ", high);
  };
  const std::string findings[] = {
      range("temperature", p.temperature, 0, 1e6),
      range("top_p", p.top_p, 0, 1),
      range("min_p", p.min_p, 0, 1),
      range("presence_penalty", p.presence, -1e6, 1e6),
      range("frequency_penalty", p.frequency, -1e6, 1e6),
      range("repetition_penalty", p.repetition, 1e-6, 1e6),
      range("top_k", p.top_k, -1, 2147483647),
      range("min_tokens", p.min_tokens, 0, 2147483647),
      range("logprobs", p.logprobs, -1, kMaxLogprobs),
  };
  for (const std::string& finding : findings)
    if (!finding.empty()) return finding;
  const auto token = [&](std::string_view what, int32_t id) {
    return id >= 0 && id < space.vocab ? std::string()
                                       : cat(what, " names token ", id, ": the vocabulary has ", space.vocab);
  };
  for (const int32_t id : p.stop_ids)
    if (auto finding = token("stop_token_ids", id); !finding.empty()) return finding;
  for (const int32_t id : p.allowed)
    if (auto finding = token("allowed_token_ids", id); !finding.empty()) return finding;
  for (const auto& [id, bias] : p.bias) {
    if (auto finding = token("logit_bias", id); !finding.empty()) return finding;
    if (std::isnan(bias)) return cat("logit_bias of token ", id, " is not a number");
  }
  return {};
}

SamplingState::SamplingState(const wire::Submit& request, const TokenSpace& space)
    : params_(request.sampling),
      seed_(request.seed),
      penalties_(uses_penalties(request.sampling)),
      ends_(space.eos),
      stops_(params_.stop_ids) {
  ends_.insert(ends_.end(), params_.stop_ids.begin(), params_.stop_ids.end());
  if (!params_.ignore_eos) stops_.insert(stops_.end(), space.eos.begin(), space.eos.end());
  if (!params_.allowed.empty()) {
    allowed_.assign((static_cast<size_t>(space.vocab) + 31) / 32, 0);
    for (const int32_t id : params_.allowed) allowed_.at(static_cast<size_t>(id) / 32) |= 1u << (id % 32);
  }
  if (penalties_)
    for (const int32_t id : request.prompt) see(id, 0);
  if (!request.grammar.empty()) {
    rules_ = std::make_unique<TokenRules>(request.grammar, space);
    now_.resize((static_cast<size_t>(space.vocab) + 31) / 32);
    narrow(now_);
  }
  for (const int32_t id : request.emitted) accept(id);
}

SamplingState::~SamplingState() = default;

void SamplingState::narrow(std::vector<uint32_t>& allowed) const {
  rules_->mask(allowed);
  for (size_t i = 0; i < allowed_.size(); ++i) allowed[i] &= allowed_[i];
}

void SamplingState::see(int32_t token, int32_t times) {
  const auto [at, fresh] = place_.try_emplace(token, seen_.size());
  if (fresh)
    seen_.emplace_back(token, times);
  else
    seen_[at->second].second += times;
}

void SamplingState::accept(int32_t token) {
  if (penalties_) see(token, 1);
  ++output_;
  // A token that the rules do not know can only be one that ends the request.
  if (rules_ != nullptr && rules_->try_accept(token)) narrow(now_);
}

bool SamplingState::stops(int32_t token) const {
  return std::find(stops_.begin(), stops_.end(), token) != stops_.end();
}

SampleRow SamplingState::row() const {
  return row_at(output_, rules_ != nullptr ? now_ : allowed_, seen_);
}

SampleRow SamplingState::row_at(uint32_t output, std::span<const uint32_t> allowed, const Seen& seen) const {
  SampleRow row;
  row.temperature = params_.temperature;
  row.top_p = params_.top_p;
  row.min_p = params_.min_p;
  row.presence = params_.presence;
  row.frequency = params_.frequency;
  row.repetition = params_.repetition;
  row.top_k = std::max(params_.top_k, 0);
  row.u = params_.temperature > 0 ? uniform_draw(seed_, output, DrawStream::target) : 0;
  row.allowed = allowed;
  const bool early = output < static_cast<uint32_t>(std::max(params_.min_tokens, 0));
  if (early && (rules_ == nullptr || !rules_->terminated())) row.banned = ends_;
  row.bias = params_.bias;
  row.seen = seen;
  row.top_logprobs = params_.logprobs;
  return row;
}

std::span<const SampleRow> SamplingState::rows(std::span<const int32_t> drafts) {
  ahead_.resize(std::max(ahead_.size(), drafts.size()));
  rows_.assign(1, row());
  int advanced = 0;
  for (size_t i = 0; i < drafts.size(); ++i) {
    if (stops(drafts[i]) || (rules_ != nullptr && !rules_->try_accept(drafts[i]))) break;
    Ahead& ahead = ahead_[i];
    if (rules_ != nullptr) {
      ++advanced;
      ahead.allowed.resize(now_.size());
      narrow(ahead.allowed);
    }
    if (penalties_) {
      ahead.seen = i == 0 ? seen_ : ahead_[i - 1].seen;
      const auto known = place_.find(drafts[i]);
      const auto at = known != place_.end()
                          ? ahead.seen.begin() + static_cast<std::ptrdiff_t>(known->second)
                          : std::find_if(ahead.seen.begin() + static_cast<std::ptrdiff_t>(seen_.size()),
                                         ahead.seen.end(), [&](const auto& s) { return s.first == drafts[i]; });
      if (at == ahead.seen.end())
        ahead.seen.emplace_back(drafts[i], 1);
      else
        ++at->second;
    }
    rows_.push_back(row_at(output_ + 1 + static_cast<uint32_t>(i), rules_ != nullptr ? ahead.allowed : allowed_,
                           penalties_ ? ahead.seen : seen_));
  }
  if (advanced > 0) rules_->rollback(advanced);
  return rows_;
}

void SamplingTable::add(const wire::Submit& request) {
  states_[request.id] = std::make_unique<SamplingState>(request, space_);
}

SamplingState* SamplingTable::find(uint64_t id) {
  const auto at = states_.find(id);
  return at == states_.end() ? nullptr : at->second.get();
}

}  // namespace glm53
