// What no file tells: addresses, free space, whether a folder can be written, the GPUs. The machine is one
// implementation, tests make up others.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace glm53::preflight {

/// An IPv4 address of an interface.
struct InterfaceAddress {
  std::string netdev;
  uint32_t address = 0;  ///< host byte order
  int prefix = 32;
};
/// nullopt for anything but a dotted IPv4 address.
std::optional<uint32_t> parse_ipv4(const std::string& text);
std::string ipv4_text(uint32_t address);
bool same_subnet(uint32_t a, uint32_t b, int prefix);

struct Space {
  int64_t free = 0;    ///< bytes this user may still write
  int64_t inodes = 0;  ///< -1: the file system does not count them
};

struct GpuProcess {
  int64_t pid = 0;
  int64_t bytes = 0;  ///< 0: unknown
};
struct Gpu {
  std::string name;
  std::optional<bool> persistence;
  std::optional<unsigned> clock_mhz, max_clock_mhz, power_limit_w;
  std::vector<GpuProcess> processes;
};
/// `error` is set when NVML cannot be asked.
struct GpuFacts {
  std::string error, driver;
  std::vector<Gpu> gpus;
};

class Host {
 public:
  virtual ~Host() = default;
  virtual std::vector<InterfaceAddress> addresses() const = 0;
  /// Of the file system that holds the path or its nearest folder that exists; nullopt when there is none.
  virtual std::optional<Space> space(const std::string& path) const = 0;
  /// Creates, locks, links, renames and removes a file there as this user; why it failed, or nothing.
  virtual std::optional<std::string> write_trouble(const std::string& folder) const = 0;
  /// Whether this user may open the file for reading and writing.
  virtual bool can_open(const std::string& path) const = 0;
  virtual GpuFacts gpus() const = 0;
};
std::unique_ptr<Host> this_machine();

/// Through libnvidia-ml.so.1, opened when asked (host_nvml.cpp).
GpuFacts ask_nvml();

}  // namespace glm53::preflight
