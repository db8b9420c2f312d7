// glm53ctl node add: brings a worker's programs, unit and configuration over SSH, and lets it join.
#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <poll.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/node_install.h"
#include "cli/terminal.h"
#include "common/config.h"
#include "common/digest.h"
#include "common/file.h"
#include "common/json.h"
#include "common/pki.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr auto kLongest = std::chrono::minutes(30);
constexpr int kSshFailed = 255;
/// All that the other side's shell is told; everything else travels in files.
constexpr const char* kRemote =
    "d=$(mktemp -d) && trap 'rm -rf \"$d\"' EXIT && tar -xzf - -C \"$d\" && sh \"$d/install.sh\" \"$d\"";
/// `sh -c` of this: ssh with its standard input from a file.
constexpr const char* kWithInput = "f=$1; shift; exec \"$@\" <\"$f\"";

/// A folder for this run, gone with the object.
class Stage {
 public:
  Stage() {
    std::string pattern = (fs::temp_directory_path() / "glm53-node-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw_errno(Code::unavailable, cat("cannot make ", pattern));
    path_ = pattern;
  }
  ~Stage() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Ran {
  int code = 0;
  std::string output;
};

Ran run(std::vector<std::string> argv) {
  SpawnOptions options;
  options.argv = std::move(argv);
  for (const char* name : {"PATH", "HOME", "TMPDIR", "SSH_AUTH_SOCK"}) {
    if (const auto value = environment(name)) options.env[name] = *value;
  }
  options.new_session = false;
  const Child child = spawn(options);
  Ran ran;
  std::array<char, 4096> buffer;
  while (true) {
    pollfd p{child.output.get(), POLLIN, 0};
    if (::poll(&p, 1, -1) < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
    const ssize_t n = ::read(child.output.get(), buffer.data(), buffer.size());
    if (n == 0) break;
    if (n > 0) ran.output.append(buffer.data(), static_cast<size_t>(n));
    if (n < 0 && errno != EINTR && errno != EAGAIN) throw_errno(Code::internal, "read");
  }
  const auto status = wait_until(child.id.pid, std::chrono::steady_clock::now() + kLongest);
  ran.code = status ? (status->signal != 0 ? 128 + status->signal : status->code) : 1;
  return ran;
}

std::string last_line(const std::string& text) {
  std::string last;
  for (const std::string& line : split(text, '\n')) {
    if (!trim(line).empty()) last = trim(line);
  }
  return last;
}

/// Of everything in the folder: the name of the release on the other side.
std::string digest_of(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  Sha256 hash;
  for (const std::string& file : files)
    hash.update(cat(fs::relative(file, folder).string(), " ", sha256_hex(read_file(file)), "\n"));
  return hash.hex();
}

void check_target(const std::string& target) {
  const size_t at = target.find('@');
  const bool good = at != std::string::npos && at > 0 && at + 1 < target.size() && target.front() != '-' &&
                    std::all_of(target.begin(), target.end(), [](char c) {
                      return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
                             std::string_view("@.-_:%").find(c) != std::string_view::npos;
                    });
  if (!good) throw Error(Code::usage, cat("'", target, "' is no USER@HOST"), "glm53ctl node add root@10.0.0.2");
}

std::vector<std::string> ssh_command(const NodeAddOptions& o) {
  std::vector<std::string> ssh{"/usr/bin/env", "ssh", "-F", "none"};
  for (const char* option :
       {"BatchMode=yes", "StrictHostKeyChecking=yes", "UpdateHostKeys=no", "ConnectTimeout=15", "ForwardAgent=no",
        "PasswordAuthentication=no", "KbdInteractiveAuthentication=no", "ServerAliveInterval=15", "LogLevel=ERROR"}) {
    ssh.insert(ssh.end(), {"-o", option});
  }
  if (o.port != 22) ssh.insert(ssh.end(), {"-p", std::to_string(o.port)});
  if (!o.key.empty()) ssh.insert(ssh.end(), {"-i", o.key, "-o", "IdentitiesOnly=yes"});
  if (!o.known_hosts.empty()) ssh.insert(ssh.end(), {"-o", cat("UserKnownHostsFile=", o.known_hosts)});
  ssh.insert(ssh.end(), {"--", o.target, kRemote});
  return ssh;
}

std::string worker_config(const NodeAddOptions& o, const std::string& listen) {
  std::string toml = cat("# Made by glm53ctl node add.\nnode.role = \"worker\"\nnode.name = \"", o.name,
                         "\"\nadmin.listen = \"", listen, "\"\n");
  if (!o.root.empty()) {
    toml += cat("admin.tls = \"on\"\npaths.state = \"", o.root, "/var/lib/glm53\"\npaths.run = \"", o.root,
                "/run/glm53\"\npaths.logs = \"", o.root, "/var/log/glm53\"\n");
  }
  (void)Config::parse(toml, "the worker's configuration");
  return toml;
}

/// The head's own TCP address, as its configuration has it.
std::string head_address(AdminClient& agent) {
  const Json config = agent.get("/config");
  const std::string listen = config.at("admin.listen").at("value").get<std::string>();
  if (listen.empty() || listen.starts_with("0.0.0.0:") || listen.starts_with("[::]:")) {
    throw Error(Code::config, "the head's admin.listen names no address that the worker could use",
                "set it to the head's address, such as 10.0.0.1:8890, or name it with --head");
  }
  return listen;
}

}  // namespace

int run_node_add(const GlobalOptions& global, const NodeAddOptions& options) {
  check_target(options.target);
  const auto plain = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
           std::string_view("/._-").find(c) != std::string_view::npos;
  };
  if (!options.root.empty() &&
      (options.root.front() != '/' || !std::all_of(options.root.begin(), options.root.end(), plain)))
    throw Error(Code::usage, cat("--root '", options.root, "' is no plain absolute path"));
  pki::check_name(options.name, "a node");
  if (!fs::exists(options.bundle + "/.glm53-bundle")) {
    throw Error(Code::usage, cat("'", options.bundle, "' is no bundle of the programs"),
                "scripts/bundle.sh DIR makes one");
  }
  const std::string host = options.target.substr(options.target.find('@') + 1);
  const std::string listen = options.listen.empty()
                                 ? cat(host.find(':') == std::string::npos ? host : "[" + host + "]", ":8890")
                                 : options.listen;
  (void)parse_host_port(listen);
  AdminClient agent(resolve_target(global));
  const Json cluster = agent.get("/cluster");
  if (!cluster.at("ca_fingerprint").is_string())
    throw Error(Code::unavailable, "E720 the head has no certificate yet", "glm53ctl cluster init");
  const Stage stage;
  const auto put = [&](const std::string& name, const std::string& text) {
    write_file(cat(stage.path(), "/in/", name), text, 0600);
  };
  make_dirs(stage.path() + "/in", 0700);
  put("install.sh", std::string(install_script()));
  put("root", options.root);
  put("head", options.head.empty() ? head_address(agent) : options.head);
  put("ca", cluster.at("ca_fingerprint").get<std::string>());
  put("config.toml", worker_config(options, listen));
  put("digest", digest_of(options.bundle));
  put("token", agent.post("/cluster/tokens", {{"role", "node"}, {"name", options.name}, {"expires", "1h"}})
                       .at("token")
                       .get<std::string>() +
                   "\n");
  fs::create_directory_symlink(fs::absolute(options.bundle), stage.path() + "/in/bundle");
  const std::string archive = stage.path() + "/in.tar.gz";
  const Ran packed = run({"/usr/bin/env", "tar", "--dereference", "-C", stage.path() + "/in", "-czf", archive, "."});
  if (packed.code != 0) throw Error(Code::unavailable, cat("packing the bundle failed: ", last_line(packed.output)));

  std::vector<std::string> argv{"/bin/sh", "-c", kWithInput, "sh", archive};
  const auto ssh = ssh_command(options);
  argv.insert(argv.end(), ssh.begin(), ssh.end());
  const Ran ran = run(std::move(argv));
  if (ran.code == kSshFailed) {
    const bool key = ran.output.find("Host key verification failed") != std::string::npos ||
                     ran.output.find("IDENTIFICATION HAS CHANGED") != std::string::npos;
    if (key) {
      throw Error(Code::denied, cat("E303 the host key of ", host, " is not known, or not the one that is known"),
                  "compare it with ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub there, then put it into "
                  "~/.ssh/known_hosts");
    }
    throw Error(Code::unavailable, cat("E304 ssh to ", options.target, " failed: ", last_line(ran.output)),
                "a key without passphrase, or in an agent, must open it: ssh -o BatchMode=yes " + options.target);
  }
  if (ran.code != 0)
    throw Error(Code::unavailable, cat("E305 the installation on ", host, " failed: ", last_line(ran.output)));
  if (global.json) {
    std::vector<std::string> lines;
    for (const std::string& line : split(ran.output, '\n')) {
      if (!line.empty()) lines.push_back(line);
    }
    print_line(dump({{"node", options.name}, {"lines", lines}}));
    return 0;
  }
  print(ran.output);
  print_line(cat("the head's file: worker.admin = \"", listen, "\""));
  return 0;
}

}  // namespace glm53::cli
