#include "agent/hub/command.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <poll.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sys/ioctl.h>
#include <sys/signalfd.h>

#include "common/json.h"
#include "common/log.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kDefaultConfig = "/etc/glm53/config.toml";
constexpr int kInterrupted = 130;

bool truthy(const std::string& value) {
  return value == "1" || value == "true" || value == "TRUE" || value == "yes" || value == "YES" || value == "on" ||
         value == "ON";
}

/// A variable that counts: set, and not empty.
std::optional<std::string> get(const Environment& env, const char* name) {
  const auto value = env(name);
  return value && !value->empty() ? value : std::nullopt;
}

/// What other clients wrote: their file may be readable by others, which deserves a word, not a refusal.
std::string standard_token(const std::string& path, const std::function<void(const std::string&)>& note) {
  try {
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0 && (info.st_mode & 0077u) != 0) {
      note(cat("warning: the token file ", path, " can be read by other users (chmod 600 ", path, ")"));
    }
    return std::string(trim(read_file(path, 1 << 16)));
  } catch (const Error& e) {
    if (e.code() == Code::not_found) return {};
    throw;
  }
}

void choose_cache(Settings& s, std::string& home, const CommandOptions& options, const Config& config,
                  const Environment& env, const std::function<void(const std::string&)>& note) {
  home = config.text("hub.home").empty() ? std::string() : config.path("hub.home");
  if (const auto value = get(env, "HF_HOME")) {
    note(cat("override hub.home=", *value, " (from env HF_HOME)"));
    home = *value;
  }
  if (home.empty()) home = default_home();
  s.cache = home + "/hub";
  for (const char* name : {"HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"}) {
    if (const auto value = get(env, name)) {
      note(cat("override cache ", *value, " (from env ", name, ")"));
      s.cache = *value;
    }
  }
  if (!options.cache.empty()) s.cache = options.cache;
}

std::string choose_token(const std::string& home, const Config& config, const Environment& env,
                         const std::function<void(const std::string&)>& note) {
  if (const auto value = get(env, "HF_TOKEN")) {
    note("override the Hub's token (from env HF_TOKEN)");
    return std::string(trim(*value));
  }
  if (const auto path = get(env, "HF_TOKEN_PATH")) return standard_token(*path, note);
  if (!config.text("hub.token_file").empty()) return read_secret(config.path("hub.token_file"));
  return standard_token(home + "/token", note);
}

void choose_revision(DownloadRequest& r, const CommandOptions& options, const Config& config) {
  const size_t at = options.what.find('@');
  r.repo = options.what.substr(0, at);
  const std::string revision = at == std::string::npos ? std::string() : options.what.substr(at + 1);
  if (at != std::string::npos && revision.empty()) {
    throw Error(Code::usage, cat("'", options.what, "' names no revision after the @"),
                "glm53ctl download org/name@main");
  }
  for (const std::string prefix : {"model", "draft"}) {
    const std::string& repo = config.text(prefix + ".repo");
    if (repo.empty() || (r.repo.empty() ? prefix != "model" : r.repo != repo)) continue;
    r.repo = repo;
    const std::string& pinned = config.text(prefix + ".revision");
    r.revision = !revision.empty() ? revision : pinned.empty() ? "main" : pinned;
    r.configured = revision.empty() || revision == pinned;
    if (prefix == "model") {
      r.fallback_repo = config.text("model.fallback_repo");
      r.fallback_revision = config.text("model.fallback_revision");
    }
    return;
  }
  if (r.repo.empty()) {
    throw Error(Code::usage, "no repository is named", "glm53ctl download ORGANISATION/NAME, or set model.repo");
  }
  if (!revision.empty()) r.revision = revision;
}

int width_of_terminal() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20 ? size.ws_col : 100;
}

Json to_json(const Progress& p) {
  return {{"type", "progress"},
          {"phase", p.phase},
          {"file", p.file},
          {"bytes_done", p.bytes_done},
          {"bytes_total", p.bytes_total},
          {"bytes_downloaded", p.bytes_downloaded},
          {"bytes_reused", p.bytes_reused},
          {"files_done", p.files_done},
          {"files_total", p.files_total},
          {"rate", static_cast<int64_t>(p.rate)},
          {"average", static_cast<int64_t>(p.average)},
          {"eta_s", p.eta_s},
          {"streams", p.streams},
          {"retries", p.retries}};
}

