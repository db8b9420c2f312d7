#include "common/process.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <poll.h>
#include <thread>
#include <unistd.h>

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "common/error.h"
#include "common/strings.h"

// The C libraries of both distributions lack wrappers for some of these, older kernels the calls themselves.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

namespace glm53 {

namespace {

struct Stat {
  char state = '?';
  uint64_t start_ticks = 0;
};

/// State and start time from /proc/PID/stat, of zombies too.
std::optional<Stat> read_stat(pid_t pid) {
  if (pid <= 0) return std::nullopt;
  std::string text;
  try {
    text = read_file(cat("/proc/", pid, "/stat"), 1 << 16);
  } catch (const Error&) {
    return std::nullopt;
  }
  // The command's name stands in parentheses and may hold anything, parentheses and blanks too.
  const size_t end = text.rfind(')');
  if (end == std::string::npos || end + 2 > text.size()) return std::nullopt;
  const auto fields = split(trim(std::string_view(text).substr(end + 1)), ' ');
  static constexpr size_t state = 3, start_time = 22, first = 3;  // numbered as in proc(5)
  if (fields.size() <= start_time - first || fields[state - first].empty()) return std::nullopt;
  const auto ticks = parse_int(fields[start_time - first]);
  if (!ticks) return std::nullopt;
  return Stat{fields[state - first][0], static_cast<uint64_t>(*ticks)};
}

UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

struct Pipe {
  UniqueFd read, write;
};

Pipe make_pipe() {
  int fds[2];
  if (::pipe2(fds, O_CLOEXEC) != 0) throw_errno(Code::unavailable, "cannot make a pipe");
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

/// The text in a sealed memory file, read from its beginning: a reader can neither block nor change it.
UniqueFd memory_file(std::string_view text) {
  UniqueFd fd(::memfd_create("config", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno(Code::unavailable, "cannot make a memory file for the configuration");
  while (!text.empty()) {
    const ssize_t n = ::write(fd.get(), text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, "cannot write the configuration to a memory file");
    text.remove_prefix(static_cast<size_t>(n));
  }
  // Seals are a safeguard; some file systems behind memfd do not have them.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL);
  if (::lseek(fd.get(), 0, SEEK_SET) != 0) throw_errno(Code::unavailable, "cannot rewind a memory file");
  return fd;
}

/// A copy of the descriptor above those that the child rearranges.
UniqueFd above_standard(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 16));
  if (!copy) throw_errno(Code::unavailable, "cannot copy a descriptor");
  return copy;
}

/// Everything that the child needs between fork and exec, prepared before: there only async-signal-safe calls are
/// allowed.
struct ChildPlan {
  std::vector<char*> argv, envp;
  int input = -1, output = -1, config = -1, errors = -1;
  int max_fd = 0;
  pid_t parent = 0;
  bool new_session = false, die_with_parent = false;
};

void close_others(const ChildPlan& plan) {
  const int first = plan.config >= 0 ? 4 : 3;
  const auto close_between = [&plan](unsigned from, unsigned to) {
    if (from > to || ::syscall(SYS_close_range, from, to, 0) == 0) return;
    const int last = to > static_cast<unsigned>(plan.max_fd) ? plan.max_fd : static_cast<int>(to);
    for (int fd = static_cast<int>(from); fd <= last; ++fd) ::close(fd);
  };
  close_between(static_cast<unsigned>(first), static_cast<unsigned>(plan.errors - 1));
  close_between(static_cast<unsigned>(plan.errors + 1), ~0u);
}

bool arrange_child(const ChildPlan& plan) {
  if (plan.new_session && ::setsid() < 0) return false;
  if (plan.die_with_parent) {
    if (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) return false;
    if (::getppid() != plan.parent) ::_exit(127);  // died before prctl: nobody is left to tell
  }
  if (::dup2(plan.input, 0) < 0) return false;
  if (plan.output >= 0 && (::dup2(plan.output, 1) < 0 || ::dup2(plan.output, 2) < 0)) return false;
  if (plan.config >= 0 && ::dup2(plan.config, 3) < 0) return false;
  close_others(plan);
  // Ignored signals and the mask would be inherited through exec.
  for (int s = 1; s < NSIG; ++s) ::signal(s, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  return ::pthread_sigmask(SIG_SETMASK, &none, nullptr) == 0;
}

[[noreturn]] void run_child(const ChildPlan& plan) {
  if (arrange_child(plan)) ::execve(plan.argv[0], plan.argv.data(), plan.envp.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t n = ::write(plan.errors, &error, sizeof error);
  ::_exit(127);
}

/// fork() with all signals blocked, so that no handler of the parent runs in the child.
pid_t fork_child(const ChildPlan& plan) {
  sigset_t all, before;
  ::sigfillset(&all);
  if (::pthread_sigmask(SIG_SETMASK, &all, &before) != 0) throw Error(Code::internal, "cannot block signals");
  const pid_t pid = ::fork();
  if (pid == 0) run_child(plan);
  const int error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return pid;
}

int descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > 1 << 20) return 1 << 20;
  return static_cast<int>(limit.rlim_cur);
}

/// The errno with which exec failed; 0 when the program runs (the pipe was closed by exec).
int exec_error(int fd) {
  int error = 0;
  while (true) {
    const ssize_t n = ::read(fd, &error, sizeof error);
    if (n < 0 && errno == EINTR) continue;
    return n == sizeof error ? error : 0;
  }
}

std::optional<ExitStatus> wait_status(pid_t pid, int flags) {
  int status = 0;
  pid_t done = 0;
  do {
    done = ::waitpid(pid, &status, flags);
  } while (done < 0 && errno == EINTR);
  if (done < 0) throw_errno(Code::internal, cat("cannot wait for process ", pid));
  if (done == 0) return std::nullopt;
  if (WIFSIGNALED(status)) return ExitStatus{0, WTERMSIG(status)};
  return ExitStatus{WEXITSTATUS(status), 0};
}

}  // namespace

std::optional<std::string> environment(const std::string& name) {
  const char* value = std::getenv(name.c_str());  // NOLINT(concurrency-mt-unsafe): see the header
  if (value == nullptr) return std::nullopt;
  return value;
}

std::string boot_id() {
  try {
    return std::string(trim(read_file("/proc/sys/kernel/random/boot_id", 256)));
  } catch (const Error&) {
    return "unknown";  // some sandboxes hide the file; pid and start time still identify
  }
}

std::optional<ProcessId> identify(pid_t pid) {
  const auto stat = read_stat(pid);
  if (!stat || stat->state == 'Z' || stat->state == 'X') return std::nullopt;
  return ProcessId{boot_id(), pid, stat->start_ticks};
}

bool alive(const ProcessId& id) {
  return identify(id.pid) == id;
}

uint64_t resident_bytes(pid_t pid) {
  try {
    const auto fields = split(read_file(cat("/proc/", pid, "/statm"), 4096), ' ');
    const auto pages = fields.size() > 1 ? parse_int(fields[1]) : std::nullopt;
    return pages ? static_cast<uint64_t>(*pages) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)) : 0;
  } catch (const Error&) {
    return 0;
  }
}

