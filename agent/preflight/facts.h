// What the kernel tells through files, below a root that tests make up.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::preflight {

/// Reads below one folder; "/" is the machine. Nothing here throws for a file that is not there.
class FileRoot {
 public:
  explicit FileRoot(std::string root = "/") : root_(std::move(root)) {}
  /// Trimmed content of at most 4 MiB; nullopt when it cannot be read (an empty slot of a GID table answers EINVAL).
  std::optional<std::string> text(const std::string& path) const;
  std::optional<int64_t> number(const std::string& path) const;
  /// Sorted names in a folder; empty when there is none.
  std::vector<std::string> list(const std::string& path) const;
  bool exists(const std::string& path) const;
  /// Where a symbolic link points to; nullopt when it is none.
  std::optional<std::string> link(const std::string& path) const;
  /// The path on this machine.
  std::string at(std::string_view path) const;

 private:
  std::string root_;
};

/// Of /proc/meminfo and the memory cgroups, in bytes.
struct Memory {
  int64_t total = 0, available = 0;
  bool limited = false;  ///< a cgroup allows less than the machine has
};
std::optional<Memory> memory(const FileRoot& root);

struct Consumer {
  int64_t pid = 0;
  std::string name;
  int64_t resident = 0;  ///< bytes
};
/// The processes with the most resident memory, largest first.
std::vector<Consumer> biggest_consumers(const FileRoot& root, size_t count);

/// Who listens on a TCP port.
struct Listener {
  uint64_t inode = 0;
  std::optional<int64_t> pid;  ///< nullopt: not visible to this user
  std::string name;            ///< of the process
};
/// A listener that keeps others from this port of an IPv4 address (host byte order; 0: any address).
std::optional<Listener> listener_of(const FileRoot& root, uint16_t port, uint32_t address = 0);

struct Mount {
  std::string point, type;
};
/// The mount that holds a path (/proc/self/mountinfo).
std::optional<Mount> mount_of(const FileRoot& root, const std::string& path);

/// Soft limit of a line in /proc/self/limits ("Max locked memory"); -1: unlimited; nullopt: not found.
std::optional<int64_t> limit_of(const FileRoot& root, std::string_view line);

/// Lines of the kernel's log with "NVRM: Xid" in them, from /var/log/kern.log or /var/log/dmesg; nullopt when neither
/// can be read.
std::optional<std::vector<std::string>> xid_lines(const FileRoot& root);

}  // namespace glm53::preflight
