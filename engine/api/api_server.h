// The API process as an object: everything between its configuration and its sockets.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "engine/api/settings.h"

namespace glm53::api {

class ApiServer {
 public:
  /// Loads the tokenizer, checks it, and listens on the rank, admin and HTTP sockets (port 0 picks one). Throws Error.
  /// `tick` runs on a server thread about once a second.
  explicit ApiServer(const ApiConfig& config, std::function<void()> tick = {});
  ~ApiServer();
  ApiServer(const ApiServer&) = delete;
  ApiServer& operator=(const ApiServer&) = delete;

  uint16_t port() const;
  /// Admits no new requests.
  void drain();
  /// Requests that are not finished.
  size_t unfinished() const;
  /// Stops: answers in flight have until `grace`.
  void stop(std::chrono::milliseconds grace);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace glm53::api
