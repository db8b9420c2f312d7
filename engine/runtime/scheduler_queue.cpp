#include "engine/runtime/scheduler_queue.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

void WaitingQueue::enter(const std::string& key) {
  const auto [at, fresh] = keys_.try_emplace(key);
  ++at->second.requests;
  if (!fresh || keys_.size() == 1) return;
  std::optional<double> least;
  for (const auto& [name, other] : keys_)
    if (name != key) least = std::min(least.value_or(other.service), other.service);
  at->second.service = *least;
}

void WaitingQueue::leave(const std::string& key) {
  const auto at = keys_.find(key);
  if (at == keys_.end()) throw Error(Code::internal, "a fairness key left that never came");
  if (--at->second.requests == 0) keys_.erase(at);
}

void WaitingQueue::charge(const std::string& key, double tokens) {
  if (const auto at = keys_.find(key); at != keys_.end()) at->second.service += tokens;
}

void WaitingQueue::push(Waiting waiting) {
  tokens_ += waiting.tokens();
  queue_.push_back(std::move(waiting));
}

Waiting WaitingQueue::take_at(std::list<Waiting>::iterator at) {
  Waiting out = std::move(*at);
  tokens_ -= out.tokens();
  queue_.erase(at);
  return out;
}

Waiting* WaitingQueue::find(uint64_t id) {
  const auto at = std::find_if(queue_.begin(), queue_.end(), [id](const Waiting& w) { return w.request.id == id; });
  return at == queue_.end() ? nullptr : &*at;
}

std::optional<Waiting> WaitingQueue::take(uint64_t id) {
  const auto at = std::find_if(queue_.begin(), queue_.end(), [&](const Waiting& w) { return w.request.id == id; });
  if (at == queue_.end()) return std::nullopt;
  return take_at(at);
}

int64_t WaitingQueue::class_of(const Waiting& w, Time now) const {
  return w.request.priority - (aging_.count() > 0 ? std::max<int64_t>((now - w.since).count(), 0) / aging_.count() : 0);
}

int64_t WaitingQueue::least_priority() const {
  const auto at = std::min_element(queue_.begin(), queue_.end(), [](const Waiting& a, const Waiting& b) {
    return a.request.priority < b.request.priority;
  });
  return at->request.priority;
}

const Waiting* WaitingQueue::next(Time now, const Ids& passed) const {
  const Waiting* best = nullptr;
  std::tuple<int64_t, int, double, uint64_t> best_rank;
  for (const Waiting& w : queue_) {
    if (passed.contains(w.request.id)) continue;
    const auto key = keys_.find(w.request.key);
    const std::tuple rank{class_of(w, now), w.preempted ? 0 : 1, key == keys_.end() ? 0.0 : key->second.service,
                          w.arrival};
    if (best != nullptr && best_rank <= rank) continue;
    best = &w;
    best_rank = rank;
  }
  return best;
}

void WaitingQueue::check() const {
  size_t tokens = 0;
  std::map<std::string, size_t> waiting;
  for (const Waiting& w : queue_) {
    tokens += w.tokens();
    ++waiting[w.request.key];
  }
  for (const auto& [key, count] : waiting)
    if (const auto at = keys_.find(key); at == keys_.end() || at->second.requests < count)
      throw Error(Code::internal, cat("scheduler: a key has ", count, " waiting requests, more than it ever sent"));
  if (tokens != tokens_)
    throw Error(Code::internal, cat("scheduler: ", tokens, " waiting tokens were counted as ", tokens_));
}

}  // namespace glm53
