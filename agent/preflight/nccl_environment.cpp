#include "agent/preflight/nccl_environment.h"

#include <algorithm>

#include "agent/preflight/fabric.h"

namespace glm53::preflight {

std::map<std::string, std::string> nccl_environment(const FileRoot& root, std::span<const InterfaceAddress> addresses,
                                                    const std::string& address) {
  const auto wanted = parse_ipv4(address);
  const auto at = std::find_if(addresses.begin(), addresses.end(),
                               [&](const InterfaceAddress& a) { return wanted && a.address == *wanted; });
  if (at == addresses.end()) return {};
  std::map<std::string, std::string> env{
      {"NCCL_SOCKET_IFNAME", "=" + at->netdev},  // = : this one, not all that begin so
      {"GLOO_SOCKET_IFNAME", at->netdev},
      {"NCCL_NET_PLUGIN", "none"},
      // Multicast and memory that is mapped by handles gain nothing on two machines.
      {"NCCL_NVLS_ENABLE", "0"},
      {"NCCL_CUMEM_ENABLE", "0"},
      {"NCCL_IGNORE_CPU_AFFINITY", "1"},
      {"NCCL_DEBUG", "WARN"}};
  const std::vector<Hca> all = hcas(root);
  const auto hca =
      std::find_if(all.begin(), all.end(), [&](const Hca& h) { return h.active && h.netdev == at->netdev; });
  const auto gid = hca == all.end() ? std::nullopt : choose_gid(*hca, at->netdev, *wanted);
  if (!gid) {
    env["NCCL_IB_DISABLE"] = "1";
    env["NCCL_NET"] = "Socket";
    return env;
  }
  env["NCCL_IB_DISABLE"] = "0";
  env["NCCL_NET"] = "IB";
  env["NCCL_IB_HCA"] = "=" + hca->name;
  env["NCCL_IB_GID_INDEX"] = std::to_string(*gid);
  env["NCCL_IB_ROCE_VERSION_NUM"] = "2";
  env["NCCL_IB_MERGE_NICS"] = "0";
  env["NCCL_CROSS_NIC"] = "0";
  return env;
}

}  // namespace glm53::preflight
