// Who waits, and whose turn it is.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/runtime/wire.h"

namespace glm53 {

/// A request without a slot: new, or put back.
struct Waiting {
  wire::Submit request;  ///< emitted: all that was given out
  uint64_t arrival = 0;  ///< order of arrival; stays when it is put back
  std::chrono::milliseconds since{0};
  bool preempted = false;
  std::optional<uint32_t> cached;  ///< of its first admission
  uint64_t restore = 0;            ///< under way for it; 0 = none
  bool spill_tried = false;        ///< the spill tier was asked for its text

  size_t tokens() const { return request.prompt.size() + request.emitted.size(); }
};

/// Pure: no clock. Times only ever grow.
class WaitingQueue {
 public:
  using Time = std::chrono::milliseconds;
  using Ids = std::set<uint64_t>;

  /// A request gains one priority class for each `aging` that it has waited.
  explicit WaitingQueue(Time aging) : aging_(aging) {}

  /// A key begins to have requests here or running; of requests that wait and of those that run. It starts with as much
  /// service as the least served of the others, so that absence is neither saved up nor held against it.
  void enter(const std::string& key);
  void leave(const std::string& key);
  /// Tokens computed for a key.
  void charge(const std::string& key, double tokens);

  void push(Waiting waiting);
  std::optional<Waiting> take(uint64_t id);
  /// Null when it does not wait.
  Waiting* find(uint64_t id);
  /// Whose turn it is, of those not in `passed`: the least class; in it, requests that were put back; the key that was
  /// served least; the first to arrive. Null when there is none.
  const Waiting* next(Time now, const Ids& passed) const;
  template <class Predicate>
  Ids ids_if(Predicate wanted) const {
    Ids ids;
    for (const Waiting& w : queue_)
      if (wanted(w)) ids.insert(w.request.id);
    return ids;
  }
  /// Takes out all for which `gone` holds.
  template <class Predicate>
  std::vector<Waiting> remove_if(Predicate gone) {
    std::vector<Waiting> out;
    for (auto at = queue_.begin(); at != queue_.end();) {
      const auto next = std::next(at);
      if (gone(std::as_const(*at))) out.push_back(take_at(at));
      at = next;
    }
    return out;
  }
  /// Of all that wait; they must be some.
  int64_t least_priority() const;
  int64_t class_of(const Waiting& waiting, Time now) const;

  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  size_t tokens() const { return tokens_; }
  size_t keys() const { return keys_.size(); }
  /// Throws Error(internal) when its sums are wrong.
  void check() const;

 private:
  struct Key {
    size_t requests = 0;
    double service = 0;
  };
  Waiting take_at(std::list<Waiting>::iterator at);

  const Time aging_;
  std::list<Waiting> queue_;
  std::map<std::string, Key> keys_;
  size_t tokens_ = 0;
};

}  // namespace glm53
