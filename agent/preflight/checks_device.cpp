// Checks of GPU and fabric.
#include <algorithm>

#include "agent/preflight/checks.h"
#include "agent/preflight/fabric.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
/// Measured by users of this machine: 610.43 costs about 4 GiB of memory and makes initialising erratic.
constexpr std::string_view kBadDriver = "610.43";

/// The interface of the fabric address.
const InterfaceAddress* fabric_interface(const Context& c) {
  const auto wanted = parse_ipv4(c.subject.fabric_address);
  const auto it = std::find_if(c.addresses.begin(), c.addresses.end(),
                               [&](const InterfaceAddress& a) { return a.address == wanted; });
  return it == c.addresses.end() ? nullptr : &*it;
}

bool no_interface(const Context& c, Result& r) {
  if (fabric_interface(c) != nullptr) return false;
  std::string seen;
  for (const Hca& hca : hcas(c.files)) {
    seen += cat(seen.empty() ? "" : ", ", hca.name, " on ", hca.netdev, hca.active ? " (ACTIVE)" : " (not active)");
  }
  fail(r,
       cat("no interface has the fabric address ", c.subject.fabric_address,
           "; RDMA devices: ", seen.empty() ? std::string("none") : seen),
       cat("set ", c.subject.node, ".fabric_address to the address of the ConnectX-7 interface"));
  return true;
}

bool no_gpu(const Context& c, Result& r) {
  if (!c.gpus.gpus.empty()) return false;
  skip(r, "no GPU can be asked (see gpu)");
  return true;
}

}  // namespace

void check_gpu(const Context& c, Result& r) {
  if (c.gpus.gpus.empty()) {
    fail(r,
         cat("no GPU visible (NVML: ", c.gpus.error.empty() ? std::string("it counts no device") : c.gpus.error, ")"),
         "install NVIDIA's driver and reboot after an update of it, or set engine.backend = \"cpu\"");
    return;
  }
  std::string names;
  for (const Gpu& g : c.gpus.gpus) names += (names.empty() ? "" : ", ") + g.name;
  r.measured = names;
  const int count = static_cast<int>(c.gpus.gpus.size());
  const int last = *std::max_element(c.subject.devices.begin(), c.subject.devices.end());
  if (last >= count) {
    fail(r, cat("topology.ranks names device ", last, "; there are ", count, " (", names, ")"),
         cat("number the devices from 0 to ", count - 1));
  } else if (names.find("GB10") == std::string::npos) {
    warn(r, cat(names, " is no GB10"), "expect other speed and memory than the documents give");
  }
}

void check_driver(const Context& c, Result& r) {
  if (no_gpu(c, r)) return;
  r.measured = cat("driver ", c.gpus.driver.empty() ? std::string("unknown") : c.gpus.driver);
  if (c.gpus.driver.starts_with(kBadDriver)) {
    warn(r, cat(r.measured, " is known to cost about 4 GiB and to make initialising erratic"), "install a 580 driver");
  }
}

void check_persistence(const Context& c, Result& r) {
  if (no_gpu(c, r)) return;
  const bool off = std::any_of(c.gpus.gpus.begin(), c.gpus.gpus.end(),
                               [](const Gpu& g) { return g.persistence.has_value() && !*g.persistence; });
  r.measured = off ? "persistence mode is off" : "persistence mode is on or has no switch";
  if (off) warn(r, r.measured, "enable nvidia-persistenced");
}

void check_xid(const Context& c, Result& r) {
  const auto lines = xid_lines(c.files);
  if (!lines) {
    skip(r, "no kernel log that this user may read");
    return;
  }
  r.measured = "no Xid in the kernel's log";
  if (lines->empty()) return;
  warn(r, cat(lines->size(), " Xid in the kernel's log, the last: ", lines->back()),
       "reboot; if it returns, look the number up in NVIDIA's Xid list");
}

