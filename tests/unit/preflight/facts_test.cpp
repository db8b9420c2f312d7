// Facts of the kernel, from files made up.
#include "agent/preflight/facts.h"

#include <doctest/doctest.h>

#include "tests/unit/preflight/world.h"

using namespace glm53::preflight;
using glm53::preflight::test::World;

TEST_CASE("memory is the machine's, or less where a cgroup says so") {
  World w;
  CHECK(memory(w.root)->available == int64_t{120'000'000} * 1024);
  CHECK_FALSE(memory(w.root)->limited);
  SUBCASE("version 2, on a parent") {
    w.file("/proc/self/cgroup", "0::/a/b\n");
    w.file("/sys/fs/cgroup/a/b/memory.max", "max\n");
    w.file("/sys/fs/cgroup/a/b/memory.current", "5\n");
    w.file("/sys/fs/cgroup/a/memory.max", "1000000\n");
    w.file("/sys/fs/cgroup/a/memory.current", "400000\n");
  }
  SUBCASE("version 1") {
    w.file("/proc/self/cgroup", "3:cpu,memory:/a\n2:cpuset:/z\n");
    w.file("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000000\n");
    w.file("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "400000\n");
  }
  CHECK(memory(w.root)->available == 600'000);
  CHECK(memory(w.root)->total == 1'000'000);
  CHECK(memory(w.root)->limited);
  w.remove("/proc/meminfo");
  CHECK_FALSE(memory(w.root).has_value());
}

TEST_CASE("the owner of a port is found through its socket") {
  World w;
  const char* head =
      "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
  // 0x22B8 = 8888; the first line is a connection (01), not a listener.
  w.file("/proc/net/tcp", std::string(head) +
                              "   0: 0100007F:22B8 0100007F:9999 01 00000000:00000000 00:00000000 00000000 0 0 11 1\n"
                              "   1: 0100007F:22B8 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77 1\n");
  CHECK_FALSE(listener_of(w.root, 8889).has_value());
  REQUIRE(listener_of(w.root, 8888).has_value());
  CHECK_FALSE(listener_of(w.root, 8888)->pid.has_value());
  w.link("/proc/2210/fd/5", "socket:[77]");
  w.file("/proc/2210/comm", "jupyter-lab\n");
  CHECK(listener_of(w.root, 8888)->pid == 2210);
  CHECK(listener_of(w.root, 8888)->name == "jupyter-lab");
  CHECK(listener_of(w.root, 8888, 0x7f000001).has_value());
  CHECK_FALSE(listener_of(w.root, 8888, 0x7f000002).has_value());  // another address has its own ports
}

TEST_CASE("a path belongs to the deepest mount, of two the later") {
  World w;
  w.file("/proc/self/mountinfo",
         "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 8:2 / /data rw shared:1 - xfs /dev/sdb rw\n"
         "3 2 0:9 / /data/a\\040b rw - tmpfs t rw\n4 2 0:9 / /data/a\\040b rw - nfs4 h:/x rw\nshort line\n");
  CHECK(mount_of(w.root, "/database")->type == "ext4");
  CHECK(mount_of(w.root, "/data/x")->type == "xfs");
  CHECK(mount_of(w.root, "/data/a b/c")->type == "nfs4");
}

TEST_CASE("limits and Xid lines") {
  World w;
  CHECK(limit_of(w.root, "Max locked memory") == -1);
  CHECK(limit_of(w.root, "Max open files") == 1048576);
  CHECK_FALSE(limit_of(w.root, "Max nonsense").has_value());
  CHECK(xid_lines(w.root)->empty());
  w.file("/var/log/kern.log", "a\nNVRM: Xid (PCI:000f): 79, GPU has fallen off\n");
  CHECK(xid_lines(w.root)->size() == 1);
}

TEST_CASE("the biggest consumers come first") {
  World w;
  for (const auto& [pid, kib] : {std::pair{"10", "300"}, {"11", "900"}, {"12", "600"}}) {
    w.file(std::string("/proc/") + pid + "/status", std::string("Name: x\nVmRSS:\t") + kib + " kB\n");
    w.file(std::string("/proc/") + pid + "/comm", std::string("p") + pid + "\n");
  }
  const auto top = biggest_consumers(w.root, 2);
  REQUIRE(top.size() == 2);
  CHECK(top[0].name == "p11");
  CHECK(top[1].resident == 600 * 1024);
}
