#include "engine/runtime/admin_server.h"

#include <array>
#include <cerrno>
#include <chrono>
#include <list>
#include <poll.h>
#include <unistd.h>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLine = 64 * 1024;
constexpr size_t kMaxClients = 64;

struct Client {
  UniqueFd fd;
  std::string text;
};

/// False when the client is to be closed.
bool read_some(Client& c) {
  std::array<char, 4096> chunk;
  const ssize_t n = ::recv(c.fd.get(), chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  c.text.append(chunk.data(), static_cast<size_t>(n));
  return n > 0 && c.text.size() <= kMaxLine;
}

/// Answers are short: one that does not fit the socket's buffer belongs to a client that does not read.
bool write_line(const Client& c, const std::string& line) {
  return ::send(c.fd.get(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(line.size());
}

}  // namespace

AdminServer::AdminServer(std::string path, Handler handler) : path_(std::move(path)), handler_(std::move(handler)) {
  listener_ = listen_unix(path_, 0600);
  wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
  if (!wake_) throw_errno(Code::internal, "admin socket: eventfd");
  thread_ = std::thread([this] {
    try {
      loop();
    } catch (const std::exception& e) {
      log::error(cat("admin socket: ", std::string(e.what())));
    }
  });
}

AdminServer::~AdminServer() {
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) != sizeof one) log::error("admin socket: the thread cannot be woken");
  thread_.join();
  ::unlink(path_.c_str());
}

std::string AdminServer::answer(const std::string& line) const {
  Json out{{"ok", true}};
  try {
    const Json question = parse_json(line, {.max_bytes = kMaxLine, .max_depth = 8});
    if (!question.is_object() || !question.contains("do") || !question["do"].is_string())
      throw Error(Code::usage, "expected one object a line with a member \"do\"");
    out.update(handler_(question["do"].get<std::string>()));
  } catch (const std::exception& e) {
    out = Json{{"ok", false}, {"error", e.what()}};
  }
  return dump(out) + "\n";
}

void AdminServer::loop() {
  std::list<Client> clients;
  for (;;) {
    std::vector<pollfd> fds{{wake_.get(), POLLIN, 0}};
    for (const Client& c : clients) fds.push_back({c.fd.get(), POLLIN, 0});
    if (clients.size() < kMaxClients) fds.push_back({listener_.get(), POLLIN, 0});
    if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) throw_errno(Code::internal, "admin socket: poll");
    if (fds[0].revents != 0) return;
    size_t i = 1;
    for (auto at = clients.begin(); at != clients.end(); ++i) {
      bool keep = fds[i].revents == 0 || read_some(*at);
      for (size_t end; (end = at->text.find('\n')) != std::string::npos && keep;) {
        keep = write_line(*at, answer(at->text.substr(0, end)));
        at->text.erase(0, end + 1);
      }
      at = keep ? std::next(at) : clients.erase(at);
    }
    if (i < fds.size() && fds[i].revents != 0)
      if (UniqueFd fd = accept_until(listener_.get(), std::chrono::steady_clock::now()))
        clients.push_back({std::move(fd), {}});
  }
}

}  // namespace glm53