void check_foreign_gpu_use(const Context& c, Result& r) {
  if (no_gpu(c, r)) return;
  std::string found;
  for (const Gpu& g : c.gpus.gpus) {
    for (const GpuProcess& p : g.processes) {
      if (c.is_own(p.pid)) continue;
      const std::string name = c.files.text(cat("/proc/", p.pid, "/comm")).value_or("?");
      const std::string size = p.bytes > 0 ? human_bytes(p.bytes) : std::string("an unknown amount");
      found += cat(found.empty() ? "" : "; ", "pid ", p.pid, " ", name, " holds ", size, " of GPU memory");
    }
  }
  r.measured = "no other process uses the GPU";
  if (!found.empty()) fail(r, found, "end these processes");
}

void check_link(const Context& c, Result& r) {
  if (no_interface(c, r)) return;
  const InterfaceAddress& own = *fabric_interface(c);
  const Link link = link_of(c.files, own.netdev);
  r.measured = cat(own.netdev, " is ", link.operstate, ", ", link.speed, " Mb/s, MTU ", link.mtu);
  if (link.operstate != "up" || !link.carrier) {
    fail(r, cat(own.netdev, " is ", link.operstate, link.carrier ? "" : " and has no carrier"),
         "plug the cable in at both ends; ip link set DEVICE up");
  } else if (link.mtu < 9000) {
    warn(r, r.measured, "set MTU 9000 on both nodes");
  }
}

void check_rdma(const Context& c, Result& r) {
  if (no_interface(c, r)) return;
  const std::string netdev = fabric_interface(c)->netdev;
  const auto devices = hcas(c.files);
  const auto hca = std::find_if(devices.begin(), devices.end(), [&](const Hca& h) { return h.netdev == netdev; });
  if (hca == devices.end()) {
    fail(r, cat("no RDMA device belongs to ", netdev), "load mlx5_ib, or use the ConnectX-7 interface");
    return;
  }
  if (!hca->active) {
    fail(r, cat("port 1 of ", hca->name, " (", netdev, ") is not ACTIVE"), "see fabric_link");
    return;
  }
  std::string verbs;
  for (const std::string& name : c.files.list("/dev/infiniband")) {
    if (!name.starts_with("uverbs")) continue;
    if (!c.host.can_open(c.files.at("/dev/infiniband/" + name))) {
      fail(r, cat("/dev/infiniband/", name, " cannot be opened by this user"), "give the agent's user the group rdma");
      return;
    }
    verbs = name;
  }
  r.measured = cat(hca->name, " on ", netdev, " is ACTIVE, ", verbs);
  if (verbs.empty()) fail(r, "there is no /dev/infiniband/uverbs*", "load ib_uverbs");
}

void check_memlock(const Context& c, Result& r) {
  const auto limit = limit_of(c.files, "Max locked memory");
  if (!limit) {
    skip(r, "/proc/self/limits cannot be read");
    return;
  }
  r.measured = *limit < 0 ? "locked memory is unlimited" : cat("locked memory is limited to ", human_bytes(*limit));
  if (*limit >= 0 && *limit < kGiB) fail(r, r.measured, "LimitMEMLOCK=infinity in the agent's unit");
}

void check_gid(const Context& c, Result& r) {
  if (no_interface(c, r)) return;
  const InterfaceAddress& own = *fabric_interface(c);
  const auto devices = hcas(c.files);
  std::vector<HcaUse> uses;
  for (const Hca& h : devices) {
    if (h.netdev == own.netdev) uses.push_back({&h, own.address});
  }
  const GidChoice choice = common_gid(uses, c.pinned_gid);
  if (!choice.index) {
    fail(r, choice.trouble, choice.remedy);
    return;
  }
  r.measured =
      cat("RoCE v2 GID of ", ipv4_text(own.address), " on ", uses.front().hca->name, " at index ", *choice.index);
}

}  // namespace glm53::preflight
