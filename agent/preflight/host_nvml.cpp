// NVML, opened when asked: machines without a GPU have none. Declarations follow NVIDIA's public nvml.h (API v2/v3).
#include <array>
#include <dlfcn.h>
#include <memory>

#include "agent/preflight/host.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

using Device = void*;
struct NvmlProcess {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
constexpr int kSuccess = 0;
constexpr unsigned kClockSm = 1;
constexpr unsigned long long kUnknownMemory = ~0ULL;
constexpr size_t kMostProcesses = 256;
constexpr unsigned kNameBytes = 96;

class Library {
 public:
  Library() : handle_(::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {}
  ~Library() {
    if (initialised_) call<int (*)()>("nvmlShutdown");
    if (handle_ != nullptr) ::dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  /// Empty when NVML answers.
  std::string start() {
    if (handle_ == nullptr) return "libnvidia-ml.so.1 is not installed";
    const int code = call<int (*)()>("nvmlInit_v2");
    initialised_ = code == kSuccess;
    return initialised_ ? "" : text(code);
  }

  std::string text(int code) const {
    const auto describe = symbol<const char* (*)(int)>("nvmlErrorString");
    return describe == nullptr ? cat("NVML error ", code) : std::string(describe(code));
  }

  /// The function's status; -1 when this NVML has no such function.
  template <class F, class... A>
  int call(const char* function, A... arguments) const {
    const auto f = symbol<F>(function);
    return f == nullptr ? -1 : f(arguments...);
  }

 private:
  template <class F>
  F symbol(const char* function) const {
    // dlsym answers an object pointer; POSIX defines this conversion.
    return handle_ == nullptr ? nullptr : reinterpret_cast<F>(::dlsym(handle_, function));
  }
  void* handle_;
  bool initialised_ = false;
};

std::optional<unsigned> number(const Library& nvml, const char* function, Device device) {
  unsigned value = 0;
  const int code = nvml.call<int (*)(Device, unsigned*)>(function, device, &value);
  return code == kSuccess ? std::optional(value) : std::nullopt;
}

std::optional<unsigned> clock(const Library& nvml, const char* function, Device device) {
  unsigned value = 0;
  const int code = nvml.call<int (*)(Device, unsigned, unsigned*)>(function, device, kClockSm, &value);
  return code == kSuccess ? std::optional(value) : std::nullopt;
}

Gpu ask_device(const Library& nvml, Device device) {
  Gpu gpu;
  std::array<char, kNameBytes> text{};
  if (nvml.call<int (*)(Device, char*, unsigned)>("nvmlDeviceGetName", device, text.data(), kNameBytes) == kSuccess) {
    gpu.name = text.data();
  }
  if (const auto mode = number(nvml, "nvmlDeviceGetPersistenceMode", device)) gpu.persistence = *mode != 0;
  gpu.clock_mhz = clock(nvml, "nvmlDeviceGetClockInfo", device);
  gpu.max_clock_mhz = clock(nvml, "nvmlDeviceGetMaxClockInfo", device);
  if (const auto mw = number(nvml, "nvmlDeviceGetPowerManagementLimit", device)) gpu.power_limit_w = *mw / 1000;
  std::array<NvmlProcess, kMostProcesses> processes{};
  unsigned count = kMostProcesses;
  const int code = nvml.call<int (*)(Device, unsigned*, NvmlProcess*)>("nvmlDeviceGetComputeRunningProcesses_v3",
                                                                       device, &count, processes.data());
  if (code != kSuccess) return gpu;
  for (unsigned i = 0; i < count && i < kMostProcesses; ++i) {
    const NvmlProcess& p = processes[i];
    gpu.processes.push_back({p.pid, p.used == kUnknownMemory ? 0 : static_cast<int64_t>(p.used)});
  }
  return gpu;
}

}  // namespace

GpuFacts ask_nvml() {
  GpuFacts facts;
  Library nvml;
  facts.error = nvml.start();
  if (!facts.error.empty()) return facts;
  std::array<char, kNameBytes> text{};
  if (nvml.call<int (*)(char*, unsigned)>("nvmlSystemGetDriverVersion", text.data(), kNameBytes) == kSuccess) {
    facts.driver = text.data();
  }
  unsigned count = 0;
  if (const int code = nvml.call<int (*)(unsigned*)>("nvmlDeviceGetCount_v2", &count); code != kSuccess) {
    facts.error = nvml.text(code);
    return facts;
  }
  for (unsigned i = 0; i < count; ++i) {
    Device device = nullptr;
    const int code = nvml.call<int (*)(unsigned, Device*)>("nvmlDeviceGetHandleByIndex_v2", i, &device);
    if (code != kSuccess) {
      facts.error = cat("device ", i, ": ", nvml.text(code));
      return facts;
    }
    facts.gpus.push_back(ask_device(nvml, device));
  }
  return facts;
}

}  // namespace glm53::preflight
