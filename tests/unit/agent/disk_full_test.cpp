// A full disk under paths.state, with a real small file system: one clear line, and nothing is lost.
#include <fcntl.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/mount.h>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "tests/unit/agent/cluster.h"

using namespace glm53;
using test::eventually;
using test::kRunning;
using test::TestCluster;
using Json = nlohmann::ordered_json;

namespace {

/// A file system of that size at a folder, while it lives.
class SmallDisk {
 public:
  SmallDisk(std::string at, const char* size) : at_(std::move(at)) {
    mounted_ = ::mount("tmpfs", at_.c_str(), "tmpfs", 0, cat("size=", std::string_view(size)).c_str()) == 0;
  }
  ~SmallDisk() { unmount(); }
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;
  bool mounted() const { return mounted_; }
  void unmount() {
    if (mounted_) CHECK(::umount2(at_.c_str(), MNT_DETACH) == 0);
    mounted_ = false;
  }
  /// Takes the last byte.
  void fill() const {
    const UniqueFd fd(::open((at_ + "/filler").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    REQUIRE(fd);
    const std::string piece(4096, 'x');
    while (::write(fd.get(), piece.data(), piece.size()) > 0) {
    }
  }
  void free() const { REQUIRE(::unlink((at_ + "/filler").c_str()) == 0); }

 private:
  const std::string at_;
  bool mounted_ = false;
};

}  // namespace

TEST_CASE(
    "disk full: what cannot be recorded is refused in one line, what serves serves on, and it goes on by itself") {
  TestCluster c(false);
  c.end_head();
  SmallDisk disk(c.dir() / "head/state", "300m");
  if (!disk.mounted()) {
    MESSAGE("left out: file systems cannot be mounted here");
    c.start_head();
    return;
  }
  c.start_head();
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  const pid_t rank = c.pid("rank0");
  disk.fill();

  const Json refused = c.put({{"state", "stopped"}, {"drain_ms", 0}}, 503);
  CHECK(refused["error"]["message"].get<std::string>().starts_with("E230 the disk of paths.state is full"));
  CHECK(refused["error"]["remedy"].get<std::string>().starts_with("make room there"));
  CHECK(c.get("/status")["cluster"]["wanted"] == "running");
  CHECK(c.state() == "up");
  CHECK(c.pid("rank0") == rank);

  // Not even the agent's own end and start change that.
  disk.free();
  c.end_head();
  disk.fill();
  disk.free();
  c.start_head();
  CHECK(eventually([&] { return c.state() == "up"; }));
  CHECK(c.get("/status")["cluster"]["wanted"] == "running");
  CHECK(c.pid("rank0") == rank);
  c.put({{"state", "stopped"}, {"drain_ms", 0}}, 202);
  REQUIRE(c.reaches("down"));
  c.end_head();
  disk.unmount();
  c.start_head();
}
