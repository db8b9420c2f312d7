#include "engine/api/quota.h"

#include <algorithm>
#include <cmath>

#include "common/strings.h"
#include "engine/api/errors.h"

namespace glm53::api {

namespace {

[[noreturn]] void refuse(const std::string& key, std::string_view quota, int64_t limit, uint32_t wait_s) {
  throw ApiError(429,
                 cat("the quota of key '", key, "' is used up: ", limit, " ", quota, "; try again in ", wait_s, " s"),
                 {}, wait_s);
}

}  // namespace

Allowance::Allowance(int64_t limit, std::chrono::seconds period, Time now)
    : limit_(static_cast<double>(limit)),
      per_second_(limit_ / static_cast<double>(period.count())),
      level_(limit_),
      filled_(now) {}

void Allowance::refill(Time now) {
  if (now <= filled_) return;
  level_ = std::min(limit_, level_ + std::chrono::duration<double>(now - filled_).count() * per_second_);
  filled_ = now;
}

uint32_t Allowance::wait_s(double amount, Time now) {
  if (limit_ <= 0) return 0;
  refill(now);
  // A little slack: levels are sums of fractions.
  if (level_ + 1e-6 >= amount) return 0;
  return static_cast<uint32_t>(std::ceil((amount - level_) / per_second_ - 1e-6));
}

std::shared_ptr<QuotaLease> QuotaBook::admit(const std::string& key, const KeyLimits& limits, Time now) {
  const std::scoped_lock lock(mutex_);
  auto found = use_.try_emplace(key, limits, now).first;
  if (found->second.limits != limits) {  // the key file says something else now
    use_.erase(found);
    found = use_.try_emplace(key, limits, now).first;
  }
  Use& use = found->second;
  size_t& running = running_[key];
  if (limits.concurrent > 0 && running >= static_cast<size_t>(limits.concurrent)) {
    refuse(key, "requests at once", limits.concurrent, 1);
  }
  if (const uint32_t wait = use.minute.wait_s(1, now)) refuse(key, "tokens a minute", limits.tokens_per_minute, wait);
  if (const uint32_t wait = use.day.wait_s(1, now)) refuse(key, "tokens a day", limits.tokens_per_day, wait);
  if (const uint32_t wait = use.requests.wait_s(1, now)) {
    refuse(key, "requests a minute", limits.requests_per_minute, wait);
  }
  use.requests.take(1);
  ++running;
  return std::make_shared<QuotaLease>(shared_from_this(), key);
}

void QuotaBook::end(const std::string& key, int64_t tokens) {
  const std::scoped_lock lock(mutex_);
  if (const auto running = running_.find(key); running != running_.end() && --running->second == 0) {
    running_.erase(running);
  }
  if (const auto use = use_.find(key); use != use_.end()) {
    use->second.minute.take(static_cast<double>(tokens));
    use->second.day.take(static_cast<double>(tokens));
  }
}

size_t QuotaBook::running(const std::string& key) const {
  const std::scoped_lock lock(mutex_);
  const auto found = running_.find(key);
  return found == running_.end() ? 0 : found->second;
}

void QuotaLease::end(int64_t tokens) noexcept {
  if (const auto book = std::move(book_)) book->end(key_, tokens);
}

}  // namespace glm53::api
