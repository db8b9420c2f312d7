// glm53ctl cluster and node: the cluster's CA, join tokens, members.
#include <filesystem>
#include <iostream>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/enrol.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string text(const Json& object, const char* member) {
  const auto it = object.find(member);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

int64_t number(const Json& object, const char* member) {
  const auto it = object.find(member);
  return it != object.end() && it->is_number_integer() ? it->get<int64_t>() : 0;
}

/// Tokens are secrets: they come by a file or standard input, never on the command line.
JoinToken read_token(const JoinOptions& options) {
  if (!options.token_file.empty()) return JoinToken::parse(read_secret(options.token_file));
  if (::isatty(STDIN_FILENO) != 0) std::cerr << "token (glm53ctl cluster token on the head prints one): ";
  std::string line;
  std::getline(std::cin, line);
  return JoinToken::parse(line);
}

std::string spaced(const std::string& fingerprint) {
  return "sha256:" + fingerprint;
}

}  // namespace

int run_cluster_init(const GlobalOptions& global) {
  AdminClient agent(resolve_target(global));
  const Json answer = agent.post("/cluster/init", Json::object());
  if (global.json) {
    print_line(dump(answer));
    return 0;
  }
  print_line(cat("cluster ", text(answer, "cluster"), " has its CA: ", spaced(text(answer, "ca_fingerprint"))));
  print_line("next: glm53ctl cluster token, and with what it prints glm53ctl cluster join HEAD:PORT on the worker");
  return 0;
}

int run_cluster_token(const GlobalOptions& global, const TokenOptions& options) {
  AdminClient agent(resolve_target(global));
  Json body{{"role", options.role}, {"expires", options.expires}};
  if (!options.name.empty()) body["name"] = options.name;
  const Json answer = agent.post("/cluster/tokens", body);
  if (global.json) {
    print_line(dump(answer));
    return 0;
  }
  print_line(text(answer, "token"));
  std::cerr << "good once, for " << text(answer, "role") << " " << text(answer, "name") << ", until "
            << pki::time_text(number(answer, "expires_at") / 1000) << "\n";
  return 0;
}

int run_cluster_join(const GlobalOptions& global, const JoinOptions& options) {
  AdminClient agent(resolve_target(global));
  const JoinToken token = read_token(options);
  const Json answer = agent.post("/cluster/enter", {{"head", options.head}, {"token", token.text()}});
  print_line(global.json ? dump(answer)
                         : cat("this node is ", text(answer, "name"), " of cluster ", text(answer, "cluster"),
                               ", until ", pki::time_text(number(answer, "expires_at") / 1000)));
  return 0;
}

int run_cluster_login(const GlobalOptions& global, const JoinOptions& options) {
  const std::string path = identity_path(global);
  const Credentials mine = join_cluster(options.head, read_token(options));
  const std::string folder = std::filesystem::path(path).parent_path().string();
  if (!folder.empty()) make_dirs(folder, 0700);
  save_credentials(path, mine);
  const pki::Certificate own = pki::read_certificate(mine.certificate);
  if (global.json) {
    print_line(dump({{"identity", path}, {"role", own.identity.role}, {"name", own.identity.name}}));
    return 0;
  }
  print_line(cat("you are ", own.identity.text(), " of cluster ", own.identity.cluster, "; kept in ", path));
  print_line(cat("next: glm53ctl --url https://", options.head, " status"));
  return 0;
}

std::string render_members(const Json& cluster) {
  std::vector<std::vector<std::string>> rows{{"NAME", "ROLE", "UNTIL", "CERTIFICATE"}};
  if (const std::string own = text(cluster, "name"); !own.empty()) {
    rows.push_back({own, text(cluster, "role"), pki::time_text(number(cluster, "expires_at") / 1000), "this node"});
  }
  const auto members = cluster.find("members");
  for (const Json& m : members != cluster.end() && members->is_array() ? *members : Json::array()) {
    const bool removed = m.value("removed", false);
    rows.push_back({text(m, "name"), text(m, "role"),
                    removed ? "removed" : pki::time_text(number(m, "expires_at") / 1000),
                    text(m, "fingerprint").substr(0, 16)});
  }
  return render_table(rows);
}

int run_cluster_show(const GlobalOptions& global) {
  const Json answer = AdminClient(resolve_target(global)).get("/cluster");
  if (global.json) {
    print_line(dump(answer));
    return 0;
  }
  if (text(answer, "cluster").empty()) {
    print_line("this node has no certificate yet");
    print_line("  try: glm53ctl cluster init on the head, glm53ctl cluster join on a worker");
    return 0;
  }
  print_line(cat("cluster ", text(answer, "cluster"), ", CA ", spaced(text(answer, "ca_fingerprint"))));
  print(render_members(answer));
  return 0;
}

int run_node_list(const GlobalOptions& global) {
  AdminClient agent(resolve_target(global));
  const Json cluster = agent.get("/cluster"), status = agent.get("/status");
  if (global.json) {
    print_line(dump({{"nodes", status.at("nodes")}, {"members", cluster.at("members")}}));
    return 0;
  }
  std::vector<std::vector<std::string>> rows{{"NODE", "ROLE", "ADDRESS", "ANSWERS", "VERSION"}};
  for (const Json& n : status.at("nodes")) {
    const Json& own = n.at("agent");
    rows.push_back({text(n, "name"), text(n, "role"), text(n, "address"), n.value("reachable", false) ? "yes" : "no",
                    own.is_object() ? text(own, "version") : std::string()});
  }
  print(render_table(rows));
  if (!text(cluster, "cluster").empty()) print("\n" + render_members(cluster));
  return 0;
}

int run_node_remove(const GlobalOptions& global, const std::string& name) {
  pki::check_name(name, "a member");
  const Json answer = AdminClient(resolve_target(global)).remove("/cluster/members/" + name);
  print_line(global.json ? dump(answer) : cat(name, " is no member any more"));
  return 0;
}

}  // namespace glm53::cli