/// Progress for whoever looks: one line that changes on a terminal, a line every ten seconds elsewhere, JSON lines.
class Show {
 public:
  explicit Show(bool json) : json_(json), terminal_(!json && ::isatty(STDERR_FILENO) == 1) {}
  void progress(const Progress& p) {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    const bool turn = p.phase != phase_;
    const auto period = terminal_ ? Millis(0) : json_ ? Millis(1000) : Millis(10000);
    if (!turn && now - shown_ < period) return;
    shown_ = now;
    phase_ = p.phase;
    if (json_) {
      std::cout << dump(to_json(p)) << std::endl;
    } else if (terminal_) {
      std::cerr << "\r\x1b[K" << progress_line(p, width_of_terminal() - 1) << std::flush;
      line_open_ = true;
    } else if (p.phase == "transferring" && !turn) {
      std::cerr << progress_line(p, 200) << std::endl;
    }
  }
  void event(const std::string& text) {
    const std::lock_guard lock(mutex_);
    const std::string safe = log::redact(text);
    if (json_) {
      std::cout << dump({{"type", "event"}, {"text", safe}}) << std::endl;
    } else {
      close_line();
      std::cerr << safe << std::endl;
    }
  }
  void close_line() {
    if (line_open_) std::cerr << "\r\x1b[K" << std::flush;
    line_open_ = false;
  }

 private:
  const bool json_, terminal_;
  std::mutex mutex_;
  Clock::time_point shown_{};
  std::string phase_;
  bool line_open_ = false;
};

/// Ctrl-C and SIGTERM end the download in order: what arrived is journaled. Made before other threads.
class StopOnSignal {
 public:
  StopOnSignal() {
    sigemptyset(&set_);
    for (const int s : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set_, s);
    if (pthread_sigmask(SIG_BLOCK, &set_, nullptr) != 0) throw_errno(Code::internal, "cannot block signals");
    fd_ = UniqueFd(::signalfd(-1, &set_, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) throw_errno(Code::internal, "cannot watch signals");
  }
  void watch(Downloader& downloader) {
    thread_ = std::jthread([this, &downloader](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        pollfd p{fd_.get(), POLLIN, 0};
        if (::poll(&p, 1, 50) > 0) return downloader.cancel();
      }
    });
  }

 private:
  sigset_t set_{};
  UniqueFd fd_;
  std::jthread thread_;
};

int fail(const Error& e, bool json, Show& show) {
  show.close_line();
  const std::string what = log::redact(e.what()), remedy = log::redact(e.remedy());
  if (json) {
    std::cout << dump({{"error", {{"code", std::string(name(e.code()))}, {"message", what}, {"remedy", remedy}}}})
              << "\n";
  } else {
    std::cerr << "error: " << what << "\n";
    if (!remedy.empty()) std::cerr << "  try: " << remedy << "\n";
  }
  return e.code() == Code::cancelled ? kInterrupted : std::max(1, ctl_exit(e.code()));
}

void print_result(const DownloadRequest& request, const DownloadResult& r, bool json) {
  if (json) {
    std::cout << dump({{"type", "result"},
                       {"repo", request.repo},
                       {"commit", r.commit},
                       {"snapshot", r.snapshot},
                       {"source", r.source},
                       {"files", r.files},
                       {"bytes", r.bytes},
                       {"bytes_downloaded", r.bytes_downloaded},
                       {"bytes_reused", r.bytes_reused},
                       {"complete", r.complete},
                       {"dry_run", request.dry_run}})
              << "\n";
    return;
  }
  std::cerr << request.repo << "@" << r.commit << ": " << r.files << " files, " << human_bytes(r.bytes)
            << (request.dry_run ? " would be needed"
                                : cat(" (", human_bytes(r.bytes_downloaded), " downloaded, ",
                                      human_bytes(r.bytes_reused), " already here)"))
            << "\n";
  std::cout << r.snapshot << "\n";
}

Config load_config(const std::string& path) {
  if (!path.empty()) return Config::load(path);
  return ::access(kDefaultConfig, R_OK) == 0 ? Config::load(kDefaultConfig) : Config();
}

std::string human_span(int64_t s) {
  if (s < 60) return cat(s, " s");
  if (s < 3600) return cat(s / 60, " min ", s % 60, " s");
  return cat(s / 3600, " h ", s % 3600 / 60, " min");
}

}  // namespace

