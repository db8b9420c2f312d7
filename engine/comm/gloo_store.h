// Gloo's rendezvous store over the control links, for the time in which the ranks connect to each other.
#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gloo/rendezvous/store.h>

#include "engine/comm/control_link.h"

namespace glm53 {

/// Keys and values of the group, on rank 0. Thread-safe.
class KeyTable {
 public:
  void set(const std::string& key, std::vector<char> value);
  /// Waits for the key. Throws Error(fabric) after `timeout` or when fail() was called.
  std::vector<char> get(const std::string& key, std::chrono::milliseconds timeout);
  void fail(const std::string& why);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<char>> values_;  // guarded by mutex_
  std::string failure_;                              // guarded by mutex_
};

/// Rank 0's store: its own calls go to the table; a thread a link serves the others until they say done.
class ServingStore final : public gloo::rendezvous::Store {
 public:
  ServingStore(std::span<ControlLink* const> links, std::chrono::milliseconds timeout);
  ~ServingStore() override;  ///< waits for the threads; closes the links when finish() was not reached
  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  /// Waits until every other rank is done; the links then are free again. Throws Error(peer_lost).
  void finish();

 private:
  void serve(ControlLink& link);
  void join() noexcept;

  KeyTable table_;
  const std::vector<ControlLink*> links_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::string failure_;  // guarded by mutex_
  bool finished_ = false;
  std::vector<std::thread> threads_;
};

/// The other ranks' store: every call is a question to rank 0.
class AskingStore final : public gloo::rendezvous::Store {
 public:
  AskingStore(ControlLink& link, std::chrono::milliseconds timeout) : link_(link), timeout_(timeout) {}
  void set(const std::string& key, const std::vector<char>& data) override;
  std::vector<char> get(const std::string& key) override;
  void wait(const std::vector<std::string>& keys) override;
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;
  void finish();

 private:
  ControlLink& link_;
  const std::chrono::milliseconds timeout_;
};

}  // namespace glm53
