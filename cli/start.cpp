// glm53ctl start, glm53ctl restart.
#include <iostream>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/operation.h"
#include "cli/recipe.h"
#include "cli/terminal.h"
#include "common/config.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

int report_unchanged(const GlobalOptions& global, AdminClient& agent) {
  const Json status = agent.get("/status");
  const Json cluster = status.contains("cluster") && status["cluster"].is_object() ? status["cluster"] : Json::object();
  if (global.json) {
    print_line(dump({{"operation", nullptr}, {"state", "unchanged"}, {"generation", cluster.value("generation", 0)}}));
  } else {
    print_line(cat("already ", cluster.value("state", "there"), " (generation ", cluster.value("generation", 0), ")"));
  }
  return 0;
}

int report(const GlobalOptions& global, AdminClient& agent, const std::string& operation, const Outcome& outcome) {
  constexpr int kPreflight = 3;
  if (outcome.error && outcome.preflight_failed && !global.json) {
    std::cerr << "error: " << outcome.error->what() << "\n  try: " << outcome.error->remedy() << "\n";
    return kPreflight;
  }
  if (outcome.error && !global.json) throw *outcome.error;
  Json result = {{"operation", operation}, {"state", outcome.state}};
  if (outcome.error) {
    result["error"] = {{"code", std::string(name(outcome.error->code()))},
                       {"message", outcome.error->what()},
                       {"remedy", outcome.error->remedy()}};
  }
  const Json status = agent.get("/status");
  const Json api = status.contains("api") && status["api"].is_object() ? status["api"] : Json::object();
  const std::string url = api.value("url", "");
  if (global.json) {
    result["api"] = url;
    print_line(dump(result));
  } else if (outcome.state == "done") {
    const int64_t generation = status["cluster"].value("generation", int64_t{0});
    print_line(cat("ready (generation ", generation, ")", url.empty() ? "" : cat(": ", url, "/v1")));
  } else {
    print_line(outcome.state);
  }
  if (outcome.preflight_failed) return kPreflight;
  if (outcome.error) return std::max(1, ctl_exit(outcome.error->code()));
  return outcome.state == "done" || outcome.state == "launched" ? 0 : 1;
}

/// The recipe's variables in our own environment, before the --set that win over them.
void add_overrides(StartOptions& options) {
  std::vector<std::string> set;
  for (const Override& o : recipe_overrides([](const char* name) { return environment(name); })) {
    std::cerr << "override " << o.setting << " (from the environment variable " << o.name << ")\n";
    set.push_back(o.setting);
  }
  options.set.insert(options.set.begin(), set.begin(), set.end());
}

}  // namespace

Json wanted_running(const StartOptions& options) {
  Json settings = Json::object();
  Config scratch;
  for (const auto& setting : options.set) {
    const size_t equals = setting.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw Error(Code::usage, cat("--set ", setting, ": no key=value"), "--set serve.max_seqs=16");
    }
    const std::string key = setting.substr(0, equals);
    scratch.set(key, setting.substr(equals + 1), "--set");
    settings[key] = setting.substr(equals + 1);
  }
  return {{"state", "running"}, {"settings", settings}, {"restart", options.restart}};
}

int run_start(const GlobalOptions& global, const StartOptions& options) {
  FollowOptions follow_options{.json = global.json, .until_launched = options.wait == "launched"};
  if (!options.limit.empty()) {
    const auto limit = parse_duration(options.limit);
    if (!limit) throw Error(Code::usage, cat("--timeout ", options.limit, ": no duration"), "--timeout 10m");
    follow_options.limit = *limit;
  }
  AdminClient agent(resolve_target(global));
  StartOptions all = options;
  if (!options.no_env) add_overrides(all);
  const Json answer = agent.put("/wanted", wanted_running(all));
  if (!answer.contains("operation") || !answer["operation"].is_string()) return report_unchanged(global, agent);
  const auto operation = answer["operation"].get<std::string>();
  if (!global.json && answer.value("attached", false)) print_line(cat("joining ", operation, ", which is at work"));
  if (options.detach) {
    print_line(global.json ? dump({{"operation", operation}, {"state", "running"}}) : operation);
    return 0;
  }
  return report(global, agent, operation, follow(agent, operation, follow_options));
}

}  // namespace glm53::cli
