#include "engine/api/admin_socket.h"

#include <array>
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

namespace glm53::api {

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxClients = 32;
constexpr size_t kMaxLine = 1 << 20;

/// Answers are small and the agent reads: what does not fit the socket's buffer is dropped with the connection.
void answer(const UniqueFd& fd, const Json& json) noexcept {
  try {
    const std::string line = dump(json) + "\n";
    if (::send(fd.get(), line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT) != static_cast<ssize_t>(line.size())) {
      ::shutdown(fd.get(), SHUT_RDWR);
    }
  } catch (const std::exception& e) {
    log::warn(cat("admin socket: ", std::string_view(e.what())));
  }
}

}  // namespace

struct AdminSocket::Client {
  std::shared_ptr<UniqueFd> fd;
  std::string buffer;
};

AdminSocket::AdminSocket(std::string path, AdminHandler handler)
    : path_(std::move(path)),
      handler_(std::move(handler)),
      listener_(listen_unix(path_)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw_errno(Code::internal, "cannot create an eventfd");
  thread_ = std::thread([this] { run(); });
}

AdminSocket::~AdminSocket() {
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) != sizeof one) log::warn("cannot wake the admin socket's thread");
  thread_.join();
  ::unlink(path_.c_str());
}

void AdminSocket::run() noexcept {
  try {
    std::list<Client> clients;
    while (true) {
      std::vector<pollfd> fds = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
      for (const Client& c : clients) fds.push_back({c.fd->get(), POLLIN, 0});
      if (::poll(fds.data(), fds.size(), -1) < 0 && errno != EINTR) throw_errno(Code::internal, "cannot poll");
      if (fds[0].revents != 0) return;
      size_t i = 2;
      for (auto at = clients.begin(); at != clients.end(); ++i) {
        at = fds[i].revents == 0 || read(*at) ? std::next(at) : clients.erase(at);
      }
      if (fds[1].revents != 0) {
        UniqueFd fd = accept_until(listener_.get(), std::chrono::steady_clock::now());
        if (fd && clients.size() < kMaxClients) clients.push_back({std::make_shared<UniqueFd>(std::move(fd)), {}});
      }
    }
  } catch (const std::exception& e) {
    log::error(cat("the admin socket stopped: ", std::string_view(e.what())));
  }
}

bool AdminSocket::read(Client& client) {
  std::array<char, 4096> bytes;
  const ssize_t n = ::recv(client.fd->get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
  if (n < 0) return errno == EAGAIN || errno == EINTR;
  if (n == 0) return false;
  client.buffer.append(bytes.data(), static_cast<size_t>(n));
  for (size_t end; (end = client.buffer.find('\n')) != std::string::npos; client.buffer.erase(0, end + 1)) {
    command(client.buffer.substr(0, end), client.fd);
  }
  return client.buffer.size() <= kMaxLine;
}

void AdminSocket::command(const std::string& line, const std::shared_ptr<UniqueFd>& fd) {
  const AdminReply reply = [fd](const Json& json) { answer(*fd, json); };
  try {
    const Json json = parse_json(line);
    if (!json.is_object() || !json.contains("do") || !json["do"].is_string()) {
      throw Error(Code::usage, "a command is an object with a member `do`");
    }
    handler_(json["do"].get<std::string>(), json, reply);
  } catch (const Error& e) {
    reply({{"ok", false}, {"error", e.line()}});
  } catch (const std::exception& e) {
    reply({{"ok", false}, {"error", e.what()}});
  }
}

}  // namespace glm53::api
