#include "agent/supervise/supervisor.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <poll.h>
#include <set>
#include <signal.h>
#include <system_error>
#include <unistd.h>

#include <sys/eventfd.h>
#include <sys/syscall.h>

#include "agent/supervise/log_file.h"
#include "agent/supervise/scan.h"
#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace glm53::supervise {
namespace {

using std::chrono::steady_clock;
/// Between looks at logs and deadlines, and at processes for which the kernel gives no descriptor.
constexpr int kTickMs = 1000;
constexpr int kPollMs = 200;
constexpr Ms kLogPeriod{1000};

int64_t now_ms() {
  return std::chrono::duration_cast<Ms>(std::chrono::system_clock::now().time_since_epoch()).count();
}

UniqueFd open_pidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace

Supervisor::Supervisor(SupervisorOptions options, ProcessStore& store, std::unique_ptr<Launcher> launcher)
    : options_(std::move(options)), store_(store), launcher_(std::move(launcher)) {
  make_dirs(options_.run_dir + "/notify", 0750);
  make_dirs(options_.logs_dir, 0750);
  wake_fd_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd_) throw_errno(Code::unavailable, "cannot make an event descriptor");
  thread_ = std::thread([this] { run(); });
}

Supervisor::~Supervisor() {
  pause();
}

void Supervisor::pause() {
  stopping_ = true;
  wake();
  if (thread_.joinable()) thread_.join();
  // Only an empty folder goes.
  ::rmdir((options_.run_dir + "/notify").c_str());
}

void Supervisor::wake() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_fd_.get(), &one, sizeof one);
}

std::string Supervisor::log_of(const Entry& entry) const {
  return log_path(options_.logs_dir, entry.view.name, entry.view.generation);
}

void Supervisor::save(const Entry& entry) noexcept {
  try {
    store_.save(entry.view);
  } catch (const std::exception& e) {
    log::error(cat("cannot record ", entry.view.name, ": ", std::string_view(e.what())));
  }
}

void Supervisor::take_over(Entry entry) {
  entry.view.adopted = true;
  entry.heard = steady_clock::now();
  entry.pidfd = open_pidfd(entry.view.id.pid);
  entry.notices.emplace(notify_path(options_.run_dir, entry.view.name, entry.view.generation));
  entry.log_bytes = log_size(log_of(entry));
  if (entry.view.stop_requested) entry.kill_at = entry.heard + std::chrono::seconds(20);
  log::info(cat("adopted ", entry.view.name, " of generation ", entry.view.generation, ", pid ", entry.view.id.pid));
  Key key{entry.view.name, entry.view.generation};
  entries_.insert_or_assign(std::move(key), std::move(entry));
}

void Supervisor::adopt() {
  const std::lock_guard lock(mutex_);
  for (ProcessRecord& record : store_.current()) {
    Entry entry;
    static_cast<ProcessRecord&>(entry.view) = std::move(record);
    if (entry.view.ended_at == 0 && alive(entry.view.id)) {
      take_over(std::move(entry));
      continue;
    }
    if (entry.view.ended_at == 0) {
      mark_ended(entry, std::nullopt, 0);
      log::warn(cat(entry.view.name, " of generation ", entry.view.generation, " ended while no agent ran"));
    }
    Key key{entry.view.name, entry.view.generation};
    entries_.insert_or_assign(std::move(key), std::move(entry));
  }
  for (const FoundProcess& found : find_processes(options_.run_dir)) {
    const auto it = entries_.find({found.name, found.generation});
    if (it != entries_.end() && it->second.view.ended_at == 0) continue;
    Entry entry;
    entry.view.name = found.name;
    entry.view.generation = found.generation;
    entry.view.id = found.id;
    entry.view.admin_socket = cat(options_.run_dir, "/", found.name, ".sock");
    entry.view.started_at = now_ms();
    save(entry);
    take_over(std::move(entry));
  }
  std::set<std::string> live;
  for (const auto& [key, entry] : entries_) {
    if (entry.view.ended_at == 0) live.insert(notify_path(options_.run_dir, key.first, key.second));
  }
  std::error_code ec;
  for (const auto& file : std::filesystem::directory_iterator(options_.run_dir + "/notify", ec)) {
    std::error_code ignored;
    if (!live.contains(file.path().string())) std::filesystem::remove(file.path(), ignored);
  }
  wake();
}

