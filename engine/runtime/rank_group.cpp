#include "engine/runtime/rank_group.h"

#include <algorithm>

#include "common/bytes.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53 {
namespace {

enum class Kind : uint8_t {
  plan = 1,
  stop = 2,
  host = 3,
  count = 4,
  pools = 5,
  memory = 6,
  restore = 7,
  restored = 8,
  forget_spilled = 9
};
constexpr std::chrono::seconds kStopTime{2};

void put(ByteWriter& w, const StepPlan& plan) {
  for (const std::byte b : encode(plan)) w.put(static_cast<uint8_t>(b));
}
void put(ByteWriter&, const StopFrame&) {}
void put(ByteWriter& w, const HostFrame& f) {
  w.put(f.boot_id);
}
void put(ByteWriter& w, const CountFrame& f) {
  w.put(f.value);
}
void put(ByteWriter& w, const PoolsFrame& f) {
  for (const int32_t n : {f.sizes.blocks, f.sizes.slots, f.sizes.snaps}) w.put(n);
}
void put(ByteWriter& w, const MemoryFrame& f) {
  w.put(f.rank);
  w.put(static_cast<uint8_t>(f.level));
}

void put(ByteWriter& w, const RestoreFrame& f) {
  w.put(f.restore);
  put(w, f.items);
}
void put(ByteWriter& w, const RestoredFrame& f) {
  w.put(f.rank);
  w.put(f.restore);
  w.put(f.ok);
}
void put(ByteWriter&, const ForgetSpilledFrame&) {}

}  // namespace

std::vector<std::byte> encode(const ControlFrame& frame) {
  ByteWriter w;
  w.put(static_cast<Kind>(frame.index() + 1));
  std::visit([&](const auto& f) { put(w, f); }, frame);
  return w.take();
}

ControlFrame decode_control(std::span<const std::byte> frame) {
  ByteReader r(frame);
  const auto kind = r.get<Kind>();
  if (kind == Kind::plan) return decode_plan(frame.subspan(1));
  ControlFrame out;
  switch (kind) {
    case Kind::stop:
      out = StopFrame{};
      break;
    case Kind::host:
      out = HostFrame{r.get_string()};
      break;
    case Kind::count:
      out = CountFrame{r.get<int32_t>()};
      break;
    case Kind::pools: {
      PoolsFrame f;
      for (int* n : {&f.sizes.blocks, &f.sizes.slots, &f.sizes.snaps}) *n = r.get<int32_t>();
      out = f;
      break;
    }
    case Kind::memory: {
      MemoryFrame f;
      f.rank = r.get<int32_t>();
      const auto level = r.get<uint8_t>();
      if (level > static_cast<uint8_t>(MemoryLevel::critical))
        throw Error(Code::corrupt, cat("control frame: memory level ", int{level}));
      f.level = static_cast<MemoryLevel>(level);
      out = f;
      break;
    }
    case Kind::restore: {
      RestoreFrame f;
      f.restore = r.get<uint64_t>();
      f.items = get_spill_items(r);
      out = std::move(f);
      break;
    }
    case Kind::restored: {
      RestoredFrame f;
      f.rank = r.get<int32_t>();
      f.restore = r.get<uint64_t>();
      f.ok = r.get<uint8_t>() != 0;
      out = f;
      break;
    }
    case Kind::forget_spilled:
      out = ForgetSpilledFrame{};
      break;
    default:
      throw Error(Code::corrupt, cat("control frame of unknown kind ", int{static_cast<uint8_t>(kind)}));
  }
  r.finish();
  return out;
}

namespace {

/// The next frame. What does not decode is a bug of the other rank, not damaged data of an operator's.
ControlFrame next_frame(ControlLink& link) {
  try {
    return decode_control(link.receive());
  } catch (const Error& e) {
    if (e.code() != Code::corrupt) throw;
    throw Error(Code::internal, e.what(), e.remedy());
  }
}

}  // namespace

RankGroup::RankGroup(int rank, int size, std::vector<std::unique_ptr<ControlLink>> links)
    : rank_(rank), size_(size), links_(std::move(links)) {}

