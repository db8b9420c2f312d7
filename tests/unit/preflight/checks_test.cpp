// Every check with a world in which it passes and one in which it does not.
#include "agent/preflight/checks.h"

#include <algorithm>
#include <functional>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "tests/unit/preflight/world.h"

using namespace glm53;
using namespace glm53::preflight;
using glm53::preflight::test::World;

namespace {

struct Row {
  const char* check;
  Verdict verdict;
  const char* says;  ///< part of the measured value
  std::function<void(World&)> change;
};

const Row kRows[] = {
    {"role", Verdict::fail, "10.0.0.1 is not on any interface here", [](World& w) { w.host.list.pop_back(); }},
    {"disk", Verdict::fail, "free on /state", [](World& w) { w.host.free.free = 1000; }},
    {"disk", Verdict::fail, "12 inodes", [](World& w) { w.host.free.inodes = 12; }},
    {"disk", Verdict::warn, "1.0 GiB free", [](World& w) { w.host.free.free = 1 << 30; }},
    {"writable", Verdict::fail, "paths.logs /logs: denied", [](World& w) { w.host.unwritable["/logs"] = "denied"; }},
    {"filesystem", Verdict::fail, "nfs4",
     [](World& w) { w.file("/proc/self/mountinfo", "1 0 8:1 / / rw - nfs4 h:/ rw\n"); }},
    {"filesystem", Verdict::warn, "model.path is on cifs",
     [](World& w) { w.file("/proc/self/mountinfo", "1 0 8:1 / / rw - ext4 a rw\n2 1 8:1 / /model rw - cifs b rw\n"); }},
    {"ports", Verdict::fail, "port 8888 (api.port) is in use by pid 2210 (jupyter)",
     [](World& w) {
       w.file("/proc/net/tcp6", " 1: 0:22B8 0:0000 0A 0:0 0:0 0 0 0 77 1\n");
       w.link("/proc/2210/fd/5", "socket:[77]");
       w.file("/proc/2210/comm", "jupyter\n");
     }},
    {"descriptors", Verdict::warn, "1024 open files",
     [](World& w) { w.file("/proc/self/limits", "Max open files   1024   4096  files\n"); }},
    {"residue", Verdict::warn, "1 shared memory objects", [](World& w) { w.file("/dev/shm/nccl-abc", "x"); }},
    {"engine", Verdict::fail, "no program", [](World& w) { w.remove("/engine"); }},
    {"engine", Verdict::fail, "/other is no program", [](World& w) { w.subject.stand_in = "/other"; }},
    {"weights", Verdict::fail, "neither model.path nor model.repo", [](World& w) { w.subject.model.clear(); }},
    {"weights", Verdict::pass, "a start downloads it",
     [](World& w) {
       w.remove("/model");
       w.subject.model_source = "org/name@c";
     }},
    {"weights", Verdict::pass, "a start downloads them",
     [](World& w) {
       w.remove("/model/model-00002.safetensors");
       w.subject.model_source = "org/name@c";
     }},
    {"weights", Verdict::fail, "is no folder", [](World& w) { w.remove("/model"); }},
    {"weights", Verdict::fail, "model-00002.safetensors", [](World& w) { w.remove("/model/model-00002.safetensors"); }},
    {"weights", Verdict::fail, "of 65 bytes", [](World& w) { w.shard("/model/model-00001.safetensors", 3); }},
    {"weights", Verdict::fail, "tokenizer.json", [](World& w) { w.remove("/model/tokenizer.json"); }},
    {"weights", Verdict::fail, "could not be done",
     [](World& w) { w.file("/model/model.safetensors.index.json", "{\"weight_map\":{\"t\":\"../../etc/passwd\"}}"); }},
    {"weights", Verdict::fail, "no safetensors file",
     [](World& w) { w.file("/model/model-00001.safetensors", std::string(20, '\xff')); }},
    {"draft", Verdict::fail, "model.safetensors",
     [](World& w) {
       w.subject.draft = "/draft";
       w.file("/draft/config.json", "{}");
     }},
    {"memory", Verdict::fail, "need 200.0 GiB", [](World& w) { w.subject.reserve = int64_t{200} << 30; }},
    {"gpu", Verdict::fail, "no GPU visible (NVML: driver/library version mismatch)",
     [](World& w) {
       w.host.gpu = {"driver/library version mismatch", "", {}};
     }},
    {"gpu", Verdict::fail, "names device 3", [](World& w) { w.subject.devices = {3}; }},
    {"gpu", Verdict::warn, "no GB10", [](World& w) { w.host.gpu.gpus[0].name = "NVIDIA H200"; }},
    {"driver", Verdict::warn, "610.43", [](World& w) { w.host.gpu.driver = "610.43.02"; }},
    {"persistence", Verdict::warn, "off", [](World& w) { w.host.gpu.gpus[0].persistence = false; }},
    {"xid", Verdict::warn, "Xid (PCI) 79", [](World& w) { w.file("/var/log/dmesg", "NVRM: Xid (PCI) 79\n"); }},
    {"foreign_gpu_use", Verdict::fail, "pid 8841 python holds 41.0 GiB",
     [](World& w) {
       w.host.gpu.gpus[0].processes = {{8841, int64_t{41} << 30}};
       w.file("/proc/8841/comm", "python\n");
     }},
    {"fabric_link", Verdict::fail, "down and has no carrier",
     [](World& w) { w.hca("rocep1s0f0", "enp1s0f0np0", false); }},
    {"fabric_link", Verdict::warn, "MTU 1500", [](World& w) { w.file("/sys/class/net/enp1s0f0np0/mtu", "1500\n"); }},
    {"fabric_link", Verdict::fail, "rocep1s0f0 on enp1s0f0np0 (ACTIVE)", [](World& w) { w.host.list.pop_back(); }},
    {"rdma_devices", Verdict::fail, "no RDMA device belongs to",
     [](World& w) { w.remove("/sys/class/infiniband/rocep1s0f0"); }},
    {"rdma_devices", Verdict::fail, "not ACTIVE",
     [](World& w) { w.file("/sys/class/infiniband/rocep1s0f0/ports/1/state", "1: DOWN\n"); }},
    {"rdma_devices", Verdict::fail, "uverbs0 cannot be opened",
     [](World& w) { w.host.closed.insert(w.root.at("/dev/infiniband/uverbs0")); }},
    {"rdma_devices", Verdict::fail, "there is no /dev/infiniband/uverbs",
     [](World& w) { w.remove("/dev/infiniband"); }},
    {"memlock", Verdict::fail, "8.0 MiB",
     [](World& w) { w.file("/proc/self/limits", "Max locked memory   8388608   8388608   bytes\n"); }},
    {"gid", Verdict::fail, "nowhere", [](World& w) { w.gid("rocep1s0f0", 3, "fe80::1"); }},
};

}  // namespace