void Supervisor::start(const StartSpec& spec) {
  const std::lock_guard lock(mutex_);
  if (entries_.contains({spec.name, spec.generation})) return;
  Entry entry;
  entry.view.name = spec.name;
  entry.view.generation = spec.generation;
  entry.view.admin_socket = spec.admin_socket;
  entry.view.config_hash = spec.config_hash;
  entry.view.started_at = now_ms();
  entry.heard = steady_clock::now();
  try {
    entry.notices.emplace(notify_path(options_.run_dir, spec.name, spec.generation));
    const UniqueFd log = open_log(log_of(entry));
    SpawnOptions options;
    options.argv = spec.argv;
    options.env = spec.env;
    options.env["NOTIFY_SOCKET"] = entry.notices->path();
    options.config = spec.config;
    options.capture_output = false;
    options.output_fd = log.get();
    Child child = launcher_->launch(spec.name, options);
    entry.view.id = child.id;
    entry.pidfd = std::move(child.pidfd);
    log::info(cat("started ", spec.name, " of generation ", spec.generation, ", pid ", child.id.pid));
    save(entry);
  } catch (const Error& e) {
    entry.view.last_error = e.line();
    log::error(cat("cannot start ", spec.name, ": ", e.line()));
    mark_ended(entry, rank_exit(e.code()), 0);
  }
  entries_.insert_or_assign({spec.name, spec.generation}, std::move(entry));
  forget_older(spec.name);
  try {
    prune_logs(options_.logs_dir, spec.name, options_.keep_generations);
  } catch (const std::exception& e) {
    log::warn(cat("cannot remove old logs: ", std::string_view(e.what())));
  }
  wake();
}

/// Ended processes of older generations are history, not state.
void Supervisor::forget_older(const std::string& name) {
  uint64_t newest = 0;
  for (const auto& [key, entry] : entries_) {
    if (key.first == name) newest = std::max(newest, key.second);
  }
  std::erase_if(entries_, [&](const auto& item) {
    return item.first.first == name && item.first.second != newest && item.second.view.ended_at != 0;
  });
}

void Supervisor::stop(const std::string& name, uint64_t generation, Ms grace) {
  const std::lock_guard lock(mutex_);
  const auto it = entries_.find({name, generation});
  if (it == entries_.end() || it->second.view.ended_at != 0) return;
  Entry& entry = it->second;
  const Steady deadline = steady_clock::now() + grace;
  if (entry.kill_at && *entry.kill_at <= deadline) return;
  const bool first = !entry.kill_at;
  entry.kill_at = deadline;
  entry.view.stop_requested = true;
  save(entry);
  if (first) {
    log::info(cat("stopping ", name, " of generation ", generation));
    signal_group(entry.view.id, SIGTERM);
  }
  wake();
}

std::vector<ProcessView> Supervisor::snapshot() const {
  const std::lock_guard lock(mutex_);
  const Steady now = steady_clock::now();
  std::vector<ProcessView> views;
  for (const auto& [key, entry] : entries_) {
    ProcessView view = entry.view;
    view.silent_for = std::chrono::duration_cast<Ms>(now - entry.heard);
    view.extended_for = std::max(Ms(0), std::chrono::duration_cast<Ms>(entry.extended_until - now));
    views.push_back(std::move(view));
  }
  return views;
}

void Supervisor::touch(const std::string& name, uint64_t generation) {
  {
    const std::lock_guard lock(mutex_);
    const auto it = entries_.find({name, generation});
    if (it == entries_.end() || it->second.view.ended_at != 0) return;
    Entry& entry = it->second;
    entry.heard = steady_clock::now();
    if (entry.view.ready || !entry.view.adopted) return;
    entry.view.ready = true;
    entry.view.phase = Phase::ready;
    save(entry);
  }
  options_.on_change();
}

void Supervisor::set_log_limits(uint64_t max_bytes, int keep_generations) {
  const std::lock_guard lock(mutex_);
  options_.log_max_bytes = max_bytes;
  options_.keep_generations = keep_generations;
}

void Supervisor::run() {
  int timeout = kTickMs;
  while (!stopping_) {
    try {
      if (!wait_for_events(timeout)) continue;
      bool changed = false;
      timeout = kTickMs;
      {
        const std::lock_guard lock(mutex_);
        const Steady now = steady_clock::now();
        for (auto& [key, entry] : entries_) {
          if (entry.view.ended_at != 0) continue;
          check(entry, now, changed);
          if (entry.view.ended_at == 0 && !entry.pidfd) timeout = kPollMs;
          if (entry.kill_at && entry.view.ended_at == 0) timeout = std::min(timeout, kPollMs);
        }
        if (now - logs_tended_ >= kLogPeriod) {
          logs_tended_ = now;
          for (auto& [key, entry] : entries_) {
            if (entry.view.ended_at == 0) tend_log(entry, now);
          }
        }
      }
      if (changed) options_.on_change();
    } catch (const std::exception& e) {
      log::error(cat("supervisor: ", std::string_view(e.what())));
      std::this_thread::sleep_for(Ms(kPollMs));
    }
  }
}

