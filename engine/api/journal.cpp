#include "engine/api/journal.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::api {

void Journal::add(wire::Submit submit, std::shared_ptr<RequestSink> sink) {
  ++waiting_;
  waiting_tokens_ += static_cast<int64_t>(submit.prompt.size());
  const uint64_t id = submit.id;
  Entry entry;
  entry.submit = std::move(submit);
  entry.sink = std::move(sink);
  entries_.insert_or_assign(id, std::move(entry));
}

void Journal::start(Entry& entry) {
  if (entry.started) return;
  entry.started = true;
  --waiting_;
  waiting_tokens_ -= static_cast<int64_t>(entry.submit.prompt.size());
}

Journal::Entries::iterator Journal::erase(Entries::iterator at) {
  start(at->second);
  return entries_.erase(at);
}

bool Journal::remove(uint64_t id) {
  const auto found = entries_.find(id);
  if (found == entries_.end()) return false;
  const bool sent = found->second.sent;
  erase(found);
  return sent;
}

std::vector<wire::Submit> Journal::take_unsent(const std::string& digest, bool gate_open,
                                               std::vector<Failure>& failures) {
  std::vector<wire::Submit> out;
  for (auto at = entries_.begin(); at != entries_.end();) {
    Entry& entry = at->second;
    if (!entry.sent && !entry.digest.empty() && entry.digest != digest) {
      failures.push_back({entry.sink, at->first, 503, "the model was changed while this request was running"});
      at = erase(at);
      continue;
    }
    if (entry.sent || (!gate_open && entry.submit.key != kCanaryKey)) {
      ++at;
      continue;
    }
    entry.sent = true;
    entry.digest = digest;
    out.push_back(entry.submit);
    out.back().replayed = entry.deaths > 0;
    ++at;
  }
  return out;
}

std::optional<Journal::Fresh> Journal::accept(const wire::Delta& delta) {
  const auto found = entries_.find(delta.id);
  if (found == entries_.end() || !found->second.sent) return std::nullopt;
  Entry& entry = found->second;
  auto& emitted = entry.submit.emitted;
  if (delta.index > emitted.size()) {
    throw Error(Code::corrupt,
                cat("request ", delta.id, ": tokens ", emitted.size(), " to ", delta.index, " are missing"));
  }
  const size_t repeated = std::min(emitted.size() - delta.index, delta.tokens.size());
  Fresh fresh{entry.sink, delta};
  fresh.delta.index = static_cast<uint32_t>(emitted.size());
  const auto skip = static_cast<std::ptrdiff_t>(repeated);
  fresh.delta.tokens.erase(fresh.delta.tokens.begin(), fresh.delta.tokens.begin() + skip);
  if (fresh.delta.logprobs.size() >= repeated) {
    fresh.delta.logprobs.erase(fresh.delta.logprobs.begin(), fresh.delta.logprobs.begin() + skip);
  }
  if (fresh.delta.tokens.empty() && delta.finish.empty()) return std::nullopt;
  emitted.insert(emitted.end(), fresh.delta.tokens.begin(), fresh.delta.tokens.end());
  start(entry);
  if (!delta.finish.empty()) erase(found);
  return fresh;
}

std::vector<Journal::Failure> Journal::lost() {
  std::vector<Failure> failures;
  for (auto at = entries_.begin(); at != entries_.end();) {
    Entry& entry = at->second;
    if (!entry.sent) {
      ++at;
      continue;
    }
    entry.sent = false;
    const bool canary = entry.submit.key == kCanaryKey;
    if (++entry.deaths < 2 && !canary) {
      ++at;
      continue;
    }
    failures.push_back({entry.sink, at->first, 500,
                        canary ? "the engine died while it ran the canary"
                               : "the engine died twice while it ran this request; it is not tried again"});
    at = erase(at);
  }
  return failures;
}

std::vector<Journal::Failure> Journal::fail_all(int status, const std::string& message) {
  std::vector<Failure> failures;
  for (auto at = entries_.begin(); at != entries_.end(); at = erase(at)) {
    failures.push_back({at->second.sink, at->first, status, message});
  }
  return failures;
}

}  // namespace glm53::api
