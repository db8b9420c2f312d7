// Errors: one enum of codes, one exception, and the only tables that map a code to the outside world.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace glm53 {

/// What kind of thing went wrong. Mapped to HTTP, rank exit and glm53ctl exit codes in error.cpp and nowhere else.
enum class Code {
  ok,
  usage,      ///< the caller's request or arguments are wrong
  config,     ///< a configuration file or setting is wrong
  weights,    ///< a checkpoint is missing, damaged or not what its config says
  memory,     ///< not enough memory
  fabric,     ///< the ranks cannot reach each other
  peer_lost,  ///< another rank or node went away
  device,     ///< the accelerator failed
  stalled,    ///< no progress within a limit
  busy,       ///< held by somebody else (lease, port, state directory)
  not_found,
  denied,
  overloaded,  ///< a queue is full; try again
  cancelled,
  corrupt,      ///< data does not match its digest or format
  unavailable,  ///< not now, or not in this build
  internal,
};

/// The one exception of the project. `what()` says what is wrong and where; `remedy()` what would be right.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& what, std::string remedy = {});
  Code code() const noexcept { return code_; }
  const std::string& remedy() const noexcept { return remedy_; }
  /// "what — remedy", or only "what".
  std::string line() const;
  /// The same error with "context: " before its text.
  Error within(std::string_view context) const;

 private:
  Code code_;
  std::string remedy_;
};

/// Name of a code as printed in JSON ("peer_lost").
std::string_view name(Code code) noexcept;
/// HTTP status of an error answered over HTTP (400 … 503).
int http_status(Code code) noexcept;
/// Exit code of a rank (docs/rank-contract.md): 0, 64 … 71.
int rank_exit(Code code) noexcept;
/// Exit code of glm53ctl (docs/operating.md): 0 ok, 1 failed, 2 usage or config, 3 preflight, 4 busy, 5 timeout,
/// 6 worker unreachable, 7 verification failed.
int ctl_exit(Code code) noexcept;

/// Throws Error(code, what + ": " + strerror(errno)).
[[noreturn]] void throw_errno(Code code, const std::string& what);

}  // namespace glm53
