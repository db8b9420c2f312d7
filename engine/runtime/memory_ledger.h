// How many blocks fit: from what is free after the weights, by component.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine/model/model.h"

namespace glm53 {

/// What the pools are sized from, all in bytes.
struct MemoryFacts {
  uint64_t available = 0;  ///< of the machine, now
  uint64_t reserve = 0;    ///< that must stay free (memory.reserve)
  int snapshots = 0;       ///< of the prefix cache; 0 = none, -1 = by the size of the KV cache
  uint64_t kv_bytes = 0;   ///< wanted size of the blocks (memory.kv_bytes); 0 = as needed
  int ranks_on_host = 1;   ///< that share what is available
  int max_seqs = 1;
  int max_context = 1;
};

/// Blocks for max_seqs full contexts, or kv_bytes, within this rank's part of what is free. Snapshots as asked for, or
/// 15% of the blocks' bytes, at least 8 and two a sequence, at most 64, where they fit beside the blocks. Throws
/// Error(memory) naming the numbers when the slots and one sequence's least cache do not fit, or kv_bytes or the
/// snapshots asked for do not.
PoolSizes plan_pools(const MemoryFacts& facts, const PoolUnit& unit);

/// The ledger as lines for the log.
std::vector<std::string> ledger_lines(const MemoryFacts& facts,
                                      const std::vector<std::pair<std::string, size_t>>& weights, uint64_t resident,
                                      const PoolUnit& unit, const PoolSizes& sizes);

/// MemAvailable of meminfo under `proc`, bytes. Throws Error(internal) when it is not there.
uint64_t available_memory(const std::string& proc = "/proc");

}  // namespace glm53
