#include "agent/preflight/fabric.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "common/strings.h"

namespace glm53::preflight {
namespace {

constexpr int kMostGids = 256;
constexpr const char* kBase = "/sys/class/infiniband/";

/// "0000:0000:0000:0000:0000:ffff:0a00:0001", as sysfs writes ::ffff:10.0.0.1.
std::string mapped(uint32_t address) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "0000:0000:0000:0000:0000:ffff:%04x:%04x", address >> 16, address & 0xffff);
  return text.data();
}

bool empty_slot(const std::string& gid) {
  return std::all_of(gid.begin(), gid.end(), [](char c) { return c == '0' || c == ':'; });
}

bool fits(const GidEntry& entry, const std::string& netdev, uint32_t address) {
  const bool here = entry.netdev == netdev || entry.netdev.starts_with(netdev + ".");
  return entry.type == "RoCE v2" && here && entry.gid == mapped(address);
}

bool fits_all(std::span<const HcaUse> uses, int index) {
  return std::all_of(uses.begin(), uses.end(), [&](const HcaUse& use) {
    return std::any_of(use.hca->gids.begin(), use.hca->gids.end(),
                       [&](const GidEntry& e) { return e.index == index && fits(e, use.hca->netdev, use.address); });
  });
}

std::string where_it_is(const HcaUse& use) {
  const auto at = choose_gid(*use.hca, use.hca->netdev, use.address);
  return cat(use.hca->name, " has ", ipv4_text(use.address), at ? cat(" at index ", *at) : std::string(" nowhere"));
}

std::string netdev_of(const FileRoot& root, const std::string& hca) {
  const auto net = root.list(cat(std::string_view(kBase), hca, "/device/net"));
  if (!net.empty()) return net.front();
  return root.text(cat(std::string_view(kBase), hca, "/ports/1/gid_attrs/ndevs/0")).value_or("");
}

}  // namespace

std::vector<Hca> hcas(const FileRoot& root) {
  std::vector<Hca> out;
  for (const std::string& device : root.list("/sys/class/infiniband")) {
    Hca hca;
    hca.name = device;
    hca.netdev = netdev_of(root, device);
    const std::string port = cat(std::string_view(kBase), device, "/ports/1");
    hca.active = root.text(port + "/state").value_or("").find("ACTIVE") != std::string::npos;
    for (int i = 0; i < kMostGids; ++i) {
      const auto gid = root.text(cat(port, "/gids/", i));
      const auto type = root.text(cat(port, "/gid_attrs/types/", i));
      if (!gid || !type || empty_slot(*gid)) continue;
      hca.gids.push_back({i, *gid, *type, root.text(cat(port, "/gid_attrs/ndevs/", i)).value_or("")});
    }
    out.push_back(std::move(hca));
  }
  return out;
}

std::optional<int> choose_gid(const Hca& hca, const std::string& netdev, uint32_t address) {
  for (const GidEntry& entry : hca.gids) {
    if (fits(entry, netdev, address)) return entry.index;
  }
  return std::nullopt;
}

GidChoice common_gid(std::span<const HcaUse> uses, std::optional<int> pinned) {
  std::string table;
  for (const HcaUse& use : uses) table += (table.empty() ? "" : "; ") + where_it_is(use);
  if (pinned) {
    if (!uses.empty() && fits_all(uses, *pinned)) return {pinned, {}, {}};
    return {std::nullopt,
            cat("NCCL_IB_GID_INDEX=", *pinned, " is no RoCE v2 entry of the fabric address (", table, ")"),
            "leave NCCL_IB_GID_INDEX out of the agent's environment, or set the index named here"};
  }
  for (int i = 0; i < kMostGids; ++i) {
    if (!uses.empty() && fits_all(uses, i)) return {i, {}, {}};
  }
  const bool moved = std::any_of(uses.begin(), uses.end(), [](const HcaUse& use) {
    return choose_gid(*use.hca, use.hca->netdev, use.address).has_value();
  });
  // NetworkManager's stable-privacy adds a second link-local address, which pushes the IPv4 entries up after a reboot.
  const char* remedy =
      moved ? "nmcli connection modify NAME ipv6.addr-gen-mode eui64, then unbind and bind mlx5_core (or reboot)"
            : "give the interface its IPv4 address again (the link may have flapped) and look at gid_attrs/types";
  return {std::nullopt, cat("no RoCE v2 GID index fits every HCA: ", table.empty() ? "there is none" : table), remedy};
}

Link link_of(const FileRoot& root, const std::string& netdev) {
  const std::string base = cat("/sys/class/net/", netdev);
  Link link;
  link.operstate = root.text(base + "/operstate").value_or("unknown");
  link.carrier = root.number(base + "/carrier").value_or(0) == 1;
  link.speed = std::max<int64_t>(0, root.number(base + "/speed").value_or(0));
  link.mtu = root.number(base + "/mtu").value_or(0);
  return link;
}

std::vector<RailEnd> rail_ends(const FileRoot& root, std::span<const InterfaceAddress> addresses) {
  std::vector<RailEnd> out;
  for (const Hca& hca : hcas(root)) {
    if (!hca.active) continue;
    for (const InterfaceAddress& a : addresses) {
      if (a.netdev == hca.netdev) out.push_back({hca.name, a.netdev, a.address, a.prefix});
    }
  }
  return out;
}

std::vector<Rail> match_rails(std::span<const RailEnd> head, std::span<const RailEnd> worker) {
  std::vector<Rail> rails;
  std::vector<bool> taken(worker.size(), false);
  for (const RailEnd& h : head) {
    for (size_t i = 0; i < worker.size(); ++i) {
      const RailEnd& w = worker[i];
      const bool reachable = h.prefix == w.prefix && same_subnet(h.address, w.address, h.prefix);
      if (taken[i] || !reachable || h.address == w.address) continue;
      taken[i] = true;
      rails.push_back({h, w});
      break;
    }
  }
  return rails;
}

}  // namespace glm53::preflight
