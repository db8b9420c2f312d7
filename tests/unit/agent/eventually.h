// Waiting for what other threads and processes do.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace glm53::test {

/// Waits for something that must come; false after a limit that only a fault reaches.
inline bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 6000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace glm53::test
