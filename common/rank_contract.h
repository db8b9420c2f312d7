// The contract between agent and engine (docs/rank-contract.md): phases, exit codes, notify fields, configuration
// documents. Nobody else spells them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace glm53 {

enum class Phase {
  exec,
  init,
  rendezvous,
  comm_init,
  load_target,
  load_draft,
  measure,
  pools,
  capture,
  warmup,
  ready,
  draining
};
std::string_view name(Phase phase);
std::optional<Phase> parse_phase(std::string_view text);

enum class RankExit {
  ok = 0,
  config = 64,
  weights = 65,
  memory = 66,
  fabric = 67,
  peer_lost = 68,
  device = 69,
  internal = 70,
  stalled = 71
};
/// "peer lost"; "killed by signal 9" for negative numbers of a signal death.
std::string describe_exit(int exit_code, int signal);

/// What `rank --config-fd N` reads.
struct RankConfig {
  uint64_t generation = 0;
  int rank = 0, size = 1, device = 0;
  std::string node;             ///< "head"
  std::string rendezvous_host;  ///< rank 0's address
  uint16_t rendezvous_port = 0;
  std::string bind_address;  ///< this rank's own address for collectives
  std::string api_socket;    ///< rank 0: unix socket of the API process to connect to
  std::string admin_socket;  ///< unix socket this rank listens on for gate, drain, counters
  std::string config_hash;
  std::string config_json;  ///< effective cluster settings, flat dotted keys (Config::from_json)
};
std::string to_json(const RankConfig& config);
RankConfig parse_rank_config(std::string_view json);  ///< throws Error(config) naming the member

/// What `api --config-fd N` reads.
struct ApiConfig {
  std::string rank_socket;  ///< unix socket it listens on for rank 0
  std::string admin_socket;
  std::string bind;  ///< HTTP address
  uint16_t port = 0;
  std::string version;
  std::string config_json;
};
std::string to_json(const ApiConfig& config);
ApiConfig parse_api_config(std::string_view json);

/// Fields of a notify datagram (systemd's protocol, "NAME=value" lines).
struct Notice {
  bool ready = false, stopping = false, watchdog = false;
  std::optional<Phase> phase;                             ///< X_GLM53_PHASE
  std::optional<std::pair<uint64_t, uint64_t>> progress;  ///< X_GLM53_PROGRESS=done/total (bytes while loading)
  std::optional<std::string> status;                      ///< STATUS
  std::optional<std::string> error;                       ///< X_GLM53_ERROR=<one line>
  std::optional<int64_t> extend_us;                       ///< EXTEND_TIMEOUT_USEC
};
std::string encode(const Notice& notice);
/// Unknown fields are ignored; malformed ones too (a child must not be able to stop its agent).
Notice parse_notice(std::string_view datagram);

/// Child side: sends to $NOTIFY_SOCKET; does nothing when it is not set. Thread-safe; never throws, never blocks.
class Notifier {
 public:
  Notifier();
  ~Notifier();
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;
  void send(const Notice& notice) noexcept;
  void phase(Phase phase) noexcept;
  void progress(uint64_t done, uint64_t total) noexcept;
  void ready() noexcept;
  void watchdog() noexcept;
  void error(std::string_view line) noexcept;

 private:
  int fd_ = -1;
  std::string path_;
};

/// Commands on a child's admin socket: one JSON object per line, {"do":"gate_open"}; the answer is one line,
/// {"ok":true,…} or {"ok":false,"error":…}. Commands: gate_open, gate_close, drain, counters, cache_reset.
std::string admin_call(const std::string& socket, std::string_view command, int timeout_ms = 2000);

}  // namespace glm53
