#include "agent/api/local_node.h"

#include <algorithm>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "agent/preflight/nccl_environment.h"
#include "common/error.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "common/version.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using reconcile::ActionKind;

constexpr state::TimeMs kRestartWindow = int64_t{30} * 24 * 3600 * 1000;

constexpr ActionKind kCommands[] = {ActionKind::start_rank, ActionKind::stop_rank, ActionKind::start_api,
                                    ActionKind::stop_api,   ActionKind::clean,     ActionKind::open_gate,
                                    ActionKind::drain,      ActionKind::download,  ActionKind::end_download};

std::string process_name(int rank) {
  return rank < 0 ? "api" : cat("rank", rank);
}

class Store final : public supervise::ProcessStore {
 public:
  explicit Store(state::Processes& processes) : processes_(processes) {}
  void save(const supervise::ProcessRecord& r) override {
    state::ProcessRow row;
    row.name = r.name;
    row.generation = r.generation;
    row.boot_id = r.id.boot_id;
    row.pid = r.id.pid;
    row.start_ticks = r.id.start_ticks;
    row.admin_socket = r.admin_socket;
    row.config_hash = r.config_hash;
    row.phase = std::string(name(r.phase));
    row.ready = r.ready;
    row.stop_requested = r.stop_requested;
    row.started_at = r.started_at;
    row.ended_at = r.ended_at;
    row.exit_code = r.exit_code;
    row.exit_signal = r.exit_signal;
    row.last_error = r.last_error;
    processes_.save(row);
  }
  std::vector<supervise::ProcessRecord> current() override {
    std::vector<supervise::ProcessRecord> records;
    for (const state::ProcessRow& row : processes_.current()) {
      supervise::ProcessRecord r;
      r.name = row.name;
      r.generation = row.generation;
      r.id = {row.boot_id, static_cast<pid_t>(row.pid), row.start_ticks};
      r.admin_socket = row.admin_socket;
      r.config_hash = row.config_hash;
      r.phase = parse_phase(row.phase).value_or(Phase::exec);
      r.ready = row.ready;
      r.stop_requested = row.stop_requested;
      r.started_at = row.started_at;
      r.ended_at = row.ended_at;
      r.exit_code = row.exit_code;
      r.exit_signal = row.exit_signal;
      r.last_error = row.last_error;
      records.push_back(std::move(r));
    }
    return records;
  }

 private:
  state::Processes& processes_;
};

int64_t integer(const Json& j, const char* key, int64_t fallback, int64_t least, int64_t most) {
  const auto it = j.find(key);
  if (it == j.end() || it->is_null()) return fallback;
  const bool fits = it->is_number_integer() && it->get<int64_t>() >= least && it->get<int64_t>() <= most;
  if (!fits)
    throw Error(Code::usage,
                cat("action: member '", std::string_view(key), "' must be an integer from ", least, " to ", most));
  return it->get<int64_t>();
}

}  // namespace

std::unique_ptr<supervise::ProcessStore> make_process_store(state::Processes& processes) {
  return std::make_unique<Store>(processes);
}

std::string to_json(const NodeCommand& c) {
  Json j{{"epoch", c.epoch},
         {"kind", std::string(name(c.kind))},
         {"rank", c.rank},
         {"generation", c.generation},
         {"grace_ms", c.grace.count()}};
  if (!c.request.empty()) j["request"] = c.request;
  if (!c.config.empty()) j["config"] = parse_json(c.config);
  return dump(j);
}

