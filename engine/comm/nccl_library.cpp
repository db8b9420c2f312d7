#include "engine/comm/nccl_library.h"

#include <dlfcn.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr int kOldest = 21800;  // communicators that do not block came before; this one also aborts reliably
constexpr std::string_view kRemedy = "install NVIDIA's NCCL 2.18 or newer (libnccl2) on every node";

std::string text_of(const char* text) {
  return text != nullptr ? text : "no reason given";
}

}  // namespace

void NcclLibrary::Close::operator()(void* handle) const noexcept {
  ::dlclose(handle);
}

template <class F>
void NcclLibrary::find(F& function, const char* name) {
  function = reinterpret_cast<F>(::dlsym(handle_.get(), name));
  if (function == nullptr) throw Error(Code::unavailable, cat("libnccl.so.2 has no ", name), std::string(kRemedy));
}

NcclLibrary::NcclLibrary() : handle_(::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) {
  if (!handle_) throw Error(Code::unavailable, text_of(::dlerror()), std::string(kRemedy));
  decltype(&ncclGetVersion) get_version = nullptr;
  find(get_version, "ncclGetVersion");
  if (get_version(&version_) != ncclSuccess || version_ < kOldest)
    throw Error(Code::unavailable, cat("libnccl.so.2 is of version ", version_text(), ", too old"),
                std::string(kRemedy));
  find(get_unique_id, "ncclGetUniqueId");
  find(comm_init, "ncclCommInitRankConfig");
  find(comm_abort, "ncclCommAbort");
  find(async_error, "ncclCommGetAsyncError");
  find(error_string, "ncclGetErrorString");
  find(last_error, "ncclGetLastError");
  find(all_reduce, "ncclAllReduce");
  find(all_gather, "ncclAllGather");
  find(broadcast, "ncclBroadcast");
  find(send, "ncclSend");
  find(recv, "ncclRecv");
  find(group_start, "ncclGroupStart");
  find(group_end, "ncclGroupEnd");
}

std::string NcclLibrary::version_text() const {
  return cat(version_ / 10000, ".", version_ / 100 % 100, ".", version_ % 100);
}

void NcclLibrary::check(ncclResult_t status, std::string_view what) const {
  if (status == ncclSuccess || status == ncclInProgress) return;
  throw Error(Code::fabric,
              cat("NCCL: ", what, ": ", text_of(error_string(status)), " (", text_of(last_error(nullptr)), ")"),
              "NCCL_DEBUG=INFO in the ranks' environment tells more");
}

}  // namespace glm53
