// A machine made of files in a temporary folder, and what no file tells beside it.
#pragma once

#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "agent/preflight/preflight.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

namespace glm53::preflight::test {

struct FakeHost final : Host {
  std::vector<InterfaceAddress> list{{"lo", 0x7f000001, 8}};
  Space free{int64_t{100} << 30, 1'000'000};
  std::map<std::string, std::string> unwritable;  ///< folder -> why
  std::set<std::string> closed;                   ///< files that cannot be opened
  GpuFacts gpu{"libnvidia-ml.so.1 is not installed", "", {}};

  std::vector<InterfaceAddress> addresses() const override { return list; }
  std::optional<Space> space(const std::string&) const override { return free; }
  std::optional<std::string> write_trouble(const std::string& folder) const override {
    const auto it = unwritable.find(folder);
    return it == unwritable.end() ? std::nullopt : std::optional(it->second);
  }
  bool can_open(const std::string& path) const override { return !closed.contains(path); }
  GpuFacts gpus() const override { return gpu; }
};

class World {
 public:
  World() : root(dir.path()) {
    file("/proc/meminfo", "MemTotal: 127600000 kB\nMemFree: 1 kB\nMemAvailable: 120000000 kB\n");
    file("/proc/self/mountinfo", "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n");
    file("/proc/self/limits",
         "Limit Soft Hard Units\nMax open files            1048576 1048576 files\n"
         "Max locked memory         unlimited unlimited bytes\n");
    file("/var/log/kern.log", "NVRM: loading\n");
    file("/engine", "#!/bin/sh\n");
    std::filesystem::permissions(dir / "engine", std::filesystem::perms::owner_all);
    checkpoint("/model", {"model-00001.safetensors", "model-00002.safetensors"});
    subject.node = "head";
    subject.backend = "cuda";
    subject.devices = {0};
    subject.ranks = subject.nodes = 2;
    subject.fabric_address = "10.0.0.1";
    subject.state_dir = "/state";
    subject.run_dir = "/run";
    subject.logs_dir = "/logs";
    subject.engine = "/engine";
    subject.model = "/model";
    subject.api_port = 8888;
    subject.ranks_port = 29521;
    subject.hash = "0123456789abcdef";
  }
  void file(const std::string& path, const std::string& content) {
    make_dirs(std::filesystem::path(dir.path() + path).parent_path());
    write_file(dir.path() + path, content);
  }
  void link(const std::string& path, const std::string& target) {
    make_dirs(std::filesystem::path(dir.path() + path).parent_path());
    std::filesystem::create_symlink(target, dir.path() + path);
  }
  void remove(const std::string& path) { std::filesystem::remove_all(dir.path() + path); }
  /// A safetensors file whose header wants four bytes of data.
  void shard(const std::string& path, size_t data = 4) {
    const std::string header = R"({"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
    std::string bytes(8, '\0');
    bytes[0] = static_cast<char>(header.size());
    file(path, bytes + header + std::string(data, 'x'));
  }
  void checkpoint(const std::string& folder, const std::vector<std::string>& shards) {
    std::string map;
    for (const auto& name : shards) {
      map += cat(map.empty() ? "" : ",", "\"t", name, "\":\"", name, "\"");
      shard(folder + "/" + name);
    }
    file(folder + "/model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
    file(folder + "/config.json", "{}");
    file(folder + "/tokenizer.json", "{}");
  }
  void gid(const std::string& hca, int index, const std::string& value, const std::string& type = "RoCE v2",
           const std::string& netdev = "enp1s0f0np0") {
    const std::string port = "/sys/class/infiniband/" + hca + "/ports/1";
    file(cat(port, "/gids/", index), value + "\n");
    file(cat(port, "/gid_attrs/types/", index), type + "\n");
    file(cat(port, "/gid_attrs/ndevs/", index), netdev + "\n");
  }
  void hca(const std::string& name, const std::string& netdev, bool active = true) {
    file("/sys/class/infiniband/" + name + "/ports/1/state", active ? "4: ACTIVE\n" : "1: DOWN\n");
    file("/sys/class/infiniband/" + name + "/device/net/" + netdev + "/mtu", "9000\n");
    file("/sys/class/net/" + netdev + "/operstate", active ? "up\n" : "down\n");
    file("/sys/class/net/" + netdev + "/carrier", active ? "1\n" : "0\n");
    file("/sys/class/net/" + netdev + "/speed", "200000\n");
    file("/sys/class/net/" + netdev + "/mtu", "9000\n");
  }
  /// A DGX Spark in good health.
  void gb10() {
    host.list.push_back({"enp1s0f0np0", 0x0a000001, 24});
    hca("rocep1s0f0", "enp1s0f0np0");
    gid("rocep1s0f0", 0, "fe80:0000:0000:0000:0e42:a1ff:fe5d:0001", "IB/RoCE v1");
    gid("rocep1s0f0", 1, "fe80:0000:0000:0000:0e42:a1ff:fe5d:0001");
    gid("rocep1s0f0", 2, "0000:0000:0000:0000:0000:ffff:0a00:0001", "IB/RoCE v1");
    gid("rocep1s0f0", 3, "0000:0000:0000:0000:0000:ffff:0a00:0001");
    gid("rocep1s0f0", 4, "0000:0000:0000:0000:0000:0000:0000:0000");
    file("/dev/infiniband/uverbs0", "");
    host.gpu = {"", "580.95", {Gpu{"NVIDIA GB10", true, 2400, 3000, 140, {}}}};
  }
  NodeResult run(Options options = {}) const { return run_checks(subject, root, host, options); }
  Result check(const std::string& name, Options options = {}) const {
    for (Result& r : run(std::move(options)).checks) {
      if (r.name == name) return r;
    }
    return {};
  }

  glm53::test::TempDir dir;
  FileRoot root;
  FakeHost host;
  Subject subject;
};

}  // namespace glm53::preflight::test
