#include "tests/unit/image/fake_registry.h"

#include <array>
#include <chrono>
#include <poll.h>
#include <span>
#include <unistd.h>

#include "common/socket.h"
#include "common/strings.h"

namespace glm53::image::test {

FakeRegistry::FakeRegistry() : listener_(listen_tcp("127.0.0.1", 0)), storage_(listen_tcp("127.0.0.1", 0)) {
  port_ = local_port(listener_.get());
  storage_port_ = local_port(storage_.get());
  thread_ = std::thread([this] { run(); });
}

FakeRegistry::~FakeRegistry() {
  stop_ = true;
  thread_.join();
}

std::string FakeRegistry::name() const {
  return cat("127.0.0.1:", port_, "/engines/glm53");
}

void FakeRegistry::add(const Made& image, const std::string& tag) {
  const std::lock_guard lock(mutex_);
  for (const auto& [digest, bytes] : image.blobs) blobs_[digest] = bytes;
  if (!tag.empty()) tags_[tag] = image.digest;
}

void FakeRegistry::set(const std::string& digest, const std::string& bytes) {
  const std::lock_guard lock(mutex_);
  blobs_[digest] = bytes;
}

bool FakeRegistry::use(std::atomic<int>& counter) {
  int n = counter;
  while (n > 0) {
    if (counter.compare_exchange_weak(n, n - 1)) return true;
  }
  return n < 0;
}

void FakeRegistry::run() {
  while (!stop_) {
    std::array<pollfd, 2> fds{pollfd{listener_.get(), POLLIN, 0}, pollfd{storage_.get(), POLLIN, 0}};
    if (::poll(fds.data(), fds.size(), 20) <= 0) continue;
    for (size_t i = 0; i < fds.size(); ++i) {
      if ((fds[i].revents & POLLIN) == 0) continue;
      try {
        serve(fds[i].fd, i == 1);
      } catch (const std::exception&) {
        // The client left.
      }
    }
  }
}

void FakeRegistry::serve(int listener, bool storage) {
  const UniqueFd fd = accept_until(listener, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
  if (!fd) return;
  std::string head;
  while (head.find("\r\n\r\n") == std::string::npos) {
    std::array<char, 4096> block{};
    pollfd p{fd.get(), POLLIN, 0};
    if (::poll(&p, 1, 2000) <= 0) return;
    const ssize_t n = ::read(fd.get(), block.data(), block.size());
    if (n < 0 && errno == EAGAIN) continue;
    if (n <= 0) return;
    head.append(block.data(), static_cast<size_t>(n));
  }
  Request request;
  request.target = head.substr(4, head.find(' ', 4) - 4);
  for (const std::string& line : split(head, '\n')) {
    if (line.starts_with("Authorization: ")) request.authorization = trim(line.substr(15));
    if (line.starts_with("Range: bytes="))
      request.from = parse_int(line.substr(13, line.find('-', 13) - 13)).value_or(0);
  }
  if (storage && !request.authorization.empty()) leaked = true;
  Answer a = storage ? bytes(request.target.substr(1), request) : answer(request);
  std::string body = a.body;
  if (a.spoil && use(flip) && !body.empty()) body.back() = static_cast<char>(body.back() ^ 1);
  if (a.spoil && use(longer)) body += "more";
  const std::string length = cat("Content-Length: ", body.size(), "\r\n");
  if (a.spoil && use(cut)) body.resize(std::min(body.size(), static_cast<size_t>(cut_after)));
  if (a.spoil) body_bytes += static_cast<int64_t>(body.size());
  const std::string whole = cat("HTTP/1.1 ", a.status, " X\r\nConnection: close\r\n", length, a.headers, "\r\n", body);
  send_all(fd.get(), std::as_bytes(std::span(whole.data(), whole.size())));
}

FakeRegistry::Answer FakeRegistry::answer(const Request& request) {
  const std::string base = "/v2/engines/glm53/";
  if (request.target.starts_with("/token?")) {
    ++tokens;
    if (!credentials.empty() && request.authorization != "Basic " + credentials) return {401, "", "no"};
    return {200, "", cat(R"({"token":")", token, R"(","expires_in":60})")};
  }
  if (use(loop)) return {307, cat("Location: ", request.target, "\r\n"), ""};
  if (use(limited)) return {429, "Retry-After: 0\r\n", ""};
  if (use(broken)) return {503, "", ""};
  if (use(refuse) || (!token.empty() && request.authorization != "Bearer " + token)) {
    return {401,
            cat("WWW-Authenticate: Bearer realm=\"http://127.0.0.1:", port_,
                "/token\",service=\"here\",scope=\"repository:engines/glm53:pull\"\r\n"),
            ""};
  }
  if (request.target.starts_with(base + "manifests/")) {
    const std::lock_guard lock(mutex_);
    std::string name = request.target.substr(base.size() + 10);
    if (const auto tag = tags_.find(name); tag != tags_.end()) name = tag->second;
    const auto found = blobs_.find(name);
    return found == blobs_.end() ? Answer{404, "", ""} : Answer{200, "", found->second};
  }
  if (!request.target.starts_with(base + "blobs/")) return {404, "", ""};
  const std::string digest = request.target.substr(base.size() + 6);
  if (redirect) return {307, cat("Location: http://127.0.0.1:", storage_port_, "/", digest, "\r\n"), ""};
  return bytes(digest, request);
}

FakeRegistry::Answer FakeRegistry::bytes(const std::string& digest, const Request& request) {
  const std::lock_guard lock(mutex_);
  const auto found = blobs_.find(digest);
  if (found == blobs_.end()) return {404, "", ""};
  const std::string& all = found->second;
  const auto from = static_cast<size_t>(request.from);
  const bool layer = all.size() > 2000;
  if (from == 0 || from >= all.size() || use(no_range)) return {200, "", all, layer};
  ++ranges;
  return {206, cat("Content-Range: bytes ", from, "-", all.size() - 1, "/", all.size(), "\r\n"), all.substr(from),
          layer};
}

}  // namespace glm53::image::test
