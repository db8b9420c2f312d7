#include "fake_hub.h"

#include <algorithm>
#include <chrono>
#include <poll.h>

#include <nlohmann/json.hpp>
#include <sys/socket.h>

#include "agent/hub/blob_hash.h"
#include "agent/hub/names.h"
#include "common/error.h"
#include "common/json.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53::test {
namespace {

void send_text(int fd, std::string_view text) {
  send_all(fd, std::as_bytes(std::span(text.data(), text.size())));
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// %41 -> A.
std::string decode(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size()) {
      out += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16));
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

FakeHub::FakeHub() : hub_listener_(listen_tcp("127.0.0.1", 0)), cdn_listener_(listen_tcp("127.0.0.1", 0)) {
  hub_port_ = local_port(hub_listener_.get());
  cdn_port_ = local_port(cdn_listener_.get());
  hub_thread_ = std::thread([this] { accept(hub_listener_.get(), false); });
  cdn_thread_ = std::thread([this] { accept(cdn_listener_.get(), true); });
}

FakeHub::~FakeHub() {
  stop_ = true;
  hub_thread_.join();
  cdn_thread_.join();
  for (Connection& c : connections_) ::shutdown(c.fd.get(), SHUT_RDWR);
  for (Connection& c : connections_) c.thread.join();
}

std::string FakeHub::endpoint() const {
  return cat("http://127.0.0.1:", hub_port_);
}

std::string FakeHub::cdn() const {
  return cat("127.0.0.1:", cdn_port_);
}

const std::string& FakeHub::commit() {
  static const std::string commit(40, 'c');
  return commit;
}

void FakeHub::add(const std::string& repo, const std::string& path, const std::string& content, bool lfs) {
  const std::lock_guard lock(world_);
  repos_[repo][path] = {content, lfs, hub::hash_of(content, lfs ? 64 : 40), ""};
}

void FakeHub::remove(const std::string& repo, const std::string& path) {
  const std::lock_guard lock(world_);
  repos_[repo].erase(path);
}

void FakeHub::list_as(const std::string& repo, const std::string& path, const std::string& name) {
  const std::lock_guard lock(world_);
  repos_[repo][path].listed = name;
}

void FakeHub::set_token(const std::string& token) {
  const std::lock_guard lock(world_);
  token_ = token;
}

void FakeHub::set_page(size_t entries) {
  const std::lock_guard lock(world_);
  page_ = entries;
}

std::optional<HubFile> FakeHub::by_etag(const std::string& etag) {
  const std::lock_guard lock(world_);
  for (const auto& [repo, files] : repos_) {
    for (const auto& [path, file] : files) {
      if (file.etag == etag) return file;
    }
  }
  return std::nullopt;
}

bool FakeHub::use(std::atomic<int>& counter) {
  int n = counter;
  while (n > 0) {
    if (counter.compare_exchange_weak(n, n - 1)) return true;
  }
  return n < 0;
}

void FakeHub::accept(int listener, bool cdn) {
  while (!stop_) {
    UniqueFd fd = accept_until(listener, std::chrono::steady_clock::now() + std::chrono::milliseconds(50));
    if (!fd) continue;
    const std::lock_guard lock(mutex_);
    Connection& c = connections_.emplace_back();
    c.fd = std::move(fd);
    c.thread = std::thread([this, raw = c.fd.get(), cdn] {
      try {
        serve(raw, cdn);
      } catch (const std::exception&) {
        // The client left, or a fault ended the connection.
      }
      ::shutdown(raw, SHUT_RDWR);
    });
  }
}

void FakeHub::serve(int fd, bool cdn) {
  std::string buffer;
  while (!stop_) {
    size_t end;
    while ((end = buffer.find("\r\n\r\n")) == std::string::npos) {
      char block[4096];
      const ssize_t n = ::recv(fd, block, sizeof block, 0);
      if (n <= 0 || buffer.size() > 65536) return;
      buffer.append(block, static_cast<size_t>(n));
    }
    Request request;
    for (const std::string& line : split(buffer.substr(0, end), '\n')) {
      const std::string text(trim(line));
      if (request.method.empty()) {
        const auto words = split(text, ' ');
        request.method = words.at(0);
        request.target = words.at(1);
      } else if (const size_t colon = text.find(':'); colon != std::string::npos) {
        request.headers[lower(text.substr(0, colon))] = std::string(trim(text.substr(colon + 1)));
      }
    }
    buffer.erase(0, end + 4);
    while (use(faults.silent) && !stop_) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (cdn) {
      if (request.headers.contains("authorization")) token_leaked = true;
      if (use(faults.expired)) {
        reply(fd, "403 Forbidden", "", "<Error>Request has expired</Error>", false);
        continue;
      }
      const std::string etag = request.target.substr(1, request.target.find('?') - 1);
      const std::optional<HubFile> found = by_etag(etag);
      if (found && request.target.ends_with("?sig=SECRETSIGNATURE")) {
        answer_content(fd, *found, request);
      } else {
        reply(fd, "404 Not Found", "", "", false);
      }
    } else {
      answer(fd, request);
    }
  }
}

void FakeHub::answer(int fd, const Request& request) {
  const bool head = request.method == "HEAD";
  const auto auth = request.headers.find("authorization");
  std::string token;
  std::vector<std::string> repos;
  {
    const std::lock_guard lock(world_);
    token = token_;
    for (const auto& [repo, files] : repos_) repos.push_back(repo);
  }
  if (!token.empty() && (auth == request.headers.end() || auth->second != "Bearer " + token)) {
    return reply(fd, "401 Unauthorized", "X-Error-Code: RepoNotFound\r\n", "{\"error\":\"Repository not found\"}",
                 head);
  }
  if (use(faults.limited)) {
    return reply(fd, "429 Too Many Requests", cat("RateLimit: \"resolvers\";r=0;t=", faults.limited_s.load(), "\r\n"),
                 "", head);
  }
  if (use(faults.broken)) return reply(fd, "503 Service Unavailable", "", "", head);
  if (faults.status != 0) {
    return reply(fd, cat(faults.status.load(), " Whatever"),
                 cat("X-Error-Code: ", faults.error_code, "\r\nX-Error-Message: ", faults.error_message, "\r\n"), "",
                 head);
  }
  const std::string path = decode(request.target.substr(0, request.target.find('?')));
  for (const std::string& repo : repos) {
    const std::string api = cat("/api/models/", repo, "/");
    if (path.starts_with(api)) {
      ++api_requests;
      const std::string rest = path.substr(api.size());
      if (rest == "revision/main" || rest == "revision/" + commit()) {
        return reply(fd, "200 OK", "", cat("{\"id\":\"", repo, "\",\"sha\":\"", commit(), "\"}"), head);
      }
      if (rest == "tree/" + commit()) return answer_tree(fd, repo, request);
      return reply(fd, "404 Not Found", "X-Error-Code: RevisionNotFound\r\n", "{}", head);
    }
    const std::string resolve = cat("/", repo, "/resolve/", commit(), "/");
    if (path.starts_with(resolve)) return answer_resolve(fd, repo, path.substr(resolve.size()), request);
  }
  reply(fd, "401 Unauthorized", "X-Error-Code: RepoNotFound\r\n", "{\"error\":\"Repository not found\"}", head);
}

void FakeHub::answer_tree(int fd, const std::string& repo, const Request& request) {
  if (use(faults.index_html)) return reply(fd, "200 OK", "", "<html>please log in</html>", false);
  size_t from = 0;
  if (const size_t at = request.target.find("cursor="); at != std::string::npos) {
    from = std::stoul(request.target.substr(at + 7));
  }
  nlohmann::ordered_json page = nlohmann::ordered_json::array();
  page.push_back({{"type", "directory"}, {"path", "some-folder"}, {"oid", std::string(40, '0')}, {"size", 0}});
  size_t n = 0;
  std::string next;
  std::unique_lock lock(world_);
  for (const auto& [path, file] : repos_[repo]) {
    if (n++ < from) continue;
    if (n > from + page_) {
      next = cat("Link: <", endpoint(), "/api/models/", repo, "/tree/", commit(),
                 "?recursive=true&expand=false&cursor=", use(faults.endless_pages) ? from : from + page_,
                 ">; rel=\"next\"\r\n");
      break;
    }
    nlohmann::ordered_json entry = {
        {"type", "file"}, {"path", file.listed.empty() ? path : file.listed}, {"size", file.content.size()}};
    if (file.lfs) {
      entry["oid"] = std::string(40, '1');
      entry["lfs"] = {{"oid", file.etag}, {"size", file.content.size()}, {"pointerSize", 135}};
      entry["xetHash"] = std::string(64, '2');
    } else {
      entry["oid"] = file.etag;
    }
    page.push_back(std::move(entry));
  }
  lock.unlock();
  reply(fd, "200 OK", next, dump(page), false);
}

void FakeHub::answer_resolve(int fd, const std::string& repo, const std::string& path, const Request& request) {
  const bool head = request.method == "HEAD";
  if (head) ++heads;
  std::optional<HubFile> found;
  {
    const std::lock_guard lock(world_);
    const auto& files = repos_[repo];
    if (const auto at = files.find(path); at != files.end()) found = at->second;
  }
  const std::string commit_line =
      cat("X-Repo-Commit: ", use(faults.wrong_commit) ? std::string(40, 'd') : commit(), "\r\n");
  if (!found || (path.starts_with("model-00001") && use(faults.missing)))
    return reply(fd, "404 Not Found", commit_line + "X-Error-Code: EntryNotFound\r\n", "", head);
  if (use(faults.loop)) return reply(fd, "302 Found", cat("Location: ", request.target, "\r\n"), "", head);
  if (use(faults.hop)) {
    // Every hop is another authority as text, and the same server.
    const std::string host = request.headers.contains("host") ? request.headers.at("host") : "";
    const std::string other = host.starts_with("127.0.0.1") ? "localhost" : "127.0.0.1";
    return reply(fd, "302 Found", cat("Location: http://", other, ":", hub_port_, request.target, "\r\n"), "", head);
  }
  const HubFile& file = *found;
  const std::string etag = use(faults.wrong_etag) ? std::string(file.etag.size(), 'e') : file.etag;
  if (file.lfs) {
    return reply(fd, "302 Found",
                 cat(commit_line, "X-Linked-Etag: \"", etag, "\"\r\nX-Linked-Size: ", file.content.size(),
                     "\r\nX-Xet-Hash: ", std::string(64, '2'), "\r\nLocation: http://", cdn(), "/", file.etag,
                     "?sig=SECRETSIGNATURE\r\n"),
                 "", head);
  }
  if (head) {
    return send_text(fd, cat("HTTP/1.1 200 OK\r\n", commit_line, "ETag: W/\"", etag,
                             "\"\r\nContent-Length: ", file.content.size(), "\r\n\r\n"));
  }
  answer_content(fd, file, request);
}

void FakeHub::answer_content(int fd, const HubFile& file, const Request& request) {
  ++gets;
  if (file.lfs && use(faults.html)) {
    return reply(fd, "200 OK", "Content-Type: text/html\r\n", "<html>We are sorry</html>", false);
  }
  const auto size = static_cast<int64_t>(file.content.size());
  int64_t first = 0, last = size - 1;
  const auto range = request.headers.find("range");
  const bool part = range != request.headers.end() && !use(faults.ignore_range);
  if (part) {
    const auto bounds = split(range->second.substr(6), '-');
    first = std::stoll(bounds.at(0));
    last = std::stoll(bounds.at(1));
  }
  std::string body = file.content.substr(static_cast<size_t>(first), static_cast<size_t>(last - first + 1));
  if (!body.empty() && use(faults.flip)) body[body.size() / 2] = static_cast<char>(body[body.size() / 2] ^ 1);
  if (use(faults.truncate)) {
    send_text(fd, cat("HTTP/1.1 ",
                      part ? cat("206 Partial Content\r\nContent-Range: bytes ", first, "-", last, "/", size)
                           : std::string("200 OK"),
                      "\r\nConnection: close\r\n\r\n", body.substr(0, body.size() / 2)));
    body_bytes += static_cast<int64_t>(body.size() / 2);
    throw Error(Code::cancelled, "closed on purpose");
  }
  const int64_t shift = part && use(faults.wrong_range) ? 1 : 0;
  send_text(fd,
            cat("HTTP/1.1 ",
                part ? cat("206 Partial Content\r\nContent-Range: bytes ", first + shift, "-", last + shift, "/", size)
                     : std::string("200 OK"),
                "\r\nETag: \"", file.etag, "\"\r\nContent-Length: ", body.size(), "\r\n\r\n"));
  const int now = ++in_flight_;
  int most = max_parallel;
  while (now > most && !max_parallel.compare_exchange_weak(most, now)) {
  }
  try {
    send_body(fd, body);
  } catch (...) {
    --in_flight_;
    throw;
  }
  --in_flight_;
}

void FakeHub::send_body(int fd, const std::string& body) {
  const bool freeze = use(faults.freeze);
  const int64_t cut_after = freeze || use(faults.cut) ? faults.cut_after.load() : -1;
  const int64_t rate = faults.bytes_per_s;
  const size_t piece = rate > 0 ? std::max<size_t>(1, static_cast<size_t>(rate / 50)) : size_t{65536};
  const size_t end = cut_after < 0 ? body.size() : std::min(body.size(), static_cast<size_t>(cut_after));
  for (size_t at = 0; at < end && !stop_; at += piece) {
    const size_t n = std::min(piece, end - at);
    send_text(fd, std::string_view(body).substr(at, n));
    body_bytes += static_cast<int64_t>(n);
    if (rate > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  while (freeze && end < body.size() && !stop_) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (cut_after >= 0 && end < body.size()) throw Error(Code::cancelled, "cut on purpose");
}

void FakeHub::reply(int fd, const std::string& status, const std::string& headers, const std::string& body,
                    bool head) const {
  send_text(fd, cat("HTTP/1.1 ", status, "\r\n", headers, "Content-Length: ", head ? 0 : body.size(), "\r\n\r\n",
                    head ? "" : body));
}

}  // namespace glm53::test
