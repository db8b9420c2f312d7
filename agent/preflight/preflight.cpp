#include "agent/preflight/preflight.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <set>

#include "agent/preflight/checks.h"
#include "agent/preflight/fabric.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

using enum Check::Needs;

constexpr std::array kChecks{
    Check{"config", "E201", nothing, check_config},
    Check{"role", "E203", nothing, check_role},
    Check{"disk", "E205", nothing, check_disk},
    Check{"writable", "E206", nothing, check_writable},
    Check{"filesystem", "E220", nothing, check_filesystem},
    Check{"ports", "E214", nothing, check_ports},
    Check{"descriptors", "W221", nothing, check_descriptors},
    Check{"residue", "W216", nothing, check_residue},
    Check{"engine", "E501", nothing, check_engine},
    Check{"weights", "E601", nothing, check_weights},
    Check{"draft", "E603", nothing, check_draft},
    Check{"memory", "E217", nothing, check_memory},
    Check{"gpu", "E207", gpu, check_gpu},
    Check{"driver", "W208", gpu, check_driver},
    Check{"persistence", "W222", gpu, check_persistence},
    Check{"xid", "W223", gpu, check_xid},
    Check{"foreign_gpu_use", "E215", gpu, check_foreign_gpu_use},
    Check{"gpu_clock", "W209", gb10, nullptr},
    Check{"fabric_link", "E210", fabric, check_link},
    Check{"rdma_devices", "E224", fabric, check_rdma},
    Check{"memlock", "E225", fabric, check_memlock},
    Check{"gid", "E212", fabric, check_gid},
    Check{"fabric_frames", "E213", gb10, nullptr},
    Check{"rdma_write", "W226", gb10, nullptr},
};

constexpr int64_t kClockWarn = 2000, kClockFail = 60'000;

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string absolute(const Config& config, std::string_view key) {
  if (config.text(key).empty()) return {};
  return std::filesystem::absolute(config.path(key)).lexically_normal().string();
}

bool on_loopback(const std::string& address) {
  const auto v4 = parse_ipv4(address);
  return v4 && (*v4 >> 24) == 127;
}

/// Why a check does not apply; empty when it does.
std::string not_here(const Context& c, const Check& check) {
  const bool cpu = c.subject.backend == "cpu";
  const bool device = check.needs != nothing;
  if (device && cpu) return "engine.backend = \"cpu\"";
  if (check.needs == gpu && !c.wants_gpu()) {
    return c.subject.devices.empty() ? "no rank on this node" : "no GPU here: engine.backend = \"auto\" takes the CPU";
  }
  if (check.needs == fabric && !c.wants_fabric()) {
    return c.subject.nodes < 2 ? "all ranks on one node" : "the ranks meet over loopback";
  }
  if (check.run == nullptr) return "needs a GB10; this version has no such probe";
  return {};
}

Result run_one(const Context& c, const Check& check) {
  Result r;
  r.name = check.name;
  r.code = check.code;
  if (const std::string why = not_here(c, check); !why.empty()) {
    skip(r, why);
    return r;
  }
  try {
    check.run(c, r);
  } catch (const std::exception& e) {
    fail(r, cat("the check could not be done: ", std::string_view(e.what())), "correct what it says and run it again");
  }
  return r;
}

std::optional<int> pinned_gid() {
  const auto text = environment("NCCL_IB_GID_INDEX");
  const auto index = text ? parse_int(*text) : std::nullopt;
  return index && *index >= 0 && *index < 256 ? std::optional(static_cast<int>(*index)) : std::nullopt;
}

}  // namespace

std::span<const Check> all_checks() {
  return kChecks;
}

void warn(Result& r, std::string measured, std::string remedy) {
  r.verdict = Verdict::warn;
  r.measured = std::move(measured);
  r.remedy = std::move(remedy);
}
void fail(Result& r, std::string measured, std::string remedy) {
  warn(r, std::move(measured), std::move(remedy));
  r.verdict = Verdict::fail;
}
void skip(Result& r, const std::string& why) {
  r.verdict = Verdict::skip;
  r.measured = cat("skipped: ", why);
}

