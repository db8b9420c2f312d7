// NVIDIA's NCCL, opened when it is needed: a program built for GPUs also runs where it is not installed.
#pragma once

#include <memory>
#include <nccl.h>
#include <string>
#include <string_view>

namespace glm53 {

/// The functions that the communicator calls, and the library that they belong to.
class NcclLibrary {
 public:
  /// Opens libnccl.so.2. Throws Error(unavailable) when it is missing, or older than what is called here.
  NcclLibrary();
  NcclLibrary(const NcclLibrary&) = delete;
  NcclLibrary& operator=(const NcclLibrary&) = delete;

  int version() const { return version_; }
  /// "2.28.9" of 22809.
  std::string version_text() const;
  /// Throws Error(fabric) naming the call unless the status is success or "in progress".
  void check(ncclResult_t status, std::string_view what) const;

  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;

 private:
  struct Close {
    void operator()(void* handle) const noexcept;
  };
  template <class F>
  void find(F& function, const char* name);

  std::unique_ptr<void, Close> handle_;
  int version_ = 0;
};

}  // namespace glm53
