#include "common/rank_contract.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <poll.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sys/socket.h>
#include <sys/un.h>

#include "common/error.h"
#include "common/json.h"
#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53 {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 12> kPhases = {"exec",        "init",       "rendezvous", "comm_init",
                                                      "load_target", "load_draft", "measure",    "pools",
                                                      "capture",     "warmup",     "ready",      "draining"};
constexpr std::string_view kPhaseField = "X_GLM53_PHASE", kProgressField = "X_GLM53_PROGRESS",
                           kErrorField = "X_GLM53_ERROR";

/// Reads members of a document; errors name the document and the member.
class Members {
 public:
  Members(std::string_view document, std::string_view text) : document_(document) {
    try {
      json_ = parse_json(text);
    } catch (const Error& e) {
      throw Error(Code::config, cat(document, ": ", std::string_view(e.what())));
    }
    if (!json_.is_object()) throw Error(Code::config, cat(document, ": expected a JSON object"));
  }
  std::string text(const char* key) const {
    const Json& v = get(key);
    if (!v.is_string()) wrong(key, "text", v);
    return v.get<std::string>();
  }
  int64_t integer(const char* key, int64_t least, int64_t most) const {
    const Json& v = get(key);
    if (!v.is_number_integer()) wrong(key, "an integer", v);
    const bool too_large =
        v.is_number_unsigned() && v.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    const int64_t value = too_large ? most : v.get<int64_t>();
    if (too_large || value < least || value > most) {
      throw Error(Code::config, cat(document_, ": member '", std::string_view(key), "' is ", dump(v)),
                  cat("a value from ", least, " to ", most));
    }
    return value;
  }
  std::string object(const char* key) const {
    const Json& v = get(key);
    if (!v.is_object()) wrong(key, "an object", v);
    return dump(v);
  }

 private:
  const Json& get(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end())
      throw Error(Code::config, cat(document_, ": member '", std::string_view(key), "' is missing"));
    return *found;
  }
  [[noreturn]] void wrong(const char* key, std::string_view expected, const Json& found) const {
    throw Error(Code::config, cat(document_, ": member '", std::string_view(key), "' must be ", expected, ", not ",
                                  std::string_view(found.type_name())));
  }
  std::string document_;
  Json json_;
};

Json settings(const std::string& config_json) {
  return config_json.empty() ? Json::object() : parse_json(config_json);
}

std::string without_line_breaks(std::string_view text) {
  std::string out(text);
  std::replace_if(
      out.begin(), out.end(), [](char c) { return c == '\n' || c == '\r' || c == '\0'; }, ' ');
  return out;
}

std::optional<std::pair<uint64_t, uint64_t>> parse_progress(std::string_view value) {
  const size_t slash = value.find('/');
  if (slash == std::string_view::npos) return std::nullopt;
  const auto done = parse_int(value.substr(0, slash)), total = parse_int(value.substr(slash + 1));
  if (!done || !total || *done < 0 || *total < *done) return std::nullopt;
  return std::pair(static_cast<uint64_t>(*done), static_cast<uint64_t>(*total));
}

void parse_field(std::string_view field, std::string_view value, Notice& notice) {
  if (field == "READY") {
    notice.ready = notice.ready || value == "1";
  } else if (field == "STOPPING") {
    notice.stopping = notice.stopping || value == "1";
  } else if (field == "WATCHDOG") {
    notice.watchdog = notice.watchdog || value == "1";
  } else if (field == kPhaseField) {
    if (const auto phase = parse_phase(value)) notice.phase = phase;
  } else if (field == kProgressField) {
    if (const auto progress = parse_progress(value)) notice.progress = progress;
  } else if (field == "STATUS") {
    if (valid_utf8(value)) notice.status = without_line_breaks(value);
  } else if (field == kErrorField) {
    if (valid_utf8(value)) notice.error = without_line_breaks(value);
  } else if (field == "EXTEND_TIMEOUT_USEC") {
    if (const auto us = parse_int(value); us && *us >= 0) notice.extend_us = us;
  }
}