Subject subject_of(const Config& own, const Config& cluster, const std::string& node, const std::string& engine) {
  Subject s;
  s.node = node;
  s.backend = cluster.text("engine.backend");
  std::set<std::string> nodes;
  const auto places = parse_ranks(cluster);
  for (const RankPlace& place : places) {
    nodes.insert(place.node);
    if (place.node == node) s.devices.push_back(place.device);
  }
  s.ranks = std::max(1, static_cast<int>(places.size()));
  s.nodes = static_cast<int>(nodes.size());
  s.shares_host =
      on_loopback(cluster.text("head.fabric_address")) && on_loopback(cluster.text("worker.fabric_address"));
  s.fabric_address = cluster.text(node == "head" ? "head.fabric_address" : "worker.fabric_address");
  s.state_dir = absolute(own, "paths.state");
  s.run_dir = absolute(own, "paths.run");
  s.logs_dir = absolute(own, "paths.logs");
  s.engine = own.text("engine.path").empty() ? engine : absolute(own, "engine.path");
  s.stand_in = absolute(own, "engine.rank_path");
  s.model = absolute(cluster, "model.path");
  s.draft = absolute(cluster, "draft.path");
  s.api_bind = cluster.text("api.bind");
  s.api_port = static_cast<uint16_t>(cluster.integer("api.port"));
  s.ranks_port = static_cast<uint16_t>(cluster.integer("ranks.port"));
  s.kv_bytes = cluster.integer("memory.kv_bytes");
  s.reserve = cluster.integer("memory.reserve");
  s.hash = cluster.hash();
  return s;
}

bool Context::wants_gpu() const {
  if (subject.backend == "cpu" || subject.devices.empty()) return false;
  return subject.backend == "cuda" || !gpus.gpus.empty();
}
bool Context::wants_fabric() const {
  return subject.backend != "cpu" && subject.nodes > 1 && !subject.shares_host;
}
bool Context::is_own(int64_t pid) const {
  return std::find(own_pids.begin(), own_pids.end(), pid) != own_pids.end();
}

NodeResult run_checks(const Subject& subject, const FileRoot& files, const Host& host, const Options& options) {
  Context context{subject, files, host, {}, host.addresses(), options.own_pids, pinned_gid(), options.deep};
  if (subject.backend != "cpu") context.gpus = host.gpus();
  NodeResult result;
  result.node = subject.node;
  for (const Check& check : all_checks()) result.checks.push_back(run_one(context, check));
  if (context.wants_fabric()) {
    const auto own = parse_ipv4(subject.fabric_address);
    for (const InterfaceAddress& a : context.addresses) {
      if (a.address == own) result.mtu = link_of(files, a.netdev).mtu;
    }
  }
  result.clock = now_ms();
  return result;
}

void compare_nodes(NodeResult& head, NodeResult& worker, int64_t head_clock, int64_t round_trip_ms) {
  Result clock{"clock", "E204", Verdict::pass, {}, {}};
  const int64_t skew = worker.clock - (head_clock - round_trip_ms / 2);
  const std::string text = cat("clock is ", std::abs(skew), " ms ", skew < 0 ? "behind the head" : "ahead of the head");
  clock.measured = text;
  if (std::abs(skew) > kClockFail) {
    fail(clock, text, "enable NTP on both nodes (TLS and signed URLs fail otherwise)");
  } else if (std::abs(skew) > kClockWarn) {
    warn(clock, text, "enable NTP on both nodes");
  }
  worker.checks.push_back(clock);
  if (head.mtu == 0 || worker.mtu == 0) return;
  Result mtu{"mtu", "E211", Verdict::pass, cat("MTU ", head.mtu, " on the head, ", worker.mtu, " on the worker"), {}};
  if (head.mtu != worker.mtu) fail(mtu, mtu.measured, "set the same MTU (9000) on both fabric interfaces");
  worker.checks.push_back(mtu);
}

NodeResult unreachable(const std::string& node, const std::string& why) {
  NodeResult result;
  result.node = node;
  Result r{"reach", "E301", Verdict::pass, {}, {}};
  fail(r, cat("its agent does not answer: ", why),
       "start glm53-agent there, and check worker.admin, the tunnel to it and worker.token_file");
  result.checks.push_back(r);
  return result;
}

}  // namespace glm53::preflight