TEST_CASE("a healthy GB10 passes everything that can be asked") {
  World w;
  w.gb10();
  const NodeResult result = w.run();
  CHECK(result.checks.size() == all_checks().size());
  CHECK(result.mtu == 9000);
  for (const Result& r : result.checks) {
    CAPTURE(line("head", r));
    const bool probe = r.measured.find("needs a GB10") != std::string::npos;
    const bool fine = r.verdict == Verdict::pass || (r.verdict == Verdict::skip && (probe || r.name == "draft"));
    CHECK(fine);
    CHECK_FALSE(r.measured.empty());
  }
  CHECK(verdict_of(std::span(&result, 1)) == Verdict::pass);
}

TEST_CASE("each check sees what it is for, says the value and what to do") {
  std::set<std::string> seen;
  for (const Row& row : kRows) {
    World w;
    w.gb10();
    row.change(w);
    const Result r = w.check(row.check);
    CAPTURE(std::string(row.check));
    CAPTURE(r.measured);
    CHECK(r.verdict == row.verdict);
    CHECK(r.measured.find(row.says) != std::string::npos);
    CHECK(r.remedy.empty() == (row.verdict == Verdict::pass));
    seen.insert(row.check);
  }
  // Every check but the one that only tells, and the probes that this version lacks, is in the table.
  for (const Check& check : all_checks()) {
    if (check.run != nullptr && check.name != "config")
      CHECK_MESSAGE(seen.contains(std::string(check.name)), check.name);
  }
}