bool Supervisor::wait_for_events(int timeout_ms) {
  std::vector<pollfd> fds{{wake_fd_.get(), POLLIN, 0}};
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, entry] : entries_) {
      if (entry.view.ended_at != 0) continue;
      if (entry.notices) fds.push_back({entry.notices->fd(), POLLIN, 0});
      if (entry.pidfd) fds.push_back({entry.pidfd.get(), POLLIN, 0});
    }
  }
  // A descriptor closed meanwhile by start() or an end only makes poll() return early.
  if (::poll(fds.data(), fds.size(), timeout_ms) < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(wake_fd_.get(), &count, sizeof count);
  return !stopping_;
}

void Supervisor::check(Entry& entry, Steady now, bool& changed) {
  receive(entry, now, changed);
  const bool gone = entry.pidfd ? [&] {
    pollfd p{entry.pidfd.get(), POLLIN, 0};
    return ::poll(&p, 1, 0) == 1;
  }()
                                : !alive(entry.view.id);
  if (gone) {
    receive(entry, now, changed);  // what it said last
    collect_end(entry, changed);
    return;
  }
  if (entry.kill_at && now >= *entry.kill_at) {
    log::warn(cat(entry.view.name, " of generation ", entry.view.generation, " did not stop in time: killing it"));
    signal_group(entry.view.id, SIGKILL);
    entry.kill_at = now + std::chrono::seconds(5);
  }
}

void Supervisor::receive(Entry& entry, Steady now, bool& changed) {
  while (entry.notices) {
    const auto datagram = entry.notices->receive();
    if (!datagram) return;
    if (take_notice(entry, parse_notice(*datagram), now)) {
      changed = true;
      save(entry);
    }
  }
}

bool Supervisor::take_notice(Entry& entry, const Notice& notice, Steady now) {
  ProcessView& view = entry.view;
  bool changed = false;
  entry.heard = now;
  if (notice.phase && *notice.phase != view.phase) {
    view.phase = *notice.phase;
    view.progress.reset();
    changed = true;
  }
  if (notice.progress) view.progress = notice.progress;
  if (notice.status) view.status = log::redact(*notice.status);
  if (notice.error) {
    view.last_error = log::redact(*notice.error);
    changed = true;
  }
  if (notice.extend_us) {
    constexpr int64_t kMost = int64_t{3600} * 1000000;
    entry.extended_until = now + std::chrono::microseconds(std::min(*notice.extend_us, kMost));
  }
  // READY=1 may have been sent while no agent listened.
  if ((notice.ready || (notice.watchdog && view.adopted)) && !view.ready) {
    view.ready = true;
    view.phase = Phase::ready;
    view.progress.reset();
    changed = true;
  }
  return changed;
}

void Supervisor::collect_end(Entry& entry, bool& changed) {
  // Its descendants go with it; the group can be named as long as the leader is not reaped.
  signal_group(entry.view.id, SIGKILL);
  std::optional<int> code;
  int signal = 0;
  try {
    if (const auto status = try_wait(entry.view.id.pid)) {
      if (status->signal == 0) code = status->code;
      signal = status->signal;
    }
  } catch (const Error&) {
    // Not our child: adopted.
  }
  mark_ended(entry, code, signal);
  changed = true;
  const std::string how = code || signal != 0 ? describe_exit(code.value_or(0), signal) : "exit unknown";
  const std::string line = cat(entry.view.name, " of generation ", entry.view.generation, " ended: ", how);
  if (entry.view.stop_requested) {
    log::info(line);
  } else {
    log::warn(line);
  }
}

void Supervisor::mark_ended(Entry& entry, std::optional<int> code, int signal) {
  entry.view.ended_at = std::max<int64_t>(now_ms(), 1);
  entry.view.exit_code = code;
  entry.view.exit_signal = signal;
  entry.view.ready = false;
  entry.view.progress.reset();
  if (entry.notices) entry.notices->remove();
  entry.notices.reset();
  entry.pidfd.reset();
  if (!entry.view.admin_socket.empty()) {
    const bool in_use = std::any_of(entries_.begin(), entries_.end(), [&](const auto& item) {
      return &item.second != &entry && item.second.view.ended_at == 0 &&
             item.second.view.admin_socket == entry.view.admin_socket;
    });
    if (!in_use) ::unlink(entry.view.admin_socket.c_str());
  }
  save(entry);
}

void Supervisor::tend_log(Entry& entry, Steady now) {
  const std::string path = log_of(entry);
  const uint64_t bytes = log_size(path);
  // While it starts, a growing log is a sign of life; once ready only the watchdog is.
  if (bytes != entry.log_bytes && !entry.view.ready) entry.heard = now;
  entry.log_bytes = bytes;
  try {
    if (rotate_log(path, options_.log_max_bytes)) entry.log_bytes = 0;
  } catch (const Error& e) {
    log::warn(e.line());
  }
}

}  // namespace glm53::supervise
