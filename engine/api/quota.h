// What a key may use: requests and tokens by time, requests at once.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace glm53::api {

/// 0 = no limit.
struct KeyLimits {
  int64_t requests_per_minute = 0, concurrent = 0, tokens_per_minute = 0, tokens_per_day = 0;
  bool operator==(const KeyLimits&) const = default;
};

/// An amount that refills evenly up to its limit. May be overdrawn: what an answer used is known at its end only.
class Allowance {
 public:
  using Time = std::chrono::steady_clock::time_point;
  Allowance(int64_t limit, std::chrono::seconds period, Time now);
  /// Seconds until `amount` is there; 0 = it is.
  uint32_t wait_s(double amount, Time now);
  void take(double amount) { level_ -= amount; }

 private:
  void refill(Time now);
  double limit_, per_second_, level_;
  Time filled_;
};

class QuotaBook;

/// One admitted request. Ends once: with what it used, or when it is destroyed.
class QuotaLease {
 public:
  QuotaLease(std::shared_ptr<QuotaBook> book, std::string key) : book_(std::move(book)), key_(std::move(key)) {}
  ~QuotaLease() { end(0); }
  QuotaLease(const QuotaLease&) = delete;
  QuotaLease& operator=(const QuotaLease&) = delete;
  /// Prompt and output tokens of it; later calls do nothing.
  void end(int64_t tokens) noexcept;

 private:
  std::shared_ptr<QuotaBook> book_;
  const std::string key_;
};

/// Use by key name. Thread-safe.
class QuotaBook : public std::enable_shared_from_this<QuotaBook> {
 public:
  using Time = Allowance::Time;
  /// Throws ApiError(429), which names the quota, with the seconds to wait.
  std::shared_ptr<QuotaLease> admit(const std::string& key, const KeyLimits& limits, Time now);
  size_t running(const std::string& key) const;

 private:
  friend class QuotaLease;
  struct Use {
    explicit Use(const KeyLimits& l, Time now)
        : limits(l),
          requests(l.requests_per_minute, std::chrono::minutes(1), now),
          minute(l.tokens_per_minute, std::chrono::minutes(1), now),
          day(l.tokens_per_day, std::chrono::hours(24), now) {}
    KeyLimits limits;
    Allowance requests, minute, day;
  };
  void end(const std::string& key, int64_t tokens);

  mutable std::mutex mutex_;
  std::map<std::string, Use> use_;  ///< of keys with limits
  std::map<std::string, size_t> running_;
};

}  // namespace glm53::api
