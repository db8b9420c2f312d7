#include "engine/runtime/memory_ledger.h"

#include <algorithm>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr uint64_t kLeastSnapshots = 8, kMostSnapshots = 64;

std::string human(uint64_t bytes) {
  return human_bytes(static_cast<int64_t>(bytes));
}

/// Snapshots that pay beside blocks of so many bytes.
int snapshots_beside(uint64_t block_bytes, uint64_t room, int max_seqs, const PoolUnit& unit) {
  if (unit.snap == 0) return 0;
  // As many conversations as run at a time, each with its last turn and one that it is about to leave behind.
  const uint64_t least = std::clamp<uint64_t>(2 * static_cast<uint64_t>(max_seqs), kLeastSnapshots, kMostSnapshots);
  const uint64_t wanted = std::clamp<uint64_t>(block_bytes * 15 / 100 / unit.snap, least, kMostSnapshots);
  return static_cast<int>(std::min(wanted, (room - std::min(room, block_bytes)) / unit.snap));
}

}  // namespace

PoolSizes plan_pools(const MemoryFacts& f, const PoolUnit& unit) {
  const uint64_t part =
      f.available > f.reserve ? (f.available - f.reserve) / static_cast<uint64_t>(std::max(f.ranks_on_host, 1)) : 0;
  const uint64_t slots = static_cast<uint64_t>(f.max_seqs) * unit.slot;
  const std::string have = cat(human(f.available), " are available, ", human(f.reserve),
                               " stay free (memory.reserve), ", f.ranks_on_host, " ranks share the rest");
  const uint64_t least = 2 * unit.block;
  if (slots + least > part)
    throw Error(Code::memory,
                cat("the state of ", f.max_seqs, " sequences takes ", human(slots), " and the smallest cache ",
                    human(least), ": ", have),
                "lower serve.max_seqs or memory.reserve, or stop other programs");
  uint64_t room = part - slots;
  const uint64_t asked = f.snapshots > 0 ? static_cast<uint64_t>(f.snapshots) * unit.snap : 0;
  if (asked + least > room)
    throw Error(Code::memory,
                cat(f.snapshots, " snapshots take ", human(asked), ", ", human(room),
                    " are left for them and the KV cache: ", have),
                "lower cache.snapshots, or 0 for what fits");
  room -= asked;
  const uint64_t context_blocks = (static_cast<uint64_t>(f.max_context) + kBlockTokens - 1) / kBlockTokens;
  uint64_t blocks = static_cast<uint64_t>(f.max_seqs) * context_blocks + 1;
  if (unit.block != 0 && f.kv_bytes != 0) {
    if (f.kv_bytes > room)
      throw Error(Code::memory, cat("memory.kv_bytes asks for ", human(f.kv_bytes), ", ", human(room), " fit: ", have),
                  "lower memory.kv_bytes, or 0 for what fits");
    blocks = f.kv_bytes / unit.block;
  } else if (unit.block != 0) {
    // Where not everything fits, snapshots have their part of it.
    const uint64_t for_blocks = f.snapshots < 0 ? room - room * 13 / 100 : room;
    blocks = std::min(blocks, for_blocks / unit.block);
  }
  if (blocks < 2)
    throw Error(Code::memory, cat("the KV cache holds ", blocks, " blocks of ", human(unit.block)),
                "at least 2; raise memory.kv_bytes");
  PoolSizes sizes;
  sizes.blocks = static_cast<int>(std::min<uint64_t>(blocks, INT32_MAX));
  sizes.slots = f.max_seqs;
  sizes.snaps = f.snapshots < 0  ? snapshots_beside(blocks * unit.block, room, f.max_seqs, unit)
                : unit.snap == 0 ? 0
                                 : f.snapshots;
  return sizes;
}

std::vector<std::string> ledger_lines(const MemoryFacts& f, const std::vector<std::pair<std::string, size_t>>& weights,
                                      uint64_t resident, const PoolUnit& unit, const PoolSizes& sizes) {
  std::vector<std::string> lines;
  uint64_t total = 0;
  for (const auto& [group, bytes] : weights) {
    lines.push_back(cat("memory: weights ", group, " ", human(bytes)));
    total += bytes;
  }
  lines.push_back(cat("memory: weights in all ", human(total)));
  lines.push_back(cat("memory: workspace and program ", human(resident > total ? resident - total : 0)));
  lines.push_back(cat("memory: KV cache ", sizes.blocks, " blocks of ", unit.block, " bytes, ",
                      human(static_cast<uint64_t>(sizes.blocks) * unit.block), " = ",
                      static_cast<int64_t>(sizes.blocks - 1) * kBlockTokens, " tokens"));
  lines.push_back(
      cat("memory: state ", sizes.slots, " slots, ", human(static_cast<uint64_t>(sizes.slots) * unit.slot)));
  lines.push_back(cat("memory: snapshots ", sizes.snaps, ", ", human(static_cast<uint64_t>(sizes.snaps) * unit.snap)));
  lines.push_back(cat("memory: ", human(f.available), " were available before the pools, ", human(f.reserve),
                      " stay free, ", f.ranks_on_host, " ranks on this machine"));
  return lines;
}

uint64_t available_memory(const std::string& proc) {
  const std::string text = read_file(proc + "/meminfo", 1 << 20);
  for (const std::string& line : split(text, '\n')) {
    if (!line.starts_with("MemAvailable:")) continue;
    std::string_view number = trim(std::string_view(line).substr(13));
    if (number.ends_with(" kB")) number.remove_suffix(3);
    if (const auto kb = parse_int(trim(number))) return static_cast<uint64_t>(*kb) * 1024;
  }
  throw Error(Code::internal, cat(proc, "/meminfo has no MemAvailable"));
}

}  // namespace glm53