void wait_or_throw(int fd, short events, std::chrono::steady_clock::time_point deadline, const std::string& socket) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    if (left <= 0) throw Error(Code::stalled, cat("no answer from '", socket, "' within the time limit"));
    pollfd p{fd, events, 0};
    const int n = ::poll(&p, 1, static_cast<int>(std::min<int64_t>(left, 1 << 30)));
    if (n > 0) return;
    if (n < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
  }
}

}  // namespace

std::string_view name(Phase phase) {
  return kPhases.at(static_cast<size_t>(phase));
}

std::optional<Phase> parse_phase(std::string_view text) {
  const auto found = std::find(kPhases.begin(), kPhases.end(), text);
  if (found == kPhases.end()) return std::nullopt;
  return static_cast<Phase>(found - kPhases.begin());
}

std::string describe_exit(int exit_code, int signal) {
  if (signal == 0 && exit_code < 0) signal = -exit_code;
  if (signal != 0) return cat("killed by signal ", signal);
  switch (static_cast<RankExit>(exit_code)) {
    case RankExit::ok:
      return "ok";
    case RankExit::config:
      return "configuration refused";
    case RankExit::weights:
      return "weights refused";
    case RankExit::memory:
      return "not enough memory";
    case RankExit::fabric:
      return "fabric failed";
    case RankExit::peer_lost:
      return "peer lost";
    case RankExit::device:
      return "device lost";
    case RankExit::internal:
      return "internal error";
    case RankExit::stalled:
      return "stalled";
  }
  return cat("exit code ", exit_code);
}

std::string to_json(const RankConfig& c) {
  return dump(Json{{"generation", c.generation},
                   {"rank", c.rank},
                   {"size", c.size},
                   {"device", c.device},
                   {"node", c.node},
                   {"rendezvous_host", c.rendezvous_host},
                   {"rendezvous_port", c.rendezvous_port},
                   {"bind_address", c.bind_address},
                   {"api_socket", c.api_socket},
                   {"admin_socket", c.admin_socket},
                   {"config_hash", c.config_hash},
                   {"config", settings(c.config_json)}});
}

RankConfig parse_rank_config(std::string_view json) {
  const Members m("rank configuration", json);
  RankConfig c;
  c.generation = static_cast<uint64_t>(m.integer("generation", 0, std::numeric_limits<int64_t>::max()));
  c.size = static_cast<int>(m.integer("size", 1, 1024));
  c.rank = static_cast<int>(m.integer("rank", 0, c.size - 1));
  c.device = static_cast<int>(m.integer("device", 0, 1024));
  c.node = m.text("node");
  c.rendezvous_host = m.text("rendezvous_host");
  c.rendezvous_port = static_cast<uint16_t>(m.integer("rendezvous_port", 0, 65535));
  c.bind_address = m.text("bind_address");
  c.api_socket = m.text("api_socket");
  c.admin_socket = m.text("admin_socket");
  c.config_hash = m.text("config_hash");
  c.config_json = m.object("config");
  return c;
}

std::string to_json(const ApiConfig& c) {
  return dump(Json{{"rank_socket", c.rank_socket},
                   {"admin_socket", c.admin_socket},
                   {"bind", c.bind},
                   {"port", c.port},
                   {"version", c.version},
                   {"config", settings(c.config_json)}});
}

ApiConfig parse_api_config(std::string_view json) {
  const Members m("API configuration", json);
  ApiConfig c;
  c.rank_socket = m.text("rank_socket");
  c.admin_socket = m.text("admin_socket");
  c.bind = m.text("bind");
  c.port = static_cast<uint16_t>(m.integer("port", 0, 65535));
  c.version = m.text("version");
  c.config_json = m.object("config");
  return c;
}

