#include "agent/image/command.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <iostream>
#include <poll.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sys/signalfd.h>

#include "agent/image/registry.h"
#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

using Json = nlohmann::ordered_json;
constexpr const char* kDefaultConfig = "/etc/glm53/config.toml";
constexpr int kInterrupted = 130;

/// Ctrl-C and SIGTERM end a command in order. Made before other threads.
class StopOnSignal {
 public:
  StopOnSignal() {
    sigset_t set{};
    sigemptyset(&set);
    for (const int s : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, s);
    if (pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) throw_errno(Code::internal, "cannot block signals");
    fd_ = UniqueFd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
    if (!fd_) throw_errno(Code::internal, "cannot watch signals");
    thread_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested()) {
        pollfd p{fd_.get(), POLLIN, 0};
        if (::poll(&p, 1, 50) > 0) return stopped.store(true);
      }
    });
  }
  std::atomic<bool> stopped{false};

 private:
  UniqueFd fd_;
  std::jthread thread_;
};

class Command {
 public:
  Command(const CommandOptions& options, const Config& config, const std::atomic<bool>& stopped)
      : options_(options), config_(config), stopped_(stopped), store_(store_options()) {}

  int run() {
    const std::string& action = options_.action;
    if (action == "install") return installed(install());
    if (action == "import") return installed(import());
    if (action == "list") return list();
    if (action == "use") return activated(store_.use(wanted()));
    if (action == "rollback") return activated(store_.rollback());
    if (action == "verify") return verify();
    if (action == "gc") return gc();
    if (action == "export") return export_tar();
    throw Error(Code::usage, cat("'", action, "' is no command of engine"), "glm53ctl engine --help");
  }

 private:
  StoreOptions store_options() {
    StoreOptions s;
    s.dir = options_.store.empty() ? store_dir(config_) : options_.store;
    s.check = [this] {
      if (stopped_) throw Error(Code::cancelled, "interrupted", "run it again: it goes on where it stopped");
    };
    return s;
  }
  std::string wanted() const {
    const std::string& name = options_.what.empty() ? config_.text("engine.image") : options_.what;
    if (!name.empty()) return name;
    throw Error(Code::usage, "no image is named", "name one, or set engine.image");
  }
  RegistryOptions registry_options() {
    RegistryOptions r;
    if (!config_.text("engine.credentials_file").empty()) {
      r.credentials = read_secret(config_.path("engine.credentials_file"));
      if (r.credentials.find(':') == std::string::npos) {
        throw Error(Code::config, "engine.credentials_file has no user and password", "put USER:TOKEN into it");
      }
    }
    r.transport.ca_file = config_.text("hub.ca_file").empty() ? "" : config_.path("hub.ca_file");
    r.transport.connect_timeout = config_.duration("hub.connect_timeout");
    r.transport.first_byte_timeout = config_.duration("hub.first_byte_timeout");
    r.transport.stall_window = config_.duration("hub.stall_timeout");
    r.transport.stall_bytes = r.transport.stall_window.count() * 64;
    r.transport.cancelled = &stopped_;
    r.retry.give_up_after = config_.duration("hub.give_up_after");
    r.retry.max_wait = config_.duration("hub.max_wait");
    r.report = [this](const std::string& text) { event(text); };
    r.progress = [this](int64_t done, int64_t total) { progress(done, total); };
    return r;
  }
  void event(const std::string& text) {
    const std::string safe = log::redact(text);
    if (options_.json) {
      std::cout << dump({{"type", "event"}, {"text", safe}}) << std::endl;
    } else {
      std::cerr << safe << std::endl;
    }
  }
  void progress(int64_t done, int64_t total) {
    const auto now = std::chrono::steady_clock::now();
    if (done < total && now - shown_ < std::chrono::seconds(1)) return;
    shown_ = now;
    if (options_.json) {
      std::cout << dump({{"type", "progress"}, {"bytes_done", done}, {"bytes_total", total}}) << std::endl;
    } else {
      std::cerr << human_bytes(done) << " of " << human_bytes(total) << std::endl;
    }
  }

  Bundle install() {
    const Reference reference = parse_reference(wanted());
    // What is installed needs no registry: it may be gone.
    if (!reference.digest.empty()) {
      for (const Bundle& b : store_.list()) {
        if (b.digest == reference.digest || b.asked == reference.digest) return b;
      }
    }
    Registry registry(reference, registry_options());
    const std::string digest = registry.resolve(store_);
    if (reference.digest.empty()) event(cat(wanted(), " is ", reference.pinned(digest)));
    registry.pull(store_, digest);
    return store_.install(digest, reference.pinned(digest));
  }
  Bundle import() {
    if (options_.file.empty()) throw Error(Code::usage, "no file is named", "glm53ctl engine import FILE");
    return store_.install(store_.import_tar(options_.file), "");
  }

