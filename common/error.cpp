#include "common/error.h"

#include <cerrno>
#include <system_error>

namespace glm53 {

Error::Error(Code code, const std::string& what, std::string remedy)
    : std::runtime_error(what), code_(code), remedy_(std::move(remedy)) {}

std::string Error::line() const {
  if (remedy_.empty()) return what();
  return std::string(what()) + " — " + remedy_;
}

Error Error::within(std::string_view context) const {
  return {code_, std::string(context) + ": " + what(), remedy_};
}

std::string_view name(Code code) noexcept {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::usage:
      return "usage";
    case Code::config:
      return "config";
    case Code::weights:
      return "weights";
    case Code::memory:
      return "memory";
    case Code::fabric:
      return "fabric";
    case Code::peer_lost:
      return "peer_lost";
    case Code::device:
      return "device";
    case Code::stalled:
      return "stalled";
    case Code::busy:
      return "busy";
    case Code::not_found:
      return "not_found";
    case Code::denied:
      return "denied";
    case Code::overloaded:
      return "overloaded";
    case Code::cancelled:
      return "cancelled";
    case Code::corrupt:
      return "corrupt";
    case Code::unavailable:
      return "unavailable";
    case Code::internal:
      return "internal";
  }
  return "internal";
}

int http_status(Code code) noexcept {
  switch (code) {
    case Code::ok:
      return 200;
    case Code::usage:
    case Code::config:
      return 400;
    case Code::denied:
      return 401;
    case Code::not_found:
      return 404;
    case Code::busy:
      return 409;
    case Code::overloaded:
      return 429;
    case Code::memory:
    case Code::peer_lost:
    case Code::stalled:
    case Code::cancelled:
    case Code::unavailable:
      return 503;
    case Code::weights:
    case Code::fabric:
    case Code::device:
    case Code::corrupt:
    case Code::internal:
      return 500;
  }
  return 500;
}

int rank_exit(Code code) noexcept {
  switch (code) {
    case Code::ok:
      return 0;
    // What only an operator can change; the agent does not restart a rank that says so.
    case Code::usage:
    case Code::config:
    case Code::not_found:
    case Code::denied:
      return 64;
    case Code::weights:
    case Code::corrupt:
      return 65;
    case Code::memory:
      return 66;
    case Code::fabric:
      return 67;
    case Code::peer_lost:
      return 68;
    case Code::device:
      return 69;
    case Code::stalled:
      return 71;
    case Code::busy:
    case Code::overloaded:
    case Code::cancelled:
    case Code::unavailable:
    case Code::internal:
      return 70;
  }
  return 70;
}

int ctl_exit(Code code) noexcept {
  switch (code) {
    case Code::ok:
      return 0;
    case Code::usage:
    case Code::config:
      return 2;
    case Code::busy:
      return 4;
    case Code::stalled:
      return 5;
    case Code::peer_lost:
    case Code::fabric:
      return 6;
    case Code::weights:
    case Code::corrupt:
      return 7;
    case Code::memory:
    case Code::device:
    case Code::not_found:
    case Code::denied:
    case Code::overloaded:
    case Code::cancelled:
    case Code::unavailable:
    case Code::internal:
      return 1;
  }
  return 1;
}

void throw_errno(Code code, const std::string& what) {
  const int error = errno;
  throw Error(code, what + ": " + std::generic_category().message(error));
}

}  // namespace glm53
