// A registry on loopback that misbehaves on command, and the storage host it redirects blobs to. Plain sockets: one
// request a connection, one connection at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "common/file.h"
#include "tests/unit/image/fixture.h"

namespace glm53::image::test {

class FakeRegistry {
 public:
  FakeRegistry();
  ~FakeRegistry();
  FakeRegistry(const FakeRegistry&) = delete;
  FakeRegistry& operator=(const FakeRegistry&) = delete;

  /// "127.0.0.1:port/engines/glm53".
  std::string name() const;
  /// Manifests and blobs; `tag` names its manifest.
  void add(const Made& image, const std::string& tag = {});
  void set(const std::string& digest, const std::string& bytes);

  // Counters count down with each answer that they spoil; -1 = always.
  std::atomic<int> cut{0}, limited{0}, broken{0}, refuse{0}, flip{0}, longer{0}, loop{0}, no_range{0};
  std::atomic<int64_t> cut_after{100};
  std::atomic<bool> redirect{true};  ///< blobs lie on the other host
  std::string token;                 ///< "" = none is asked for
  std::string credentials;           ///< of the token server, base64
  std::atomic<bool> leaked{false};   ///< the storage saw a token
  std::atomic<int> tokens{0}, ranges{0};
  std::atomic<int64_t> body_bytes{0};

 private:
  struct Request {
    std::string target, authorization;
    int64_t from = 0;
  };
  struct Answer {
    int status = 200;
    std::string headers, body;
    bool spoil = false;  ///< a blob's bytes: cut and others apply
  };
  void run();
  void serve(int listener, bool storage);
  Answer answer(const Request& request);
  Answer bytes(const std::string& digest, const Request& request);
  static bool use(std::atomic<int>& counter);

  UniqueFd listener_, storage_;
  uint16_t port_ = 0, storage_port_ = 0;
  std::mutex mutex_;
  std::map<std::string, std::string> blobs_, tags_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace glm53::image::test
