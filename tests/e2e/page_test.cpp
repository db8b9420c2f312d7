// The status page in headless Chromium: a browser that keeps to its Content-Security-Policy fills it from the API.
// Not in a tier: scripts/test.sh --full runs it where there is a Chromium; GLM53_SCREENSHOTS=FOLDER keeps what it saw.
#include <atomic>
#include <poll.h>
#include <thread>

#include <doctest/doctest.h>

#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

/// Carries a TCP port to the agent's unix socket, as `ssh -L PORT:/run/glm53/agent.sock` does.
class Tunnel {
 public:
  explicit Tunnel(std::string socket) : socket_(std::move(socket)), listener_(listen_tcp("127.0.0.1", 0)) {
    accepting_ = std::thread([this] {
      while (!stopping_) {
        UniqueFd client = accept_until(listener_.get(), std::chrono::steady_clock::now() + 100ms);
        if (client) carriers_.emplace_back([this, fd = client.release()] { carry(UniqueFd(fd)); });
      }
    });
  }
  ~Tunnel() {
    stopping_ = true;
    accepting_.join();
    for (auto& t : carriers_) t.join();
  }
  Tunnel(const Tunnel&) = delete;
  Tunnel& operator=(const Tunnel&) = delete;
  std::string url() const { return cat("http://localhost:", local_port(listener_.get()), "/"); }

 private:
  void carry(const UniqueFd& client) const {
    try {
      const UniqueFd agent = connect_unix(socket_);
      std::array<pollfd, 2> ends{{{client.get(), POLLIN, 0}, {agent.get(), POLLIN, 0}}};
      std::array<std::byte, 16384> buffer{};
      while (!stopping_) {
        if (::poll(ends.data(), ends.size(), 100) <= 0) continue;
        for (size_t i = 0; i < 2; ++i) {
          if (ends[i].revents == 0) continue;
          const ssize_t n = ::read(ends[i].fd, buffer.data(), buffer.size());
          if (n <= 0) return;
          send_all(ends[1 - i].fd, std::span(buffer).first(static_cast<size_t>(n)));
        }
      }
    } catch (const std::exception&) {
      // The browser or the agent left: so do we.
    }
  }
  const std::string socket_;
  const UniqueFd listener_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> carriers_;  // only the accepting thread, until it is joined
  std::thread accepting_;
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string browse(const LocalCluster& cluster, const std::string& url, const std::vector<std::string>& more) {
  std::vector<std::string> argv{"/usr/bin/env",
                                "chromium",
                                "--headless=new",
                                "--no-sandbox",
                                "--disable-gpu",
                                "--virtual-time-budget=6000",
                                "--enable-logging=stderr",
                                cat("--user-data-dir=", cluster.temp_dir(), "/browser")};
  argv.insert(argv.end(), more.begin(), more.end());
  argv.push_back(url);
  return run_program(argv, cluster.temp_dir(), 120s).output;
}

}  // namespace

TEST_CASE("the page shows a cluster that serves, and breaks no rule of its own policy") {
  LocalCluster cluster;
  cluster.up();
  const Tunnel tunnel(cluster.run_dir("head") + "/agent.sock");
  const std::string seen = browse(cluster, tunnel.url(), {"--dump-dom"});
  CAPTURE(seen);
  CHECK(contains(seen, ">up</span>"));
  CHECK(contains(seen, "<td>rank0</td>"));
  CHECK(contains(seen, "<td>rank1</td>"));
  CHECK(contains(seen, "cluster is up"));  // an event
  CHECK_FALSE(contains(seen, "Refused to"));
  CHECK_FALSE(contains(seen, "Uncaught"));
  if (const auto folder = environment("GLM53_SCREENSHOTS")) {
    const auto shoot = [&](const std::string& name, const std::string& size, const std::string& scheme) {
      browse(cluster, tunnel.url(),
             {"--hide-scrollbars", "--window-size=" + size, cat("--screenshot=", *folder, "/", name, ".png"),
              "--blink-settings=preferredColorScheme=" + scheme});
    };
    shoot("light", "1280,1000", "1");
    shoot("dark", "1280,1000", "0");
    shoot("narrow", "420,1400", "1");
  }
}
