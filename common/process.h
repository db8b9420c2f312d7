// Child processes: start, identity, exit.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "common/file.h"

namespace glm53 {

/// A variable of this process's environment; nullopt when it is not set. Nothing here ever changes the environment, so
/// any thread may ask.
std::optional<std::string> environment(const std::string& name);

/// Who a process is; a bare pid is never trusted.
struct ProcessId {
  std::string boot_id;
  pid_t pid = 0;
  uint64_t start_ticks = 0;  ///< field 22 of /proc/PID/stat
  bool operator==(const ProcessId&) const = default;
};
std::string boot_id();
/// nullopt when there is no such process (or it is a zombie).
std::optional<ProcessId> identify(pid_t pid);
bool alive(const ProcessId& id);
/// Resident bytes; 0 when gone.
uint64_t resident_bytes(pid_t pid);

struct SpawnOptions {
  std::vector<std::string> argv;           ///< argv[0] is the path
  std::map<std::string, std::string> env;  ///< the whole environment
  std::string config;                      ///< delivered on descriptor 3 (a pipe or memfd), then end of file
  bool new_session = true;                 ///< own process group, so that the whole group can be signalled
  bool die_with_parent = false;            ///< PR_SET_PDEATHSIG SIGKILL
  bool capture_output = true;              ///< stderr and stdout into `output`
  int output_fd = -1;  ///< stderr and stdout go to this descriptor instead (a log file); wins over capture_output
};
struct Child {
  ProcessId id;
  UniqueFd pidfd;   ///< readable when it has exited; empty where the kernel has none
  UniqueFd output;  ///< read end, non-blocking
};
/// Throws Error(not_found/unavailable) when the program cannot be started (exec failures are reported, not only
/// fork's).
Child spawn(const SpawnOptions& options);
struct ExitStatus {
  int code = 0;
  int signal = 0;
};
/// nullopt while it runs.
std::optional<ExitStatus> try_wait(pid_t pid);
/// Waits; nullopt at the deadline.
std::optional<ExitStatus> wait_until(pid_t pid, std::chrono::steady_clock::time_point deadline);
/// Signals the process group if the leader still is who it was; false when it is gone.
bool signal_group(const ProcessId& id, int signal);
/// Raises the soft limit of open descriptors to the hard one (servers with thousands of connections); returns the
/// limit.
uint64_t raise_descriptor_limit();
/// Folder of the running executable.
std::string executable_dir();

}  // namespace glm53
