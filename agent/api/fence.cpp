#include "agent/api/fence.h"

#include "common/error.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {
constexpr const char* kKey = "head_epoch";
}

Fence::Fence(state::Database& db) : meta_(db) {
  if (const auto stored = meta_.get(kKey)) newest_ = static_cast<uint64_t>(parse_int(*stored).value_or(0));
}

void Fence::admit(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  if (epoch < newest_) {
    throw Error(Code::busy, cat("epoch ", epoch, " is older than ", newest_, ": another head has taken over"),
                "this head must take the lease again (restart its agent)");
  }
  if (epoch > newest_) meta_.set(kKey, cat(epoch));
  newest_ = epoch;
  last_ = std::chrono::steady_clock::now();
}

bool Fence::contact(uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  if (epoch < newest_ || epoch == 0) return false;
  last_ = std::chrono::steady_clock::now();
  return true;
}

std::chrono::milliseconds Fence::silence() const {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - last_);
}

uint64_t Fence::newest() const {
  const std::lock_guard lock(mutex_);
  return newest_;
}

}  // namespace glm53::agent