std::string encode(const Notice& n) {
  std::string out;
  if (n.ready) out += "READY=1\n";
  if (n.stopping) out += "STOPPING=1\n";
  if (n.watchdog) out += "WATCHDOG=1\n";
  if (n.phase) out += cat(kPhaseField, "=", name(*n.phase), "\n");
  if (n.progress) out += cat(kProgressField, "=", n.progress->first, "/", n.progress->second, "\n");
  if (n.status) out += cat("STATUS=", without_line_breaks(*n.status), "\n");
  if (n.error) out += cat(kErrorField, "=", without_line_breaks(*n.error), "\n");
  if (n.extend_us) out += cat("EXTEND_TIMEOUT_USEC=", *n.extend_us, "\n");
  return out;
}

Notice parse_notice(std::string_view datagram) {
  Notice notice;
  while (!datagram.empty()) {
    const size_t end = std::min(datagram.find('\n'), datagram.size());
    const std::string_view line = datagram.substr(0, end);
    if (const size_t equals = line.find('='); equals != std::string_view::npos) {
      parse_field(line.substr(0, equals), line.substr(equals + 1), notice);
    }
    datagram.remove_prefix(std::min(end + 1, datagram.size()));
  }
  return notice;
}

Notifier::Notifier() {
  path_ = environment("NOTIFY_SOCKET").value_or("");
  if (path_.empty() || path_.size() >= sizeof(sockaddr_un::sun_path)) return;
  if (path_[0] == '@') path_[0] = '\0';  // abstract socket
  fd_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

Notifier::~Notifier() {
  if (fd_ >= 0) ::close(fd_);
}

void Notifier::send(const Notice& notice) noexcept {
  if (fd_ < 0) return;
  try {
    const std::string datagram = encode(notice);
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::memcpy(to.sun_path, path_.data(), path_.size());
    const auto size =
        static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path_.size() + (path_[0] == '\0' ? 0 : 1));
    while (::sendto(fd_, datagram.data(), datagram.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&to), size) <
               0 &&
           errno == EINTR) {
    }
  } catch (...) {  // out of memory: a notice lost is better than a rank lost
  }
}

void Notifier::phase(Phase phase) noexcept {
  Notice n;
  n.phase = phase;
  send(n);
}
void Notifier::progress(uint64_t done, uint64_t total) noexcept {
  Notice n;
  n.progress = {done, total};
  send(n);
}
void Notifier::ready() noexcept {
  Notice n;
  n.ready = true;
  n.phase = Phase::ready;
  send(n);
}
void Notifier::watchdog() noexcept {
  Notice n;
  n.watchdog = true;
  send(n);
}
void Notifier::error(std::string_view line) noexcept {
  try {
    Notice n;
    n.error = std::string(line.substr(0, 4096));
    send(n);
  } catch (...) {  // as in send()
  }
}

std::string admin_call(const std::string& socket, std::string_view command, int timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const UniqueFd fd = connect_unix(socket);
  const std::string line = cat(command.starts_with('{') ? std::string(command) : dump(Json{{"do", command}}), "\n");
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t n = ::send(fd.get(), line.data() + sent, line.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      wait_or_throw(fd.get(), POLLOUT, deadline, socket);
    } else if (errno != EINTR) {
      throw_errno(Code::peer_lost, cat("cannot write to '", socket, "'"));
    }
  }
  std::string answer;
  std::array<char, 4096> buffer;
  while (answer.find('\n') == std::string::npos) {
    wait_or_throw(fd.get(), POLLIN, deadline, socket);
    const ssize_t n = ::recv(fd.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) throw Error(Code::peer_lost, cat("'", socket, "' closed the connection without an answer"));
    answer.append(buffer.data(), static_cast<size_t>(n));
    if (answer.size() > 16u << 20) throw Error(Code::corrupt, cat("the answer of '", socket, "' has no end"));
  }
  return answer.substr(0, answer.find('\n'));
}

}  // namespace glm53
