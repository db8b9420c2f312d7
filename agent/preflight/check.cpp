#include "agent/preflight/check.h"

#include <algorithm>
#include <array>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 4> kVerdicts{"pass", "skip", "warn", "fail"};

std::string text_of(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

int64_t number_of(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it != object.end() && it->is_number_integer() ? it->get<int64_t>() : 0;
}

Verdict parse_verdict(const std::string& text) {
  const auto it = std::find(kVerdicts.begin(), kVerdicts.end(), text);
  // A verdict of a newer agent: nobody may take it for a pass.
  return it == kVerdicts.end() ? Verdict::fail : static_cast<Verdict>(it - kVerdicts.begin());
}

}  // namespace

std::string_view name(Verdict verdict) {
  return kVerdicts[static_cast<size_t>(verdict)];
}

Verdict verdict_of(std::span<const NodeResult> nodes) {
  Verdict worst = Verdict::pass;
  for (const NodeResult& node : nodes) {
    for (const Result& r : node.checks) {
      if (r.verdict != Verdict::skip) worst = std::max(worst, r.verdict);
    }
  }
  return worst;
}

std::string line(const std::string& node, const Result& result) {
  return cat(result.code, " ", node, ": ", result.measured, result.remedy.empty() ? "" : " — " + result.remedy);
}

std::vector<std::string> failures(std::span<const NodeResult> nodes) {
  std::vector<std::string> out;
  for (const NodeResult& node : nodes) {
    for (const Result& r : node.checks) {
      if (r.verdict == Verdict::fail) out.push_back(line(node.node, r));
    }
  }
  return out;
}

Json to_json(const NodeResult& node) {
  Json checks = Json::array();
  for (const Result& r : node.checks) {
    checks.push_back({{"name", r.name},
                      {"code", r.code},
                      {"verdict", std::string(name(r.verdict))},
                      {"measured", r.measured},
                      {"remedy", r.remedy}});
  }
  return {{"node", node.node}, {"checks", checks}, {"mtu", node.mtu}, {"clock", node.clock}};
}

Json report_json(std::span<const NodeResult> nodes) {
  Json list = Json::array();
  for (const NodeResult& node : nodes) list.push_back(to_json(node));
  return {{"verdict", std::string(name(verdict_of(nodes)))}, {"nodes", list}};
}

std::string report_text(std::span<const NodeResult> nodes) {
  return dump(report_json(nodes));
}

NodeResult parse_node_result(std::string_view json) {
  const Json j = parse_json(json, {.max_bytes = 1u << 20, .max_depth = 8});
  const auto checks = j.is_object() ? j.find("checks") : j.end();
  if (!j.is_object() || checks == j.end() || !checks->is_array()) {
    throw Error(Code::corrupt, "the answer is no preflight result",
                "run the same version of glm53-agent on both nodes");
  }
  NodeResult node;
  node.node = text_of(j, "node");
  node.mtu = number_of(j, "mtu");
  node.clock = number_of(j, "clock");
  for (const Json& c : *checks) {
    if (!c.is_object()) throw Error(Code::corrupt, "a check of the answer is no object");
    node.checks.push_back({text_of(c, "name"), text_of(c, "code"), parse_verdict(text_of(c, "verdict")),
                           text_of(c, "measured"), text_of(c, "remedy")});
  }
  return node;
}

}  // namespace glm53::preflight
