// glm53ctl config check | show | example, glm53ctl version.
#include "common/config.h"

#include <iostream>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/recipe.h"
#include "cli/terminal.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "common/version.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

Json effective_of_file(const std::string& file) {
  const Config config = Config::load(file);
  Json out = Json::object();
  const Json values = config.to_json();
  for (const auto& [key, value] : values.items()) out[key] = {{"value", value}, {"source", config.source(key)}};
  return out;
}

std::string shown(const Json& value) {
  if (!value.is_array()) return value.dump();
  std::vector<std::string> parts;
  for (const auto& element : value) parts.push_back(element.dump());
  return cat("[", join(parts, ", "), "]");
}

}  // namespace

int run_config_check(const GlobalOptions& global, const std::string& file) {
  const std::string path = !file.empty() ? file : global.config.empty() ? "/etc/glm53/config.toml" : global.config;
  try {
    const Config config = Config::load(path);
    if (config.text("node.role") == "head") parse_ranks(config);
    if (!config.text("admin.listen").empty()) parse_host_port(config.text("admin.listen"));
    print_line(global.json ? dump({{"ok", true}, {"hash", config.hash()}}) : cat(path, ": ok"));
    return 0;
  } catch (const Error& e) {
    if (!global.json) throw;
    const Json error = {{"code", std::string(name(e.code()))}, {"message", e.what()}, {"remedy", e.remedy()}};
    print_line(dump({{"ok", false}, {"error", error}}));
    return 2;
  }
}

int run_config_show(const GlobalOptions& global) {
  const bool only_file = !global.config.empty() && global.socket.empty() && global.url.empty();
  Json config;
  try {
    config = AdminClient(resolve_target(global)).get("/config");
  } catch (const Error& e) {
    // Without an agent, what the file alone says.
    if (!only_file || e.code() != Code::unavailable) throw;
    config = effective_of_file(global.config);
  }
  if (global.json) {
    print_line(dump(config));
    return 0;
  }
  std::vector<std::vector<std::string>> rows;
  for (const auto& [key, entry] : config.items()) {
    const bool has_source = entry.is_object() && entry.contains("value");
    rows.push_back(
        {key, "=", shown(has_source ? entry["value"] : entry), has_source ? cat("# ", entry.value("source", "")) : ""});
  }
  print(render_table(rows));
  return 0;
}

int run_config_example() {
  print(example_config());
  return 0;
}

int run_config_import(const std::string& file, const std::string& role) {
  const Import result = import_recipe(read_file(file, size_t{1} << 20), file, role);
  for (const std::string& note : result.notes) std::cerr << note << "\n";
  print(result.toml);
  return 0;
}

int run_version(const GlobalOptions& global) {
  Json result = {{"glm53ctl", std::string(version())}, {"agent", nullptr}};
  try {
    result["agent"] = AdminClient(resolve_target(global)).get("/version");
  } catch (const Error&) {
    // The version of this program is the answer, whether or not an agent runs.
  }
  if (global.json) {
    print_line(dump(result));
    return 0;
  }
  print_line(cat("glm53ctl ", version()));
  const Json& agent = result["agent"];
  if (agent.is_object()) {
    print_line(cat("agent    ", agent.value("version", ""), " on ", agent.value("node", ""), " (",
                   agent.value("role", ""), ")"));
  }
  return 0;
}

}  // namespace glm53::cli