Child spawn(const SpawnOptions& options) {
  if (options.argv.empty()) throw Error(Code::internal, "spawn needs a program");
  const std::string& program = options.argv[0];
  ChildPlan plan;
  std::vector<std::string> arguments = options.argv, environment;
  for (const auto& [key, value] : options.env) environment.push_back(cat(key, "=", value));
  for (auto& argument : arguments) plan.argv.push_back(argument.data());
  for (auto& variable : environment) plan.envp.push_back(variable.data());
  plan.argv.push_back(nullptr);
  plan.envp.push_back(nullptr);

  const UniqueFd input_file(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!input_file) throw_errno(Code::unavailable, "cannot open /dev/null");
  const UniqueFd input = above_standard(input_file.get());
  Pipe error_pipe = make_pipe(), output_pipe;
  UniqueFd errors = above_standard(error_pipe.write.get());
  error_pipe.write.reset();
  UniqueFd output, config;
  if (options.output_fd >= 0) {
    output = above_standard(options.output_fd);
  } else if (options.capture_output) {
    output_pipe = make_pipe();
    output = above_standard(output_pipe.write.get());
    output_pipe.write.reset();
    if (::fcntl(output_pipe.read.get(), F_SETFL, O_NONBLOCK) != 0) throw_errno(Code::internal, "fcntl");
  }
  if (!options.config.empty()) config = above_standard(memory_file(options.config).get());
  plan.input = input.get();
  plan.output = output.get();
  plan.config = config.get();
  plan.errors = errors.get();
  plan.max_fd = descriptor_limit();
  plan.parent = ::getpid();
  plan.new_session = options.new_session;
  plan.die_with_parent = options.die_with_parent;

  const pid_t pid = fork_child(plan);
  if (pid < 0) throw_errno(Code::unavailable, cat("cannot start '", program, "'"));
  // Only the child may hold the write end now, or the read below would never end.
  errors.reset();
  if (const int error = exec_error(error_pipe.read.get()); error != 0) {
    wait_status(pid, 0);
    errno = error;
    throw_errno(error == ENOENT || error == ENOTDIR ? Code::not_found : Code::unavailable,
                cat("cannot start '", program, "'"));
  }
  Child child;
  const auto stat = read_stat(pid);  // a zombie keeps its entry until it is waited for
  child.id = {boot_id(), pid, stat ? stat->start_ticks : 0};
  child.pidfd = open_pidfd(pid);
  child.output = std::move(output_pipe.read);
  return child;
}

std::optional<ExitStatus> try_wait(pid_t pid) {
  return wait_status(pid, WNOHANG);
}

std::optional<ExitStatus> wait_until(pid_t pid, std::chrono::steady_clock::time_point deadline) {
  using namespace std::chrono_literals;
  const UniqueFd pidfd = open_pidfd(pid);
  while (true) {
    if (auto status = try_wait(pid)) return status;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) return std::nullopt;
    if (pidfd) {
      pollfd p{pidfd.get(), POLLIN, 0};
      const auto ms = std::min<int64_t>(std::chrono::ceil<std::chrono::milliseconds>(left).count(), 1 << 30);
      if (::poll(&p, 1, static_cast<int>(ms)) < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
    } else {
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, 10ms));
    }
  }
}

bool signal_group(const ProcessId& id, int signal) {
  // An unreaped leader still holds its number, so its group (perhaps with living members) is the right one.
  const auto stat = read_stat(id.pid);
  if (!stat || stat->start_ticks != id.start_ticks || boot_id() != id.boot_id) return false;
  if (::kill(-id.pid, signal) == 0) return true;
  if (errno == ESRCH && ::kill(id.pid, signal) == 0) return true;  // not the leader of a group
  if (errno == ESRCH) return false;
  throw_errno(Code::denied, cat("cannot signal process group ", id.pid));
}

uint64_t raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) throw_errno(Code::internal, "getrlimit");
  rlimit raised = limit;
  raised.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &raised) == 0 ? raised.rlim_cur : limit.rlim_cur;
}

std::string executable_dir() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) throw Error(Code::internal, cat("cannot read /proc/self/exe: ", error.message()));
  return path.parent_path().string();
}

}  // namespace glm53
