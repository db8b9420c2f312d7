#include "agent/supervise/scan.h"

#include <filesystem>
#include <system_error>
#include <unistd.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::supervise {
namespace {

std::optional<std::string> notify_socket_of(pid_t pid) {
  std::string environment;
  try {
    environment = read_file(cat("/proc/", pid, "/environ"), 1u << 20);
  } catch (const Error&) {
    return std::nullopt;  // of another user, or gone
  }
  constexpr std::string_view kVariable = "NOTIFY_SOCKET=";
  for (const std::string& entry : split(environment, '\0')) {
    if (entry.starts_with(kVariable)) return entry.substr(kVariable.size());
  }
  return std::nullopt;
}

}  // namespace

std::string notify_path(const std::string& run_dir, std::string_view name, uint64_t generation) {
  return cat(run_dir, "/notify/", name, ".", generation);
}

std::optional<std::pair<std::string, uint64_t>> parse_notify_path(const std::string& run_dir, std::string_view path) {
  const std::string prefix = run_dir + "/notify/";
  if (!path.starts_with(prefix)) return std::nullopt;
  path.remove_prefix(prefix.size());
  const size_t dot = path.rfind('.');
  if (dot == std::string_view::npos || dot == 0) return std::nullopt;
  const auto generation = parse_int(path.substr(dot + 1));
  if (!generation || *generation < 0 || path.find('/') != std::string_view::npos) return std::nullopt;
  return std::pair(std::string(path.substr(0, dot)), static_cast<uint64_t>(*generation));
}

std::vector<FoundProcess> find_processes(const std::string& run_dir) {
  std::vector<FoundProcess> found;
  std::error_code ec;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ec)) {
    const auto number = parse_int(entry.path().filename().string());
    if (!number || *number <= 1) continue;
    const auto pid = static_cast<pid_t>(*number);
    if (::getsid(pid) != pid) continue;  // a child of a child inherits the variable
    const auto socket = notify_socket_of(pid);
    const auto named = socket ? parse_notify_path(run_dir, *socket) : std::nullopt;
    const auto id = named ? identify(pid) : std::nullopt;
    if (id) found.push_back({*id, named->first, named->second});
  }
  return found;
}

}  // namespace glm53::supervise
