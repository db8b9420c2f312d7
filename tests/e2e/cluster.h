// A local cluster for tests: two agents, their folder, their ports, and glm53ctl.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/http_client.h"
#include "common/process.h"
#include "tests/e2e/secrets.h"

namespace glm53::e2e {

using Json = nlohmann::ordered_json;

/// A folder with a short path (sockets live in it), gone with the object.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct ProgramResult {
  int code = 0;        ///< exit code; 128 + signal
  std::string output;  ///< stdout and stderr
};
/// Runs a program of the build to its end.
ProgramResult run_program(const std::vector<std::string>& argv, const std::string& temp_dir,
                          std::chrono::seconds limit = std::chrono::seconds(120));
/// A free port of a loopback address.
uint16_t free_port(const std::string& address);
/// Polls until `done` or the limit; false at the limit.
bool wait_for(const std::function<bool()>& done, std::chrono::milliseconds limit = std::chrono::seconds(60));

struct ClusterOptions {
  bool fake_rank = true;
  std::map<std::string, std::string> head;  ///< further TOML lines: dotted key -> TOML value
  std::map<std::string, std::string> worker;
};

class LocalCluster {
 public:
  /// Writes the configuration and starts both agents.
  explicit LocalCluster(ClusterOptions options = {});
  /// Ends everything that was started here, politely first; fails the test when a token of the agents was found in a
  /// command line, an environment or a file other than its own.
  ~LocalCluster();
  LocalCluster(const LocalCluster&) = delete;
  LocalCluster& operator=(const LocalCluster&) = delete;

  void start_agent(const std::string& node);
  void stop_agent(const std::string& node);  ///< SIGTERM and wait
  void kill_agent(const std::string& node);  ///< SIGKILL and wait
  pid_t agent_pid(const std::string& node) const { return agents_.at(node).id.pid; }
  /// glm53ctl with --config of the head.
  ProgramResult ctl(const std::vector<std::string>& arguments) const;
  Child spawn_ctl(const std::vector<std::string>& arguments) const;
  /// Starts the cluster and requires that it worked.
  void up();

  Json status() const;  ///< null while the agent does not answer
  bool wait_status(const std::function<bool(const Json&)>& done) const;
  bool wait_up(int64_t generation_above = 0) const;
  std::string state() const;
  int64_t generation() const;
  /// Member of status.nodes[].processes[]; null when there is none.
  Json process(const std::string& name) const;
  /// Its pid; 0 when it does not run.
  pid_t process_pid(const std::string& name) const;

  std::string api_url() const;
  uint16_t api_port() const { return api_port_; }
  /// Status of GET path; 0 when nobody answers.
  int api_get(const std::string& path) const;
  /// A plain chat, thinking off; the content, or "HTTP nnn: body".
  std::string chat(const std::string& prompt, int max_tokens = 200) const;
  /// Sends a body with "stream": true; `each` is called with every piece of content. The whole content. Throws Error
  /// when that does not come to a finish reason; unavailable when nothing comes for `patience`.
  std::string stream(const Json& body, std::chrono::milliseconds patience,
                     const std::function<void(const std::string&)>& each) const;
  /// A streamed plain chat.
  std::string stream_chat(const std::string& prompt, int max_tokens,
                          const std::function<void(const std::string&)>& each) const;

  std::string config(const std::string& node) const { return dir_.path() + "/" + node + "/config.toml"; }
  std::string run_dir(const std::string& node) const { return dir_.path() + "/" + node + "/run"; }
  const std::string& temp_dir() const { return temp_; }
  const std::string& dir() const { return dir_.path(); }
  /// The admin token of a node's agent.
  const std::string& token(const std::string& node) const { return tokens_.at(node); }
  /// What the fake ranks of a node do wrong (tests/tools/fake_rank/README.md).
  void set_fake(const Json& rules) const;
  /// Processes that belong to this cluster, agents included.
  std::vector<pid_t> processes() const;

 private:
  void write_config(const std::string& node, const std::map<std::string, std::string>& lines) const;
  void check_secrets() const;
  TempDir dir_;
  SecretWatch watch_{std::chrono::milliseconds(500)};
  std::map<std::string, std::string> tokens_;
  std::string temp_;
  uint16_t api_port_ = 0;
  std::map<std::string, Child> agents_;
};

/// Path of a program of this build: "glm53ctl".
std::string program(const std::string& name);
/// Folder of the sources.
std::string source_dir();
/// Programs of this build as scripts/bundle.sh lays them out.
void make_bundle(const std::string& dir);

}  // namespace glm53::e2e
