// A Hub on loopback that speaks the protocol and misbehaves on command. Written on plain sockets, because no decent
// HTTP server sends half an answer. Two ports: the Hub itself and the host of its signed URLs.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/file.h"

namespace glm53::test {

struct HubFile {
  std::string content;
  bool lfs = false;
  std::string etag;    ///< computed by add()
  std::string listed;  ///< another name in the listing; "" = the key
};

/// Counters count down with each answer that they spoil; -1 = always.
struct Faults {
  std::atomic<int> cut{0};  ///< close the connection after cut_after bytes of a body
  std::atomic<int64_t> cut_after{1000};
  std::atomic<int> missing{0};          ///< 404 EntryNotFound of the first shard
  std::atomic<int> freeze{0};           ///< send cut_after bytes of a body, then nothing, the connection stays
  std::atomic<int> truncate{0};         ///< announce and send fewer bytes, without a Content-Length
  std::atomic<int> ignore_range{0};     ///< 200 with everything
  std::atomic<int> wrong_range{0};      ///< 206 of another part
  std::atomic<int> wrong_etag{0};       ///< X-Linked-Etag of something else
  std::atomic<int> wrong_commit{0};     ///< X-Repo-Commit of something else
  std::atomic<int> limited{0};          ///< 429 with RateLimit r=0
  std::atomic<int64_t> limited_s{0};    ///< its t; the client waits one second more
  std::atomic<int> expired{0};          ///< 403 of a signed URL
  std::atomic<int> html{0};             ///< a web page with 200 instead of a big file
  std::atomic<int> broken{0};           ///< 503
  std::atomic<int> flip{0};             ///< one byte of a body differs
  std::atomic<int> loop{0};             ///< redirects to itself
  std::atomic<int> hop{0};              ///< a chain of hosts without end
  std::atomic<int> silent{0};           ///< never answers
  std::atomic<int> endless_pages{0};    ///< the next page is the same page
  std::atomic<int> index_html{0};       ///< a web page instead of a listing
  std::atomic<int64_t> bytes_per_s{0};  ///< of each body; 0 = as fast as it goes
  std::atomic<int> status{0};           ///< every API answer has this status…
  std::string error_code;               ///< …and this X-Error-Code
  std::string error_message;
};

class FakeHub {
 public:
  FakeHub();
  ~FakeHub();
  FakeHub(const FakeHub&) = delete;
  FakeHub& operator=(const FakeHub&) = delete;

  std::string endpoint() const;
  /// "127.0.0.1:port" of the signed URLs.
  std::string cdn() const;
  void add(const std::string& repo, const std::string& path, const std::string& content, bool lfs);
  void remove(const std::string& repo, const std::string& path);
  /// The listing names it otherwise.
  void list_as(const std::string& repo, const std::string& path, const std::string& name);
  /// Files of a repository, for checks.
  const std::map<std::string, HubFile>& files(const std::string& repo) { return repos_[repo]; }
  /// The one commit that every repository has.
  static const std::string& commit();
  void set_token(const std::string& token);  ///< asked for by the Hub; "" = none
  void set_page(size_t entries);

  Faults faults;
  std::atomic<int64_t> body_bytes{0};  ///< of files, sent
  std::atomic<int> api_requests{0}, heads{0}, gets{0}, max_parallel{0};
  std::atomic<bool> token_leaked{false};  ///< the other host saw a token

 private:
  struct Request {
    std::string method, target;
    std::map<std::string, std::string> headers;  ///< names in lower case
  };
  struct Connection {
    UniqueFd fd;
    std::thread thread;
  };
  void accept(int listener, bool cdn);
  void serve(int fd, bool cdn);
  void answer(int fd, const Request& request);
  void answer_tree(int fd, const std::string& repo, const Request& request);
  void answer_resolve(int fd, const std::string& repo, const std::string& path, const Request& request);
  void answer_content(int fd, const HubFile& file, const Request& request);
  void reply(int fd, const std::string& status, const std::string& headers, const std::string& body, bool head) const;
  void send_body(int fd, const std::string& body);
  static bool use(std::atomic<int>& counter);

  std::optional<HubFile> by_etag(const std::string& etag);

  UniqueFd hub_listener_, cdn_listener_;
  uint16_t hub_port_ = 0, cdn_port_ = 0;
  std::mutex world_;  ///< of what a test may change while the server answers
  std::map<std::string, std::map<std::string, HubFile>> repos_;
  std::string token_;
  size_t page_ = 1000;
  std::atomic<int> in_flight_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::list<Connection> connections_;
  std::thread hub_thread_, cdn_thread_;
};

}  // namespace glm53::test
