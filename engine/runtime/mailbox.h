// A queue between threads whose reader can sleep until something comes or a time is reached.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <utility>

namespace glm53 {

template <class T>
class Mailbox {
 public:
  void push(T item) {
    {
      const std::lock_guard lock(mutex_);
      items_.push_back(std::move(item));
    }
    changed_.notify_one();
  }
  /// Everything there is, without waiting.
  std::deque<T> take() {
    const std::lock_guard lock(mutex_);
    return std::exchange(items_, {});
  }
  /// Sleeps until there is something or the time is reached.
  void wait_until(std::chrono::steady_clock::time_point time) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, time, [&] { return !items_.empty(); });
  }
  size_t size() const {
    const std::lock_guard lock(mutex_);
    return items_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<T> items_;  // guarded by mutex_
};

}  // namespace glm53
