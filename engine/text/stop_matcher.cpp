#include "engine/text/stop_matcher.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::text {

StopMatcher::StopMatcher(std::vector<std::string> strings, bool include_in_output) : include_(include_in_output) {
  if (strings.size() > kMaxStopStrings) {
    throw Error(Code::usage, cat("stop: ", strings.size(), " strings, at most ", kMaxStopStrings, " are allowed"));
  }
  for (std::string& s : strings) {
    if (s.empty()) throw Error(Code::usage, "stop: a stop string must not be empty");
    if (s.size() > kMaxStopBytes) {
      throw Error(Code::usage,
                  cat("stop: a stop string of ", s.size(), " bytes, at most ", kMaxStopBytes, " are allowed"));
    }
    Pattern p{std::move(s), {}, 0};
    p.border.resize(p.text.size());
    for (size_t i = 1, k = 0; i < p.text.size(); ++i) {
      while (k > 0 && p.text[i] != p.text[k]) k = p.border[k - 1];
      if (p.text[i] == p.text[k]) ++k;
      p.border[i] = k;
    }
    patterns_.push_back(std::move(p));
  }
}

// No unfinished occurrence would be preferred to the best finished one.
bool StopMatcher::settled() const {
  for (size_t i = 0; i < patterns_.size(); ++i) {
    const Pattern& p = patterns_[i];
    if (p.matched == 0) continue;
    const size_t begin = begin_of(p);
    if (begin < best_->begin || (begin == best_->begin && i < best_->string)) return false;
  }
  return true;
}

std::optional<StopMatcher::Match> StopMatcher::settle(std::string& out) {
  done_ = true;
  const size_t held_from = seen_ - held_.size();
  const size_t end = best_->begin + (include_ ? patterns_[best_->string].text.size() : 0);
  out.append(held_, 0, end - held_from);
  held_.clear();
  return best_;
}

std::optional<StopMatcher::Match> StopMatcher::push(std::string_view text, std::string& out) {
  if (done_) return best_;
  if (patterns_.empty()) {
    out += text;
    return std::nullopt;
  }
  for (const char c : text) {
    held_ += c;
    ++seen_;
    for (size_t i = 0; i < patterns_.size(); ++i) {
      Pattern& p = patterns_[i];
      while (p.matched > 0 && p.text[p.matched] != c) p.matched = p.border[p.matched - 1];
      if (p.text[p.matched] == c) ++p.matched;
      if (p.matched < p.text.size()) continue;
      const Match found{i, begin_of(p)};
      if (!best_ || found.begin < best_->begin || (found.begin == best_->begin && i < best_->string)) best_ = found;
      p.matched = p.border.back();
    }
    if (best_ && settled()) return settle(out);
  }
  size_t keep = best_ ? seen_ - best_->begin : 0;
  for (const Pattern& p : patterns_) keep = std::max(keep, p.matched);
  out.append(held_, 0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return std::nullopt;
}

void StopMatcher::pass(std::string_view text, std::string& out) {
  if (done_) return;
  out += held_;
  held_.clear();
  out += text;
  seen_ += text.size();
  for (Pattern& p : patterns_) p.matched = 0;
}

std::optional<StopMatcher::Match> StopMatcher::finish(std::string& out) {
  if (done_) return best_;
  if (best_) return settle(out);
  out += held_;
  held_.clear();
  return std::nullopt;
}

std::optional<StopMatcher::Match> StopMatcher::interrupt(std::string& out) {
  if (const auto match = finish(out)) return match;
  for (Pattern& p : patterns_) p.matched = 0;
  return std::nullopt;
}

}  // namespace glm53::text
