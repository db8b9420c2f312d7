#include "common/process.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace std::chrono_literals;

namespace {

auto in(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + time;
}

SpawnOptions shell(const std::string& script) {
  SpawnOptions options;
  options.argv = {"/bin/sh", "-c", script};
  options.env = {{"PATH", "/usr/bin:/bin"}};
  return options;
}

/// Everything that the child writes until it closes its output.
std::string output_of(const Child& child) {
  std::string text;
  std::array<char, 4096> buffer;
  while (true) {
    pollfd p{child.output.get(), POLLIN, 0};
    if (::poll(&p, 1, 20000) != 1) return text + "<timeout>";
    const ssize_t n = ::read(child.output.get(), buffer.data(), buffer.size());
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) return text;
    text.append(buffer.data(), static_cast<size_t>(n));
  }
}

ExitStatus end_of(const Child& child) {
  const auto status = wait_until(child.id.pid, in(20s));
  REQUIRE(status);
  return *status;
}

}  // namespace

TEST_CASE("process: exit codes, signals, output, environment") {
  const Child child = spawn(shell("echo out; echo err >&2; env; exit 7"));
  CHECK(child.output);
  const std::string output = output_of(child);
  CHECK(output.find("out\nerr\n") == 0);
  CHECK(output.find("PATH=/usr/bin:/bin\n") != std::string::npos);
  CHECK(output.find("HOME=") == std::string::npos);
  CHECK(end_of(child).code == 7);
  CHECK_THROWS_AS(try_wait(child.id.pid), Error);  // reaped
  CHECK(end_of(spawn(shell("kill -9 $$"))).signal == 9);
}

TEST_CASE("process: what cannot be started is reported with its reason") {
  SpawnOptions options;
  options.argv = {"/no/such/program"};
  CHECK_THROWS_WITH_AS(spawn(options), "cannot start '/no/such/program': No such file or directory", Error);
  const test::TempDir folder;
  write_file(folder / "text", "no program", 0600);
  options.argv = {folder / "text"};
  CHECK_THROWS_WITH_AS(spawn(options), doctest::Contains("Permission denied"), Error);
  options.argv = {};
  CHECK_THROWS_AS(spawn(options), Error);
}

TEST_CASE("process: the configuration arrives on descriptor 3 and ends; nothing else is inherited") {
  const UniqueFd leak(::open("/dev/null", O_RDONLY));  // without O_CLOEXEC
  const UniqueFd high(::fcntl(leak.get(), F_DUPFD, 200));
  SpawnOptions options = shell("cat <&3; ls /proc/self/fd");
  options.config = std::string(500000, 'c');
  const Child child = spawn(options);
  const std::string output = output_of(child);
  CHECK(output.starts_with(options.config));
  CHECK(end_of(child).code == 0);
  // ls adds the descriptor of the folder it reads.
  CHECK(output.substr(options.config.size()) == "0\n1\n2\n3\n4\n");
  const Child bare = spawn(shell("ls /proc/self/fd"));
  CHECK(output_of(bare) == "0\n1\n2\n3\n");
  CHECK(end_of(bare).code == 0);
}

TEST_CASE("process: output into a file") {
  const test::TempDir folder;
  const UniqueFd log(::open((folder / "log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  SpawnOptions options = shell("echo out; echo err >&2");
  options.output_fd = log.get();
  const Child child = spawn(options);
  CHECK_FALSE(child.output);
  CHECK(end_of(child).code == 0);
  CHECK(read_file(folder / "log") == "out\nerr\n");
}

TEST_CASE("process: signals ignored or blocked here are not so in the child") {
  ::signal(SIGTERM, SIG_IGN);
  const Child child = spawn(shell("kill -TERM $$; echo survived"));
  ::signal(SIGTERM, SIG_DFL);
  CHECK(output_of(child).empty());
  CHECK(end_of(child).signal == SIGTERM);
}

TEST_CASE("process: identity, life and group") {
  const auto self = identify(::getpid());
  REQUIRE(self);
  CHECK(alive(*self));
  CHECK(resident_bytes(::getpid()) > 100000);
  CHECK_FALSE(identify(0));
  CHECK_FALSE(identify(-1));

  // The shell's child keeps the output open until the whole group is killed.
  const Child child = spawn(shell("sleep 1000 & echo started; wait"));
  std::array<char, 64> buffer;
  pollfd p{child.output.get(), POLLIN, 0};
  REQUIRE(::poll(&p, 1, 20000) == 1);
  REQUIRE(::read(child.output.get(), buffer.data(), buffer.size()) == 8);
  CHECK(alive(child.id));
  CHECK(identify(child.id.pid) == child.id);
  CHECK_FALSE(try_wait(child.id.pid));
  CHECK_FALSE(wait_until(child.id.pid, in(1ms)));
  ProcessId other = child.id;
  ++other.start_ticks;
  CHECK_FALSE(alive(other));
  CHECK_FALSE(signal_group(other, SIGKILL));
  CHECK(alive(child.id));
  CHECK(signal_group(child.id, SIGKILL));
  CHECK(output_of(child).empty());
  if (child.pidfd) {
    pollfd exited{child.pidfd.get(), POLLIN, 0};
    CHECK(::poll(&exited, 1, 20000) == 1);
  }
  CHECK_FALSE(alive(child.id));  // also before it is reaped
  CHECK(end_of(child).signal == SIGKILL);
  CHECK_FALSE(signal_group(child.id, SIGKILL));
  CHECK(resident_bytes(child.id.pid) == 0);
}

TEST_CASE("process: many short children leave no descriptors behind") {
  const auto open_descriptors = [] {
    int n = 0;
    for (int fd = 0; fd < 1024; ++fd) n += ::fcntl(fd, F_GETFD) != -1 ? 1 : 0;
    return n;
  };
  const int before = open_descriptors();
  for (int i = 0; i < 20; ++i) {
    SpawnOptions options = shell("exit 3");
    options.config = "{}";
    CHECK(end_of(spawn(options)).code == 3);
    options.argv = {"/no/such/program"};
    CHECK_THROWS_AS(spawn(options), Error);
  }
  CHECK(open_descriptors() == before);
}

TEST_CASE("process: the folder of the program") {
  CHECK(executable_dir().starts_with("/"));
}
