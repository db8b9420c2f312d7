// glm53ctl doctor: every check before a start, with verdict, value and remedy.
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
#include "cli/terminal.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFailed = 3;
constexpr const char* kDefaultConfig = "/etc/glm53/config.toml";
constexpr auto kLongest = std::chrono::minutes(1);
/// What the checks look at in the environment, besides what any program needs.
constexpr std::array kVariables{"PATH", "HOME", "TMPDIR", "NCCL_IB_GID_INDEX"};
constexpr std::array<std::string_view, 4> kVerdicts{"pass", "skip", "warn", "fail"};
constexpr std::array kColours{Colour::green, Colour::dim, Colour::yellow, Colour::red};

std::string text_of(const Json& object, const char* member) {
  const auto it = object.find(member);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

/// Position in kVerdicts; a verdict of a newer agent counts as a failure.
size_t verdict_of(const Json& check) {
  const auto it = std::find(kVerdicts.begin(), kVerdicts.end(), text_of(check, "verdict"));
  return it == kVerdicts.end() ? 3 : static_cast<size_t>(it - kVerdicts.begin());
}

const Json& list_of(const Json& object, const char* member) {
  const auto it = object.find(member);
  if (it == object.end() || !it->is_array()) {
    throw Error(Code::corrupt, cat("the report has no '", std::string_view(member), "'"),
                "run the same version of glm53ctl and glm53-agent");
  }
  return *it;
}

std::string output_of(const Child& child) {
  std::string out;
  std::array<char, 4096> buffer;
  while (true) {
    pollfd p{child.output.get(), POLLIN, 0};
    if (::poll(&p, 1, -1) < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
    const ssize_t n = ::read(child.output.get(), buffer.data(), buffer.size());
    if (n == 0) return out;
    if (n > 0) out.append(buffer.data(), static_cast<size_t>(n));
    if (n < 0 && errno != EINTR && errno != EAGAIN) throw_errno(Code::internal, "read");
  }
}

/// The checks of this node by `glm53-agent preflight`: for a machine whose agent does not run (yet).
Json check_here(const std::string& file, bool deep) {
  SpawnOptions options;
  options.argv = {executable_dir() + "/glm53-agent", "preflight", "--config", file};
  if (deep) options.argv.emplace_back("--deep");
  for (const char* name : kVariables) {
    if (const auto value = environment(name)) options.env[name] = *value;
  }
  options.new_session = false;
  const Child child = spawn(options);
  const std::string output = output_of(child);
  const auto status = wait_until(child.id.pid, std::chrono::steady_clock::now() + kLongest);
  constexpr int kBadConfig = 2;
  if (!status || status->code != 0 || status->signal != 0) {
    const bool config = status && status->code == kBadConfig;
    throw Error(config ? Code::config : Code::internal, cat("the checks did not end well: ", trim(output)));
  }
  return parse_json(output);
}

}  // namespace

std::string render_doctor(const Json& report, bool colours) {
  std::string out;
  std::array<size_t, kVerdicts.size()> counts{};
  for (const Json& node : list_of(report, "nodes")) {
    const Json& checks = list_of(node, "checks");
    std::vector<std::vector<std::string>> rows;
    for (const Json& c : checks) {
      rows.push_back(
          {std::string(kVerdicts[verdict_of(c)]), text_of(c, "code"), text_of(c, "name"), text_of(c, "measured")});
    }
    const auto lines = split(render_table(rows), '\n');
    out += paint(text_of(node, "node"), Colour::bold, colours) + "\n";
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t verdict = verdict_of(checks[i]);
      ++counts[verdict];
      const std::string& word = rows[i].front();
      out += cat("  ", paint(word, kColours[verdict], colours), lines.at(i).substr(word.size()), "\n");
      if (const std::string remedy = text_of(checks[i], "remedy"); !remedy.empty())
        out += cat("        try: ", remedy, "\n");
    }
  }
  out += cat(counts[3], " failed, ", counts[2], " warnings, ", counts[0], " passed, ", counts[1], " skipped\n");
  return out;
}

int doctor_exit(const Json& report) {
  for (const Json& node : list_of(report, "nodes")) {
    for (const Json& check : list_of(node, "checks")) {
      if (verdict_of(check) == 3) return kFailed;
    }
  }
  return 0;
}

int run_doctor(const GlobalOptions& global, const DoctorOptions& options) {
  const std::string file = global.config.empty() ? kDefaultConfig : global.config;
  Json report;
  if (options.local) {
    report = check_here(file, options.deep);
  } else {
    try {
      report = AdminClient(resolve_target(global)).get(options.deep ? "/preflight?deep=1" : "/preflight");
    } catch (const Error& e) {
      // A doctor is asked when things do not run; what can be seen from here is worth telling.
      const bool possible = global.url.empty() && global.socket.empty() && std::filesystem::exists(file);
      if (e.code() != Code::unavailable || !possible) throw;
      std::cerr << "no agent answers: these are the checks of this node alone, done as this user\n";
      report = check_here(file, options.deep);
    }
  }
  if (global.json) {
    print_line(dump(report));
  } else {
    print(render_doctor(report, colours_wanted()));
  }
  return doctor_exit(report);
}

}  // namespace glm53::cli
