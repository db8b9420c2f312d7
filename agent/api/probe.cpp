#include "agent/api/probe.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/rank_contract.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::steady_clock;
constexpr int kTimeoutMs = 1000;
constexpr auto kWindow = std::chrono::seconds(10);

int64_t number(const Json& j, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    const auto it = j.find(key);
    if (it != j.end() && it->is_number()) return it->get<int64_t>();
  }
  return 0;
}

Pools pools_of(const Json& rank0) {
  Pools p;
  p.blocks_used = number(rank0, {"blocks_used"});
  p.blocks_total = number(rank0, {"blocks_total"});
  p.blocks_cached = number(rank0, {"blocks_cached"});
  p.slots_used = number(rank0, {"slots_used"});
  p.slots_total = number(rank0, {"slots_total"});
  p.snapshots_used = number(rank0, {"snaps_used"});
  p.snapshots_total = number(rank0, {"snaps_total"});
  p.prefix_queries = number(rank0, {"prefix_queries"});
  p.prefix_hits = number(rank0, {"prefix_hits"});
  p.preemptions = number(rank0, {"preemptions"});
  return p;
}

/// Null when nobody answers.
Json ask(const std::string& socket) {
  try {
    Json answer = parse_json(admin_call(socket, R"({"do":"counters"})", kTimeoutMs));
    if (answer.is_object() && answer.value("ok", false)) return answer;
  } catch (const std::exception&) {
    // Busy, ending or not there yet: the supervisor knows more about that.
  }
  return nullptr;
}

}  // namespace

Probe::Probe(std::string run_dir, supervise::Supervisor& supervisor)
    : run_dir_(std::move(run_dir)), supervisor_(supervisor) {
  thread_ = std::thread([this] { run(); });
}

Probe::~Probe() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Counters Probe::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void Probe::set_hurry(bool hurry) {
  {
    const std::lock_guard lock(mutex_);
    if (hurry == hurry_) return;
    hurry_ = hurry;
  }
  changed_.notify_all();
}

void Probe::run() {
  bool hurried = false;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(hurry_ ? 100 : 1000),
                        [&] { return stopping_ || (hurry_ && !hurried); });
      if (stopping_) return;
      hurried = hurry_;
    }
    try {
      poll();
    } catch (const std::exception& e) {
      log::error(cat("probe: ", std::string_view(e.what())));
    }
  }
}

void Probe::poll() {
  Json rank0, api;
  uint64_t generation = 0;
  for (const auto& view : supervisor_.snapshot()) {
    if (view.ended_at != 0) continue;
    if (view.name == "api" && (view.ready || view.adopted)) {
      api = ask(run_dir_ + "/api.sock");
      if (!api.is_null()) supervisor_.touch("api", view.generation);
    }
    if (view.name == "rank0" && view.ready) {
      rank0 = ask(run_dir_ + "/rank0.sock");
      generation = view.generation;
    }
  }
  if (!rank0.is_null()) count_tokens(generation, number(rank0, {"generated_tokens"}));
  const auto now = steady_clock::now();
  const std::lock_guard lock(mutex_);
  counters_.tokens_total = tokens_total_;
  samples_.emplace_back(now, tokens_total_);
  while (samples_.size() > 2 && now - samples_.front().first > kWindow) samples_.pop_front();
  const double seconds = std::chrono::duration<double>(now - samples_.front().first).count();
  counters_.tokens_per_second =
      seconds > 0.5 ? static_cast<double>(samples_.back().second - samples_.front().second) / seconds : 0;
  counters_.rank0_answers = !rank0.is_null();
  counters_.api_answers = !api.is_null();
  counters_.running = rank0.is_null() ? 0 : number(rank0, {"running"});
  counters_.waiting = rank0.is_null() ? 0 : number(rank0, {"waiting"});
  counters_.api_in_flight = api.is_null() ? 0 : number(api, {"requests_in_flight", "in_flight", "requests"});
  counters_.api_connections = api.is_null() ? 0 : number(api, {"connections"});
  counters_.pools = rank0.is_null() ? Pools() : pools_of(rank0);
  const auto digest = api.is_null() ? api.end() : api.find("model_digest");
  const bool serves = !api.is_null() && digest != api.end() && digest->is_string() && api.value("connected", false);
  counters_.model_digest = serves ? digest->get<std::string>() : std::string();
  counters_.api_generation = api.is_null() ? 0 : static_cast<uint64_t>(number(api, {"generation"}));
}

/// A rank counts from its own start; the sum goes on over generations.
void Probe::count_tokens(uint64_t generation, int64_t generated) {
  const bool same = generation == rank_generation_;
  // What it generated before we looked is part of the sum, not of the rate.
  if (!same) samples_.clear();
  tokens_total_ += std::max<int64_t>(0, same ? generated - rank_tokens_ : generated);
  rank_generation_ = generation;
  rank_tokens_ = generated;
}

}  // namespace glm53::agent