  static Json to_json(const Bundle& b) {
    return {{"digest", b.digest},
            {"asked", b.asked},
            {"ref", b.ref},
            {"version", b.version},
            {"path", b.path},
            {"bytes", b.bytes},
            {"installed_at", b.installed_at},
            {"active", b.active},
            {"previous", b.previous}};
  }
  int installed(const Bundle& bundle) {
    const Bundle b = options_.use ? store_.use(bundle.digest) : bundle;
    return show(b, b.active ? "active" : cat("installed; glm53ctl engine use ", b.digest.substr(0, 19)));
  }
  int activated(const Bundle& b) { return show(b, "active: what is started from now on is of this bundle"); }
  int show(const Bundle& b, const std::string& note) {
    if (options_.json) {
      std::cout << dump(to_json(b)) << "\n";
    } else {
      std::cout << b.digest << "\n";
      std::cerr << "engine " << b.version << ", " << human_bytes(b.bytes) << ": " << note << "\n";
    }
    return 0;
  }
  int list() {
    Json all = Json::array();
    for (const Bundle& b : store_.list()) {
      all.push_back(to_json(b));
      if (options_.json) continue;
      std::cout << (b.active     ? "* "
                    : b.previous ? "- "
                                 : "  ")
                << b.digest << "  " << b.version << "  " << human_bytes(b.bytes) << (b.ref.empty() ? "" : "  ") << b.ref
                << "\n";
    }
    if (options_.json) std::cout << dump({{"store", store_.options().dir}, {"bundles", all}}) << "\n";
    if (!options_.json && all.empty()) std::cerr << "no bundle is installed in " << store_.options().dir << "\n";
    return 0;
  }
  int verify() {
    const auto findings = store_.verify(options_.what);
    Json all = Json::array();
    for (const Finding& f : findings) {
      all.push_back({{"digest", f.digest}, {"what", f.what}});
      if (!options_.json) std::cerr << "error: E650 image: " << f.digest << ": " << f.what << "\n";
    }
    if (options_.json) std::cout << dump({{"ok", findings.empty()}, {"findings", all}}) << "\n";
    if (!options_.json && findings.empty()) std::cerr << "every blob and every file is as it was installed\n";
    return findings.empty() ? 0 : ctl_exit(Code::corrupt);
  }
  int gc() {
    const int64_t freed = store_.gc();
    if (options_.json) {
      std::cout << dump({{"freed", freed}}) << "\n";
    } else {
      std::cerr << human_bytes(freed) << " are free again\n";
    }
    return 0;
  }
  int export_tar() {
    if (options_.file.empty()) throw Error(Code::usage, "no file is named", "glm53ctl engine export DIGEST FILE");
    store_.export_tar(options_.what, options_.file);
    if (options_.json) std::cout << dump({{"file", options_.file}}) << "\n";
    return 0;
  }

  const CommandOptions& options_;
  const Config& config_;
  const std::atomic<bool>& stopped_;
  std::chrono::steady_clock::time_point shown_{};
  Store store_;
};

}  // namespace

std::string store_dir(const Config& config) {
  return config.text("engine.store").empty() ? config.path("paths.state") + "/engines" : config.path("engine.store");
}

int engine_command(const CommandOptions& options) {
  try {
    Config config;
    if (!options.config.empty() || ::access(kDefaultConfig, R_OK) == 0) {
      config = Config::load(options.config.empty() ? kDefaultConfig : options.config);
    }
    const StopOnSignal signals;
    return Command(options, config, signals.stopped).run();
  } catch (const Error& e) {
    const std::string what = log::redact(e.what()), remedy = log::redact(e.remedy());
    if (options.json) {
      std::cout << dump({{"error", {{"code", std::string(name(e.code()))}, {"message", what}, {"remedy", remedy}}}})
                << "\n";
    } else {
      std::cerr << "error: " << what << "\n";
      if (!remedy.empty()) std::cerr << "  try: " << remedy << "\n";
    }
    return e.code() == Code::cancelled ? kInterrupted : std::max(1, ctl_exit(e.code()));
  }
}

}  // namespace glm53::image
