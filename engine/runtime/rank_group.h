// The ranks of one generation: what they agree on before serving, and plans while they do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <variant>
#include <vector>

#include "common/error.h"
#include "engine/comm/control_link.h"
#include "engine/model/model.h"
#include "engine/runtime/memory_guard.h"
#include "engine/runtime/plan.h"

namespace glm53 {

/// Frames on a control link after the rendezvous: u8 kind, body.
struct StopFrame {};
struct HostFrame {
  std::string boot_id;
};  ///< follower: which machine I am on
struct CountFrame {
  int32_t value = 0;
};  ///< rank 0: ranks on your machine
struct PoolsFrame {
  PoolSizes sizes;
};  ///< follower: what I can hold; rank 0: what all have
struct MemoryFrame {
  int32_t rank = 0;
  MemoryLevel level = MemoryLevel::ok;
};  ///< follower, while serving: how my machine's memory stands
struct RestoreFrame {
  uint64_t restore = 0;
  std::vector<SpillItem> items;
};  ///< rank 0, while serving: fetch these from your spill tier
struct RestoredFrame {
  int32_t rank = 0;
  uint64_t restore = 0;
  bool ok = false;
};                             ///< follower: I have them, or not all
struct ForgetSpilledFrame {};  ///< rank 0: what has been spilled is void
using ControlFrame = std::variant<StepPlan, StopFrame, HostFrame, CountFrame, PoolsFrame, MemoryFrame, RestoreFrame,
                                  RestoredFrame, ForgetSpilledFrame>;
std::vector<std::byte> encode(const ControlFrame& frame);
/// Throws Error(corrupt).
ControlFrame decode_control(std::span<const std::byte> frame);

/// Owns the control links of a rank. First the agreements, in the same order on every rank; then serve().
class RankGroup {
 public:
  /// Rank 0 holds a link to every other rank, in order; the others one to rank 0.
  RankGroup(int rank, int size, std::vector<std::unique_ptr<ControlLink>> links);
  ~RankGroup() { shut(); }
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  std::vector<ControlLink*> links() const;

  /// Ranks on this machine, this one included. Throws Error(peer_lost), like all agreements.
  int ranks_on_host(const std::string& boot_id);
  /// Smallest of everybody's sizes. Nobody returns before all have asked.
  PoolSizes agree(const PoolSizes& mine);
  /// Whether it is so on every rank; an agreement like the others.
  bool everywhere(bool mine) { return agree({.blocks = mine ? 1 : 0}).blocks == 1; }

  /// From now on a thread a link listens. `on_frame`: frames of rank 0 (on the others), of
  /// the others (on rank 0). `on_lost`: a link ended
  /// although nobody stopped; once a link. Both run on the listening thread and must not throw.
  void serve(std::function<void(ControlFrame)> on_frame, std::function<void(const Error&)> on_lost);
  /// Rank 0.
  void send(const StepPlan& plan);
  /// Rank 0, while serving: orders about the spill tier.
  void send(const RestoreFrame& order);
  void send(const ForgetSpilledFrame& order);
  /// The others: whether what was ordered is there. Called as tell_memory().
  void tell_restored(uint64_t restore, bool ok);
  /// The others: how memory stands. One thread calls it, and only while serving.
  void tell_memory(MemoryLevel level);
  /// Rank 0: tells the others to end and waits a moment for them to do so.
  void stop();
  /// Closes the links and waits for the listening threads: no callback runs afterwards.
  void shut() noexcept;
  /// The end of a link is no loss any more.
  void expect_end() { ending_ = true; }

 private:
  void listen(ControlLink& link);
  void send_all(const ControlFrame& frame);
  template <class T>
  T receive(ControlLink& link);

  const int rank_, size_;
  std::vector<std::unique_ptr<ControlLink>> links_;
  std::function<void(ControlFrame)> on_frame_;
  std::function<void(const Error&)> on_lost_;
  std::vector<std::thread> threads_;
  std::atomic<bool> ending_ = false;
  std::mutex mutex_;
  std::condition_variable ended_;
  size_t open_ = 0;  // links whose thread still listens; guarded by mutex_
};

}  // namespace glm53