TEST_CASE("all failures are listed, not only the first") {
  World w;  // no GPU, no fabric, no program, no model
  w.remove("/engine");
  w.remove("/model");
  const NodeResult result = w.run();
  const auto lines = failures(std::span(&result, 1));
  for (const char* code : {"E203 head: ", "E501 head: ", "E601 head: ", "E207 head: ", "E210 head: ", "E212 head: "}) {
    CAPTURE(std::string(code));
    CHECK(std::any_of(lines.begin(), lines.end(), [&](const std::string& l) { return l.starts_with(code); }));
  }
  CHECK(verdict_of(std::span(&result, 1)) == Verdict::fail);
}

TEST_CASE("on the CPU, GPU and fabric checks are skipped by name") {
  World w;
  w.subject.backend = "cpu";
  w.subject.fabric_address = "127.0.0.1";
  const NodeResult result = w.run();
  CHECK(failures(std::span(&result, 1)).empty());
  for (const Check& check : all_checks()) {
    if (check.needs != Check::Needs::nothing) CHECK(w.check(std::string(check.name)).verdict == Verdict::skip);
  }
}

TEST_CASE("what is ours holds ports and GPUs rightly") {
  World w;
  w.gb10();
  w.file("/proc/net/tcp", " 1: 0:22B8 0:0000 0A 0:0 0:0 0 0 0 77 1\n");
  w.link("/proc/50/fd/5", "socket:[77]");
  w.host.gpu.gpus[0].processes = {{50, 1000}};
  CHECK(w.check("ports").verdict == Verdict::fail);
  CHECK(w.check("foreign_gpu_use").verdict == Verdict::fail);
  CHECK(w.check("ports", {.own_pids = {50}}).verdict == Verdict::pass);
  CHECK(w.check("foreign_gpu_use", {.own_pids = {50}}).verdict == Verdict::pass);
}

TEST_CASE("clocks are compared without the way between, and MTUs") {
  const auto at = [](int64_t clock, int64_t mtu) {
    NodeResult head{"head", {}, 9000, 0}, worker{"worker", {}, mtu, clock};
    compare_nodes(head, worker, 1'000'000, 400);
    return worker;
  };
  CHECK(at(999'800, 9000).checks[0].measured.find("is 0 ms") != std::string::npos);
  CHECK(at(1'001'000, 9000).checks[0].verdict == Verdict::pass);
  CHECK(at(1'003'000, 9000).checks[0].verdict == Verdict::warn);
  CHECK(at(900'000, 9000).checks[0].verdict == Verdict::fail);
  CHECK(at(900'000, 9000).checks[0].measured.find("behind the head") != std::string::npos);
  CHECK(at(1'000'000, 1500).checks[1].verdict == Verdict::fail);
  CHECK(at(1'000'000, 0).checks.size() == 1);
}

TEST_CASE("a result survives JSON, and nonsense is refused") {
  World w;
  const NodeResult result = w.run();
  const NodeResult back = parse_node_result(dump(to_json(result)));
  CHECK(dump(to_json(back)) == dump(to_json(result)));
  for (const char* bad : {"", "[]", "{}", "{\"checks\":1}", "{\"checks\":[1]}"}) {
    CAPTURE(std::string(bad));
    CHECK_THROWS_AS(parse_node_result(bad), Error);
  }
  // A verdict nobody knows counts as a failure.
  const NodeResult odd = parse_node_result(R"({"checks":[{"name":"x","verdict":"splendid"}]})");
  CHECK(verdict_of(std::span(&odd, 1)) == Verdict::fail);
}

TEST_CASE("this machine answers without a root") {
  const auto host = this_machine();
  const FileRoot files;
  CHECK(memory(files)->total > 0);
  CHECK(mount_of(files, "/proc/self")->type == "proc");
  CHECK_FALSE(host->addresses().empty());
  const glm53::test::TempDir dir;
  CHECK(host->space(dir / "not/there")->free > 0);
  CHECK_FALSE(host->write_trouble(dir.path()).has_value());
  CHECK(std::filesystem::is_empty(dir.path()));
  CHECK(host->write_trouble(dir / "none").has_value());
}
