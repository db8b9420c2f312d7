// Commands of the agent: one JSON object a line on a unix socket (docs/rank-contract.md).
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include <nlohmann/json_fwd.hpp>

#include "common/file.h"

namespace glm53::api {

/// Answers one command; may be called from any thread, at once or later, and outlive the socket.
using AdminReply = std::function<void(const nlohmann::ordered_json& answer)>;
/// `command` is an object with a string `do`. Errors thrown become {"ok":false,"error":…}.
using AdminHandler =
    std::function<void(const std::string& name, const nlohmann::ordered_json& command, AdminReply reply)>;

class AdminSocket {
 public:
  /// Throws Error(busy) when the socket is in use.
  AdminSocket(std::string path, AdminHandler handler);
  ~AdminSocket();  ///< stops, removes the socket file
  AdminSocket(const AdminSocket&) = delete;
  AdminSocket& operator=(const AdminSocket&) = delete;

 private:
  struct Client;
  void run() noexcept;
  bool read(Client& client);
  void command(const std::string& line, const std::shared_ptr<UniqueFd>& fd);

  const std::string path_;
  const AdminHandler handler_;
  UniqueFd listener_, wake_;
  std::thread thread_;
};

}  // namespace glm53::api