void RankGroup::shut() noexcept {
  ending_ = true;
  for (const auto& link : links_) link->close();
  for (std::thread& t : threads_)
    if (t.joinable()) t.join();
}

std::vector<ControlLink*> RankGroup::links() const {
  std::vector<ControlLink*> all;
  for (const auto& link : links_) all.push_back(link.get());
  return all;
}

template <class T>
T RankGroup::receive(ControlLink& link) {
  ControlFrame frame = next_frame(link);
  if (!std::holds_alternative<T>(frame))
    throw Error(Code::internal, cat("control link: a frame of kind ", frame.index() + 1, " came out of turn"));
  return std::get<T>(std::move(frame));
}

int RankGroup::ranks_on_host(const std::string& boot_id) {
  if (rank_ != 0) {
    links_[0]->send(encode(HostFrame{boot_id}));
    return receive<CountFrame>(*links_[0]).value;
  }
  std::vector<std::string> hosts{boot_id};
  for (const auto& link : links_) hosts.push_back(receive<HostFrame>(*link).boot_id);
  const auto on = [&](const std::string& host) {
    return static_cast<int32_t>(std::count(hosts.begin(), hosts.end(), host));
  };
  for (size_t i = 0; i < links_.size(); ++i) links_[i]->send(encode(CountFrame{on(hosts[i + 1])}));
  return on(boot_id);
}

PoolSizes RankGroup::agree(const PoolSizes& mine) {
  if (rank_ != 0) {
    links_[0]->send(encode(PoolsFrame{mine}));
    return receive<PoolsFrame>(*links_[0]).sizes;
  }
  PoolSizes least = mine;
  for (const auto& link : links_) {
    const PoolSizes theirs = receive<PoolsFrame>(*link).sizes;
    least = {std::min(least.blocks, theirs.blocks), std::min(least.slots, theirs.slots),
             std::min(least.snaps, theirs.snaps)};
  }
  for (const auto& link : links_) link->send(encode(PoolsFrame{least}));
  return least;
}

void RankGroup::serve(std::function<void(ControlFrame)> on_frame, std::function<void(const Error&)> on_lost) {
  on_frame_ = std::move(on_frame);
  on_lost_ = std::move(on_lost);
  open_ = links_.size();
  for (const auto& link : links_) threads_.emplace_back([this, &link] { listen(*link); });
}

void RankGroup::listen(ControlLink& link) {
  try {
    for (;;) on_frame_(next_frame(link));
  } catch (const Error& e) {
    if (!ending_) on_lost_(e);
  } catch (const std::exception& e) {
    if (!ending_) on_lost_(Error(Code::internal, e.what()));
  }
  const std::lock_guard lock(mutex_);
  --open_;
  ended_.notify_all();
}

void RankGroup::send_all(const ControlFrame& frame) {
  const std::vector<std::byte> bytes = encode(frame);
  for (const auto& link : links_) link->send(bytes);
}

void RankGroup::send(const StepPlan& plan) {
  if (!links_.empty()) send_all(plan);
}

void RankGroup::send(const RestoreFrame& order) {
  if (!links_.empty()) send_all(order);
}

void RankGroup::send(const ForgetSpilledFrame& order) {
  send_all(order);
}

void RankGroup::tell_restored(uint64_t restore, bool ok) {
  links_.at(0)->send(encode(ControlFrame(RestoredFrame{rank_, restore, ok})));
}

void RankGroup::tell_memory(MemoryLevel level) {
  links_.at(0)->send(encode(ControlFrame(MemoryFrame{rank_, level})));
}

void RankGroup::stop() {
  ending_ = true;
  for (const auto& link : links_) {
    try {
      link->send(encode(StopFrame{}));
    } catch (const Error& e) {
      log::warn(cat("stop: ", e.what()));
    }
  }
  std::unique_lock lock(mutex_);
  if (!ended_.wait_for(lock, kStopTime, [&] { return open_ == 0; })) log::warn("stop: another rank has not ended yet");
}

}  // namespace glm53