std::pair<Settings, DownloadRequest> resolve_command(const CommandOptions& options, const Config& config,
                                                     const Environment& real_env,
                                                     const std::function<void(const std::string&)>& note) {
  const Environment env = options.no_env ? [](const std::string&) { return std::optional<std::string>(); } : real_env;
  Settings s;
  DownloadRequest r;
  choose_revision(r, options, config);
  std::string home;
  choose_cache(s, home, options, config, env, note);
  const std::string& state = config.path("paths.state");
  s.journal_dir = ::access(state.c_str(), W_OK) == 0 ? state + "/hub" : Journal::default_dir();
  s.endpoint = config.text("hub.endpoint");
  if (const auto value = get(env, "HF_ENDPOINT")) {
    note(cat("override hub.endpoint=", *value, " (from env HF_ENDPOINT)"));
    s.endpoint = *value;
  }
  while (s.endpoint.ends_with('/')) s.endpoint.pop_back();
  s.offline = options.offline || config.boolean("hub.offline");
  for (const char* name : {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}) {
    if (const auto value = get(env, name); value && truthy(*value)) {
      note(cat("override hub.offline=true (from env ", name, ")"));
      s.offline = true;
    }
  }
  if (!s.offline) s.token = choose_token(home, config, env, note);
  if (s.token.find_first_of("\r\n\t ") != std::string::npos) {
    throw Error(Code::config, "the Hub's token has spaces or line ends within",
                "put nothing but the token in its file");
  }
  s.mirrors = config.list("hub.mirrors");
  s.token_hosts = config.list("hub.token_hosts");
  s.parallel_files = static_cast<int>(config.integer("hub.parallel_files"));
  s.parallel_ranges = static_cast<int>(config.integer("hub.parallel_ranges"));
  s.segment_bytes = config.integer("hub.segment_bytes");
  s.limit_rate = config.integer("hub.limit_rate");
  if (!options.limit_rate.empty()) {
    std::string text = options.limit_rate;
    if (text.ends_with('K') || text.ends_with('M') || text.ends_with('G')) text += "B";
    const auto rate = parse_bytes(text);
    if (!rate || *rate < 0)
      throw Error(Code::usage, cat("--limit-rate ", options.limit_rate, ": no rate"), "--limit-rate 200M");
    s.limit_rate = *rate;
  }
  s.disk_reserve = config.integer("hub.disk_reserve");
  s.keep_bad = config.boolean("hub.keep_bad");
  s.transport.ca_file = config.text("hub.ca_file").empty() ? "" : config.path("hub.ca_file");
  s.transport.connect_timeout = config.duration("hub.connect_timeout");
  s.transport.first_byte_timeout = config.duration("hub.first_byte_timeout");
  s.transport.stall_window = config.duration("hub.stall_timeout");
  s.transport.stall_bytes = s.transport.stall_window.count() * 64;  // 64 KB a second
  s.retry.give_up_after = config.duration("hub.give_up_after");
  s.retry.max_wait = config.duration("hub.max_wait");
  r.include = options.include;
  r.exclude = config.list("hub.exclude");
  r.exclude.insert(r.exclude.end(), options.exclude.begin(), options.exclude.end());
  r.verify = options.verify;
  r.dry_run = options.dry_run;
  return {std::move(s), std::move(r)};
}

std::string progress_line(const Progress& p, int width) {
  if (p.phase == "planning") return "asking what there is";
  const double share = p.bytes_total > 0 ? static_cast<double>(p.bytes_done) / static_cast<double>(p.bytes_total) : 1;
  constexpr int kCells = 20;
  const int full = static_cast<int>(std::clamp(share, 0.0, 1.0) * kCells);
  std::string line =
      cat("[", std::string(static_cast<size_t>(full), '#'), std::string(static_cast<size_t>(kCells - full), '-'), "] ",
          static_cast<int64_t>(std::clamp(share, 0.0, 1.0) * 100), "% ", human_bytes(p.bytes_done), " of ",
          human_bytes(p.bytes_total), ", ", human_bytes(static_cast<int64_t>(p.rate)), "/s");
  if (p.eta_s >= 0) line += cat(", ", human_span(p.eta_s), " left");
  line += cat(", ", p.files_done, "/", p.files_total, " files");
  if (p.retries > 0) line += cat(", ", p.retries, " retries");
  if (!p.file.empty()) line += cat(", ", p.file);
  if (line.size() > static_cast<size_t>(width)) {
    size_t end = static_cast<size_t>(width);
    while (end > 0 && (static_cast<unsigned char>(line[end]) & 0xc0) == 0x80) --end;  // whole characters
    line.resize(end);
  }
  return line;
}

int download_command(const CommandOptions& options) {
  Show show(options.json);
  try {
    StopOnSignal signals;
    const Config config = load_config(options.config);
    auto [settings, request] =
        resolve_command(options, config, environment, [&](const std::string& text) { show.event(text); });
    if (!settings.token.empty()) log::add_secret(settings.token);
    Downloader downloader(settings);
    signals.watch(downloader);
    const DownloadResult result = downloader.run(
        request, [&](const Progress& p) { show.progress(p); }, [&](const std::string& e) { show.event(e); });
    show.close_line();
    print_result(request, result, options.json);
    return 0;
  } catch (const Error& e) {
    return fail(e, options.json, show);
  }
}

}  // namespace glm53::hub
