// Finding our processes without a record of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/process.h"

namespace glm53::supervise {

/// `run_dir`/notify/NAME.GENERATION: the value of a child's NOTIFY_SOCKET.
std::string notify_path(const std::string& run_dir, std::string_view name, uint64_t generation);
/// The reverse; nullopt for a path that is none of ours.
std::optional<std::pair<std::string, uint64_t>> parse_notify_path(const std::string& run_dir, std::string_view path);

struct FoundProcess {
  ProcessId id;
  std::string name;
  uint64_t generation = 0;
};
/// Session leaders of this user whose environment names a notify socket under `run_dir`.
std::vector<FoundProcess> find_processes(const std::string& run_dir);

}  // namespace glm53::supervise
