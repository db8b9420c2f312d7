// What a check says, and the report of a node.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace glm53::preflight {

/// `skip`: does not apply here, or cannot be asked; `measured` says which.
enum class Verdict { pass, skip, warn, fail };
std::string_view name(Verdict verdict);

struct Result {
  std::string name;  ///< of the check: "ports"
  std::string code;  ///< "E214" or "W208"; stable, for searches and scripts
  Verdict verdict = Verdict::pass;
  std::string measured;  ///< one line: what was found, with its value
  std::string remedy;    ///< what to do; empty unless warn or fail
};

/// What a node found. Facts are compared between the nodes.
struct NodeResult {
  std::string node;  ///< "head" or "worker"
  std::vector<Result> checks;
  int64_t mtu = 0;    ///< of the fabric interface; 0: unknown
  int64_t clock = 0;  ///< milliseconds since the epoch, when the checks were done
};

/// The worst of all.
Verdict verdict_of(std::span<const NodeResult> nodes);
/// "E214 head: port 8888 is in use by pid 2210 (jupyter-lab) — stop it or set api.port"
std::string line(const std::string& node, const Result& result);
/// Every failure as such a line, in the order of the checks.
std::vector<std::string> failures(std::span<const NodeResult> nodes);

nlohmann::ordered_json to_json(const NodeResult& node);
/// {"verdict","nodes":[…]} of docs/admin-api.md.
nlohmann::ordered_json report_json(std::span<const NodeResult> nodes);
std::string report_text(std::span<const NodeResult> nodes);  ///< the same as text
/// Throws Error(corrupt) when it is no such object; missing members get their defaults.
NodeResult parse_node_result(std::string_view json);

}  // namespace glm53::preflight
