// What NCCL and Gloo are told of this node's fabric, so that neither guesses an interface.
#pragma once

#include <map>
#include <span>
#include <string>

#include "agent/preflight/facts.h"
#include "agent/preflight/host.h"

namespace glm53::preflight {

/// Variables of a GPU rank whose fabric address is `address` (orchestration §6.2): the interface by its exact name;
/// over RoCE v2 through the active RDMA device of that interface and the GID of that address where there is one, else
/// over sockets. Empty when no interface has the address; preflight says so before.
std::map<std::string, std::string> nccl_environment(const FileRoot& root, std::span<const InterfaceAddress> addresses,
                                                    const std::string& address);

}  // namespace glm53::preflight