NodeCommand parse_command(std::string_view json) {
  const Json j = parse_json(json, {.max_bytes = 1u << 20, .max_depth = 16});
  if (!j.is_object()) throw Error(Code::usage, "action: expected a JSON object");
  NodeCommand c;
  const std::string kind = j.contains("kind") && j["kind"].is_string() ? j["kind"].get<std::string>() : "";
  const auto* const found =
      std::find_if(std::begin(kCommands), std::end(kCommands), [&](ActionKind k) { return name(k) == kind; });
  if (found == std::end(kCommands)) {
    throw Error(Code::usage, cat("action: kind '", kind, "' is unknown"),
                "start_rank, stop_rank, clean, open_gate, drain, download, end_download");
  }
  constexpr int64_t kBig = int64_t{1} << 53;
  c.kind = *found;
  c.epoch = static_cast<uint64_t>(integer(j, "epoch", 0, 0, kBig));
  c.rank = static_cast<int>(integer(j, "rank", -1, -1, 1023));
  c.generation = static_cast<uint64_t>(integer(j, "generation", 0, 0, kBig));
  c.grace = std::chrono::milliseconds(integer(j, "grace_ms", 20000, 0, 3600'000));
  if (const auto it = j.find("config"); it != j.end() && !it->is_null()) {
    if (!it->is_object()) throw Error(Code::usage, "action: member 'config' must be an object");
    c.config = dump(*it);
  }
  if (const auto it = j.find("request"); it != j.end() && !it->is_null()) {
    if (!it->is_string() || it->get<std::string>().size() > 64)
      throw Error(Code::usage, "action: member 'request' must be a short text");
    c.request = it->get<std::string>();
  }
  const bool incomplete = (c.kind == ActionKind::start_rank && c.config.empty()) ||
                          (c.kind == ActionKind::download && (c.config.empty() || c.request.empty()));
  if (incomplete) {
    throw Error(Code::usage, cat("action: ", name(c.kind), " needs 'config'",
                                 c.kind == ActionKind::download ? " and 'request'" : ""));
  }
  return c;
}

LocalNode::LocalNode(const AgentSettings& settings, const ConfigFile& file, supervise::Supervisor& supervisor,
                     state::Database& db, std::function<void()> on_change, std::function<void(const std::string&)> note)
    : settings_(settings),
      file_(file),
      supervisor_(supervisor),
      processes_(db),
      fetcher_(std::move(on_change), std::move(note)) {}

std::string LocalNode::socket_of(std::string_view process) const {
  return cat(settings_.run_dir, "/", process, ".sock");
}

void LocalNode::run(const NodeCommand& command) {
  switch (command.kind) {
    case ActionKind::start_rank:
      start_rank(command);
      break;
    case ActionKind::start_api:
      start_api(command);
      break;
    case ActionKind::stop_rank:
    case ActionKind::stop_api:
      supervisor_.stop(process_name(command.rank), command.generation, command.grace);
      break;
    case ActionKind::download:
      fetcher_.start(command.request, parse_hub_models(command.config), file_.config(), settings_.hub_cache);
      break;
    case ActionKind::end_download:
      fetcher_.cancel();
      break;
    default:
      // clean: sockets go when a process ends. Gates and drains concern rank 0 and the API process, which the head's
      // driver asks itself.
      break;
  }
}

namespace {

std::map<std::string, std::string> fabric_environment(const std::string& address) {
  return preflight::nccl_environment(preflight::FileRoot(), preflight::this_machine()->addresses(), address);
}

}  // namespace

void LocalNode::start_rank(const NodeCommand& command) {
  RankConfig config = localize(parse_rank_config(command.config), settings_);
  if (config.rank != command.rank || config.generation != command.generation) {
    throw Error(Code::usage, "action: rank or generation differs from the one in 'config'");
  }
  const std::string process = process_name(config.rank);
  for (const auto& view : supervisor_.snapshot()) {
    if (view.name == process && view.ended_at == 0 && view.generation != config.generation) {
      throw Error(Code::busy, cat(process, " of generation ", view.generation, " still runs"));
    }
  }
  supervise::StartSpec spec;
  spec.name = process;
  spec.generation = config.generation;
  spec.argv = {settings_.rank_program(), "rank", "--config-fd", "3"};
  const bool gpu = Config::from_json(parse_json(config.config_json), "rank").text("engine.backend") != "cpu";
  spec.env = child_environment(gpu);
  // What the operator set in the agent's environment goes before.
  if (gpu) spec.env.merge(fabric_environment(config.bind_address));
  spec.admin_socket = config.admin_socket;
  spec.config_hash = config.config_hash;
  spec.config = glm53::to_json(config);
  supervisor_.start(spec);
}

void LocalNode::start_api(const NodeCommand& command) {
  supervise::StartSpec spec;
  spec.name = "api";
  spec.generation = command.generation;
  spec.argv = {settings_.engine(), "api", "--config-fd", "3"};
  spec.env = child_environment(false);
  spec.config = command.config;
  spec.admin_socket = socket_of("api");
  spec.config_hash = command.config_hash;
  supervisor_.start(spec);
}

NodeReport LocalNode::report() {
  NodeReport r;
  r.name = settings_.name;
  r.role = settings_.role;
  r.address = settings_.address;
  r.version = std::string(version());
  r.pid = ::getpid();
  r.uptime_s = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - started_).count();
  r.agent_memory = resident_bytes(::getpid());
  const HostMemory memory = host_memory();
  r.memory_total = memory.total;
  r.memory_available = memory.available;
  const state::TimeMs now = state::now_ms();
  for (const supervise::ProcessView& v : supervisor_.snapshot()) {
    ProcessReport p;
    p.name = v.name;
    p.generation = v.generation;
    p.pid = v.id.pid;
    p.ready = v.ready;
    p.stop_requested = v.stop_requested;
    p.ended = v.ended_at != 0;
    p.exit_code = v.exit_code;
    p.exit_signal = v.exit_signal;
    p.phase = v.phase;
    p.progress = v.progress;
    p.silent_ms = v.silent_for.count();
    p.extended_ms = v.extended_for.count();
    p.started_ms_ago = std::max<int64_t>(0, now - v.started_at);
    p.ended_ms_ago = p.ended ? std::max<int64_t>(0, now - v.ended_at) : 0;
    p.last_error = v.last_error;
    p.config_hash = v.config_hash;
    p.memory_bytes = p.ended ? 0 : resident_bytes(v.id.pid);
    p.restarts = std::max<int64_t>(0, processes_.started_since(v.name, now - kRestartWindow) - 1);
    r.processes.push_back(std::move(p));
  }
  r.fetch = fetcher_.report();
  return r;
}

void LocalNode::stop_all(std::chrono::milliseconds grace, bool only_ranks) {
  for (const auto& view : supervisor_.snapshot()) {
    if (view.ended_at == 0 && (!only_ranks || rank_of(view.name) >= 0))
      supervisor_.stop(view.name, view.generation, grace);
  }
}

bool LocalNode::any_alive() {
  const auto views = supervisor_.snapshot();
  return std::any_of(views.begin(), views.end(), [](const auto& v) { return v.ended_at == 0; });
}

}  // namespace glm53::agent
