// A rank's admin socket (docs/rank-contract.md): one JSON object a line, one line back.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include <nlohmann/json_fwd.hpp>

#include "common/file.h"

namespace glm53 {

/// One thread for all clients. Answers {"ok":true, members of the handler's object}, or {"ok":false,"error":…} when the
/// handler throws.
class AdminServer {
 public:
  using Handler = std::function<nlohmann::ordered_json(const std::string& command)>;
  /// The handler runs on the server's thread and must not block. Throws Error when the socket cannot be made.
  AdminServer(std::string path, Handler handler);
  ~AdminServer();  ///< removes the socket
  AdminServer(const AdminServer&) = delete;
  AdminServer& operator=(const AdminServer&) = delete;

 private:
  void loop();
  std::string answer(const std::string& line) const;

  const std::string path_;
  const Handler handler_;
  UniqueFd listener_, wake_;  // wake_: eventfd that ends the thread
  std::thread thread_;
};

}  // namespace glm53
