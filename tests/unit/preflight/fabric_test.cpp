// Choice of a GID and of rails, from made-up sysfs trees.
#include "agent/preflight/fabric.h"

#include <doctest/doctest.h>

#include "agent/preflight/nccl_environment.h"
#include "tests/unit/preflight/world.h"

using namespace glm53::preflight;
using glm53::preflight::test::World;

namespace {

constexpr uint32_t kHead = 0x0a000001;
const char* const kMapped = "0000:0000:0000:0000:0000:ffff:0a00:0001";

GidChoice choose(const World& w, std::optional<int> pinned = std::nullopt) {
  const auto devices = hcas(w.root);
  std::vector<HcaUse> uses;
  for (const Hca& h : devices) uses.push_back({&h, kHead});
  return common_gid(uses, pinned);
}

}  // namespace

TEST_CASE("the lowest RoCE v2 entry of the fabric address is taken") {
  World w;
  w.gb10();
  CHECK(choose(w).index == 3);
  w.gid("rocep1s0f0", 7, kMapped);
  CHECK(choose(w).index == 3);
}

TEST_CASE("entries of version 1, other addresses and other interfaces do not count") {
  World w;
  w.hca("rocep1s0f0", "enp1s0f0np0");
  w.gid("rocep1s0f0", 0, kMapped, "IB/RoCE v1");
  w.gid("rocep1s0f0", 1, "0000:0000:0000:0000:0000:ffff:0a00:0002");
  w.gid("rocep1s0f0", 2, kMapped, "RoCE v2", "enp1s0f0np01");
  CHECK_FALSE(choose(w).index.has_value());
  CHECK(choose(w).trouble.find("nowhere") != std::string::npos);
  w.gid("rocep1s0f0", 9, kMapped, "RoCE v2", "enp1s0f0np0.100");  // a VLAN of the interface
  CHECK(choose(w).index == 9);
}

TEST_CASE("a pinned index is held to the same rule") {
  World w;
  w.gb10();
  CHECK(choose(w, 3).index == 3);
  for (const int wrong : {0, 1, 2, 4, 5}) {
    CAPTURE(wrong);
    CHECK_FALSE(choose(w, wrong).index.has_value());
    CHECK(choose(w, wrong).trouble.find("index 3") != std::string::npos);
  }
}

TEST_CASE("several HCAs need one index in common; without one the table and the repair are named") {
  World w;
  w.gb10();
  w.hca("roceP2p1s0f0", "enP2p1s0f0np0");
  w.gid("roceP2p1s0f0", 5, kMapped, "RoCE v2", "enP2p1s0f0np0");
  const GidChoice none = choose(w);
  CHECK_FALSE(none.index.has_value());
  CHECK(none.trouble.find("rocep1s0f0 has 10.0.0.1 at index 3") != std::string::npos);
  CHECK(none.trouble.find("roceP2p1s0f0 has 10.0.0.1 at index 5") != std::string::npos);
  CHECK(none.remedy.find("eui64") != std::string::npos);
  w.gid("rocep1s0f0", 5, kMapped);
  CHECK(choose(w).index == 5);
}

TEST_CASE("rails are pairs in one subnet, each end once") {
  World h, k;
  h.hca("a0", "n0");
  h.hca("a1", "n1");
  h.hca("a2", "n2", false);  // not ACTIVE
  k.hca("b0", "m0");
  k.hca("b1", "m1");
  const std::vector<InterfaceAddress> here{{"n0", 0x0a000001, 24}, {"n1", 0x0a000003, 24}, {"n2", 0x0a000101, 24}};
  std::vector<InterfaceAddress> there{{"m0", 0x0a000002, 24}, {"m1", 0x0a000004, 24}, {"x", 0x0a000009, 24}};
  auto rails = match_rails(rail_ends(h.root, here), rail_ends(k.root, there));
  REQUIRE(rails.size() == 2);  // two interfaces in one subnet are no error
  CHECK(rails[0].head.netdev == "n0");
  CHECK(rails[0].worker.netdev == "m0");
  CHECK(rails[1].worker.hca == "b1");
  there[1].address = 0x0b000004;
  rails = match_rails(rail_ends(h.root, here), rail_ends(k.root, there));
  REQUIRE(rails.size() == 1);
  there[0].prefix = 16;
  CHECK(match_rails(rail_ends(h.root, here), rail_ends(k.root, there)).empty());
}

TEST_CASE("NCCL is told the interface, the device and the GID of the fabric address") {
  World w;
  w.gb10();
  const std::vector<InterfaceAddress> here{
      {"lo", 0x7f000001, 8}, {"wlan0", 0xc0a80105, 24}, {"enp1s0f0np0", kHead, 24}};
  auto env = nccl_environment(w.root, here, "10.0.0.1");
  CHECK(env["NCCL_SOCKET_IFNAME"] == "=enp1s0f0np0");
  CHECK(env["GLOO_SOCKET_IFNAME"] == "enp1s0f0np0");
  CHECK(env["NCCL_NET"] == "IB");
  CHECK(env["NCCL_IB_HCA"] == "=rocep1s0f0");
  CHECK(env["NCCL_IB_GID_INDEX"] == "3");
  // An address without RDMA, and one that nobody has.
  env = nccl_environment(w.root, here, "192.168.1.5");
  CHECK(env["NCCL_SOCKET_IFNAME"] == "=wlan0");
  CHECK(env["NCCL_NET"] == "Socket");
  CHECK(env["NCCL_IB_DISABLE"] == "1");
  CHECK(env.count("NCCL_IB_HCA") == 0);
  CHECK(nccl_environment(w.root, here, "127.0.0.1")["NCCL_SOCKET_IFNAME"] == "=lo");
  CHECK(nccl_environment(w.root, here, "10.9.9.9").empty());
  CHECK(nccl_environment(w.root, here, "head.example").empty());
}
