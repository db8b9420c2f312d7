#include "tests/tools/fake_rank/rules.h"

#include <algorithm>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::fake {
namespace {

Rule parse_rule(const nlohmann::ordered_json& json) {
  Rule rule;
  if (json.contains("rank")) rule.rank = json.at("rank").get<int>();
  if (json.contains("generations")) rule.generations = json.at("generations").get<std::vector<uint64_t>>();
  const auto phase_name = json.at("phase").get<std::string>();
  const auto phase = parse_phase(phase_name);
  if (!phase) throw Error(Code::config, cat("fake_rank.json: unknown phase '", phase_name, "'"));
  rule.phase = *phase;
  rule.after = std::chrono::milliseconds(json.value("after_ms", 0));
  const auto act = json.at("do").get<std::string>();
  if (act == "kill") {
    rule.act = Rule::Act::kill;
  } else if (act == "hang") {
    rule.act = Rule::Act::hang;
  } else if (act.starts_with("exit:")) {
    const auto code = parse_int(act.substr(5));
    if (!code || *code < 0 || *code > 255)
      throw Error(Code::config, cat("fake_rank.json: '", act, "' has no exit code"));
    rule.exit_code = static_cast<int>(*code);
  } else {
    throw Error(Code::config, cat("fake_rank.json: unknown deed '", act, "'"), "exit:CODE, kill or hang");
  }
  return rule;
}

}  // namespace

const Rule* Rules::find(int rank, uint64_t generation, Phase phase) const {
  const auto fits = [&](const Rule& rule) {
    const bool this_generation =
        rule.generations.empty() || std::ranges::find(rule.generations, generation) != rule.generations.end();
    return rule.phase == phase && rule.rank.value_or(rank) == rank && this_generation;
  };
  const auto at = std::ranges::find_if(rules, fits);
  return at == rules.end() ? nullptr : &*at;
}

Rules load_rules(const std::string& path) {
  Rules result;
  if (!std::filesystem::exists(path)) return result;
  try {
    const auto json = parse_json(read_file(path));
    result.phase_time = std::chrono::milliseconds(json.value("phase_ms", 20));
    result.token_time = std::chrono::milliseconds(json.value("token_ms", 3));
    if (json.contains("rules")) {
      for (const auto& rule : json.at("rules")) result.rules.push_back(parse_rule(rule));
    }
  } catch (const nlohmann::json::exception& e) {
    throw Error(Code::config, cat(path, ": ", e.what()));
  }
  return result;
}

}  // namespace glm53::fake
