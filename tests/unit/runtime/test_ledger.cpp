#include <doctest/doctest.h>

#include "common/error.h"
#include "engine/runtime/memory_ledger.h"

using namespace glm53;

namespace {

constexpr uint64_t kMB = 1000000;
const PoolUnit kUnit{.block = 1 * kMB, .slot = 10 * kMB, .snap = 5 * kMB};

MemoryFacts facts() {
  MemoryFacts f;
  f.available = 1000 * kMB;
  f.reserve = 100 * kMB;
  f.max_seqs = 4;
  f.max_context = 640;
  return f;
}

Code code_of(const MemoryFacts& f, const PoolUnit& unit = kUnit) {
  try {
    plan_pools(f, unit);
  } catch (const Error& e) {
    return e.code();
  }
  return Code::ok;
}

}  // namespace

TEST_CASE("the pools hold every sequence's whole context when there is room") {
  const PoolSizes s = plan_pools(facts(), kUnit);
  CHECK(s.blocks == 4 * 10 + 1);
  CHECK(s.slots == 4);
  CHECK(s.snaps == 0);
}

TEST_CASE("else what is left of this rank's part") {
  MemoryFacts f = facts();
  f.max_context = 64 * 10000;
  CHECK(plan_pools(f, kUnit).blocks == 900 - 40);
  f.ranks_on_host = 2;
  CHECK(plan_pools(f, kUnit).blocks == 450 - 40);
  f.kv_bytes = 100 * kMB;
  CHECK(plan_pools(f, kUnit).blocks == 100);
}

TEST_CASE("snapshots have their part: as asked for, or by the size of the KV cache") {
  MemoryFacts f = facts();
  f.snapshots = 12;
  CHECK(plan_pools(f, kUnit).snaps == 12);
  CHECK(plan_pools(f, kUnit).blocks == 41);
  f.snapshots = -1;
  CHECK(plan_pools(f, kUnit).snaps == 8);  // 15% of 41 MB is one
  f.max_seqs = 10;
  CHECK(plan_pools(f, kUnit).snaps == 20);
  f.max_seqs = 4;
  f.kv_bytes = 400 * kMB;
  CHECK(plan_pools(f, kUnit).snaps == 12);
  f.kv_bytes = 855 * kMB;
  CHECK(plan_pools(f, kUnit).snaps == 1);  // what is left
  f.kv_bytes = 0;
  f.max_context = 64 * 10000;
  CHECK(plan_pools(f, kUnit).blocks == 748);  // of 860
  CHECK(plan_pools(f, kUnit).snaps == 22);
  f.snapshots = 100;
  CHECK(plan_pools(f, kUnit).blocks == 360);
  CHECK(plan_pools(f, kUnit).snaps == 100);
  f.snapshots = 172;
  CHECK(code_of(f) == Code::memory);
  CHECK(plan_pools(f, {.block = 1 * kMB, .slot = 10 * kMB, .snap = 0}).snaps == 0);
}

TEST_CASE("what does not fit is an error of memory") {
  MemoryFacts f = facts();
  f.kv_bytes = 861 * kMB;
  CHECK(code_of(f) == Code::memory);
  f.kv_bytes = 860 * kMB;
  CHECK(code_of(f) == Code::ok);
  f.kv_bytes = 1 * kMB;  // only the null block
  CHECK(code_of(f) == Code::memory);
  f = facts();
  f.reserve = 2000 * kMB;
  CHECK(code_of(f) == Code::memory);
  f = facts();
  f.max_seqs = 100;
  CHECK(code_of(f) == Code::memory);
}

TEST_CASE("the ledger names every component, and the machine tells what is free") {
  const auto lines = ledger_lines(facts(), {{"mla", 5}, {"head", 7}}, 100, kUnit, plan_pools(facts(), kUnit));
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  for (const char* part : {"weights mla", "weights head", "weights in all", "workspace", "KV cache 41 blocks",
                           "2560 tokens", "4 slots", "snapshots 0", "stay free"}) {
    CAPTURE(part);
    CHECK(all.find(part) != std::string::npos);
  }
  CHECK(available_memory() > 0);
}
