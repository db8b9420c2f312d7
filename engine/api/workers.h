// A few threads for work too long for a server thread: parsing and tokenising large requests.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace glm53::api {

class Workers {
 public:
  explicit Workers(int threads);
  ~Workers();  ///< drops what has not begun, waits for what has
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  /// Jobs must not throw.
  void post(std::function<void()> job);

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace glm53::api
