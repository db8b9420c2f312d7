// The RDMA devices of a node, the choice of a GID, and the rails between two nodes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "agent/preflight/facts.h"
#include "agent/preflight/host.h"

namespace glm53::preflight {

struct GidEntry {
  int index = 0;
  std::string gid, type, netdev;  ///< "0000:…:ffff:0a00:0001", "RoCE v2", "enp1s0f0np0"
};
/// Port 1 of an RDMA device (a ConnectX-7 has one port a function).
struct Hca {
  std::string name, netdev;  ///< "rocep1s0f0" and the interface it is a function of
  bool active = false;
  std::vector<GidEntry> gids;  ///< without empty slots
};
/// /sys/class/infiniband; empty when there is none.
std::vector<Hca> hcas(const FileRoot& root);
/// The lowest index whose entry is RoCE v2, on `netdev` or a VLAN of it, and the IPv4-mapped form of `address`.
std::optional<int> choose_gid(const Hca& hca, const std::string& netdev, uint32_t address);

/// One HCA of a rank with the address it serves.
struct HcaUse {
  const Hca* hca = nullptr;
  uint32_t address = 0;
};
struct GidChoice {
  std::optional<int> index;
  std::string trouble, remedy;  ///< when there is none
};
/// NCCL takes one index for all HCAs of a rank: the lowest that fits each of them. `pinned` (NCCL_IB_GID_INDEX) is
/// checked by the same rule.
GidChoice common_gid(std::span<const HcaUse> uses, std::optional<int> pinned = std::nullopt);

struct Link {
  std::string operstate;
  bool carrier = false;
  int64_t speed = 0;  ///< Mb/s; 0: unknown
  int64_t mtu = 0;
};
Link link_of(const FileRoot& root, const std::string& netdev);

/// A netdev that backs an ACTIVE RDMA port and has an IPv4 address.
struct RailEnd {
  std::string hca, netdev;
  uint32_t address = 0;
  int prefix = 32;
};
std::vector<RailEnd> rail_ends(const FileRoot& root, std::span<const InterfaceAddress> addresses);
struct Rail {
  RailEnd head, worker;
};
/// Pairs in one subnet, each end in at most one pair, in the order of the head's ends. Whether they reach each other is
/// another question.
std::vector<Rail> match_rails(std::span<const RailEnd> head, std::span<const RailEnd> worker);

}  // namespace glm53::preflight
