// The commands of glm53ctl. Each returns the exit code; mistakes and failures are thrown as Error (docs/operating.md
// has the codes).
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "cli/admin_client.h"
#include "cli/bench_decode.h"
#include "cli/bench_workload.h"

namespace glm53::cli {

/// start and restart.
struct StartOptions {
  std::vector<std::string> set;  ///< "key=value"
  bool restart = false, detach = false, no_env = false;
  std::string wait = "ready";  ///< ready or launched
  std::string limit;           ///< duration; "" = none
};
int run_start(const GlobalOptions& global, const StartOptions& options);
/// Body of PUT /wanted. Throws Error(usage) for a --set that is no key=value or names no key.
nlohmann::ordered_json wanted_running(const StartOptions& options);

struct StopOptions {
  std::string drain = "30s";
  bool now = false, preempt = false, detach = false;
};
int run_stop(const GlobalOptions& global, const StopOptions& options);

struct StatusOptions {
  bool watch = false;
  double interval = 2;  ///< seconds
};
int run_status(const GlobalOptions& global, const StatusOptions& options);
/// The page that people read, from the answer of GET /status; `now_ms` is the current time.
std::string render_status(const nlohmann::ordered_json& status, int64_t now_ms, bool colours);

struct LogsOptions {
  std::string which = "both";  ///< head, worker, both, agent or a process
  bool follow = false;
  int lines = 100;
  std::optional<int64_t> generation;
};
int run_logs(const GlobalOptions& global, const LogsOptions& options);
/// A process and the node it is on, as /logs wants it.
struct LogSource {
  std::string process, node;
  std::string tag;  ///< before each line
};
/// What `which` means for the processes in a status. Throws Error(usage) naming the choices.
std::vector<LogSource> log_sources(const nlohmann::ordered_json& status, std::string_view which);
/// Lines of several logs in order of the time at their start; lines without a time stay behind the one before them.
std::vector<std::string> merge_logs(const std::vector<std::pair<std::string, std::vector<std::string>>>& tagged);

struct SmokeOptions {
  std::string prompt = "Tell me a story about a fox.";
  std::string api, key_file;  ///< "" = asked from the agent
  int max_tokens = 200;
};
int run_smoke(const GlobalOptions& global, const SmokeOptions& options);
/// Why an answer cannot be right (empty, broken text, one thing over and over); nullopt when it looks like language.
std::optional<std::string> degenerate(std::string_view answer);

/// 1 when requests failed and none finished, else 0.
int run_bench_serve(const GlobalOptions& global, const BenchOptions& options);
/// 7 when an answer is none or answers to one prompt differ, 1 when all requests of a cell failed, else 0.
int run_bench_decode(const GlobalOptions& global, const DecodeOptions& options);

struct DoctorOptions {
  bool deep = false;
  bool local = false;  ///< ask no agent: this node's checks by `glm53-agent preflight`
};
/// 3 when a check failed, else 0. Without an agent the checks of this node alone.
int run_doctor(const GlobalOptions& global, const DoctorOptions& options);
/// The page that people read, from the report of GET /preflight. Throws Error(corrupt) when it is none.
std::string render_doctor(const nlohmann::ordered_json& report, bool colours);
int doctor_exit(const nlohmann::ordered_json& report);

/// Downloads are work, which glm53ctl leaves to `glm53-agent download`: it becomes that program.
struct DownloadOptions {
  std::string repo;  ///< "org/name[@revision]"; "" = model.repo
  std::vector<std::string> include, exclude;
  std::string cache, limit_rate;
  bool offline = false, verify = false, dry_run = false, no_env = false;
};
int run_download(const GlobalOptions& global, const DownloadOptions& options);
/// The command line of `program`.
std::vector<std::string> download_arguments(const std::string& program, const GlobalOptions& global,
                                            const DownloadOptions& options);

/// Bundles of this node, by `glm53-agent engine`: it becomes that program.
struct EngineOptions {
  std::string action;  ///< install, list, use, rollback, verify, gc, import or export
  std::string what;    ///< image or digest
  std::string file, store;
  bool use = false;  ///< what was installed becomes the active one
};
int run_engine(const GlobalOptions& global, const EngineOptions& options);
/// The command line of `program`.
std::vector<std::string> engine_arguments(const std::string& program, const GlobalOptions& global,
                                          const EngineOptions& options);

struct SyncOptions {
  std::string what;  ///< "org/name@commit"; "" = what the configuration names
  bool detach = false;
};
int run_sync(const GlobalOptions& global, const SyncOptions& options);
/// Body of POST /sync. Throws Error(usage).
nlohmann::ordered_json sync_order(const std::string& what);

/// Who belongs to the cluster.
struct TokenOptions {
  std::string role = "node", name, expires = "1h";
};
struct JoinOptions {
  std::string head;        ///< "address:port"
  std::string token_file;  ///< "" = standard input
};
int run_cluster_init(const GlobalOptions& global);
int run_cluster_token(const GlobalOptions& global, const TokenOptions& options);
/// On a worker: its agent joins the head.
int run_cluster_join(const GlobalOptions& global, const JoinOptions& options);
/// A person joins; no agent here is asked.
int run_cluster_login(const GlobalOptions& global, const JoinOptions& options);
int run_cluster_show(const GlobalOptions& global);
int run_node_list(const GlobalOptions& global);
struct NodeAddOptions {
  std::string target;  ///< "user@host"
  std::string bundle;  ///< folder of scripts/bundle.sh
  std::string name = "worker";
  std::string listen, head;      ///< "address:port" of the worker's and the head's admin API; "" = the defaults
  std::string key, known_hosts;  ///< of ssh
  int port = 22;
  std::string root;  ///< install below this folder instead of /, without a user and without systemd
};
/// Idempotent. Throws Error(denied) E303 for a host key that is not trusted, Error(unavailable) E304, E305.
int run_node_add(const GlobalOptions& global, const NodeAddOptions& options);
int run_node_remove(const GlobalOptions& global, const std::string& name);
/// The table of members, from the answer of GET /cluster.
std::string render_members(const nlohmann::ordered_json& cluster);

/// What a message's code means, and what to do; all of them for "". Throws Error(usage).
int run_explain(const std::string& code);

int run_config_check(const GlobalOptions& global, const std::string& file);
int run_config_show(const GlobalOptions& global);
int run_config_example();
/// A recipe's .env as a configuration file, on standard output; notes on standard error.
int run_config_import(const std::string& file, const std::string& role);
int run_version(const GlobalOptions& global);

}  // namespace glm53::cli
