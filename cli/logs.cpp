// glm53ctl logs.
#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using namespace std::chrono_literals;
using Json = nlohmann::ordered_json;

std::string path_of(const LogSource& source, const LogsOptions& options, int lines, bool follow) {
  std::string path = cat("/logs?process=", source.process, "&node=", source.node, "&lines=", lines);
  if (options.generation) path += cat("&generation=", *options.generation);
  return follow ? path + "&follow=1" : path;
}

/// Calls `line` for each whole line of a stream.
class LineSplitter {
 public:
  explicit LineSplitter(std::function<void(std::string_view)> line) : line_(std::move(line)) {}
  void feed(std::string_view bytes) {
    rest_ += bytes;
    size_t begin = 0;
    for (size_t end = rest_.find('\n'); end != std::string::npos; end = rest_.find('\n', begin)) {
      line_(std::string_view(rest_).substr(begin, end - begin));
      begin = end + 1;
    }
    rest_.erase(0, begin);
  }
  void finish() {
    if (!rest_.empty()) line_(std::exchange(rest_, {}));
  }

 private:
  std::function<void(std::string_view)> line_;
  std::string rest_;
};

std::vector<std::string> fetch(AdminClient& agent, const LogSource& source, const LogsOptions& options) {
  std::vector<std::string> lines;
  LineSplitter splitter([&](std::string_view line) { lines.emplace_back(line); });
  agent.stream(path_of(source, options, options.lines, false), [&](std::string_view bytes) {
    splitter.feed(bytes);
    return true;
  });
  splitter.finish();
  return lines;
}

/// Follows one log for ever: a log that ends (a new generation, an agent that restarts) is opened again.
void follow_one(const Target& target, const LogSource& source, const LogsOptions& options, std::mutex& out) {
  AdminClient agent(target);
  int lines = options.lines;
  while (true) {
    LineSplitter splitter([&](std::string_view line) {
      const std::lock_guard lock(out);
      print_line(cat(source.tag, line));
    });
    try {
      agent.stream(path_of(source, options, lines, true), [&](std::string_view bytes) {
        splitter.feed(bytes);
        return true;
      });
    } catch (const Error& e) {
      if (e.code() == Code::usage || e.code() == Code::denied) throw;
    }
    splitter.finish();
    lines = 0;
    std::this_thread::sleep_for(1s);
  }
}

int follow_all(const Target& target, const std::vector<LogSource>& sources, const LogsOptions& options) {
  std::mutex out, failure_mutex;
  std::exception_ptr failure;
  {
    std::vector<std::jthread> threads;
    for (const auto& source : sources) {
      threads.emplace_back([&] {
        try {
          follow_one(target, source, options, out);
        } catch (...) {
          const std::lock_guard lock(failure_mutex);
          if (!failure) failure = std::current_exception();
        }
      });
    }
  }
  if (failure) std::rethrow_exception(failure);
  return 0;
}

/// "2026-11-30T12:00:00.123Z" at the start of a line, else nothing.
std::string_view time_of(std::string_view line) {
  const std::string_view stamp = line.substr(0, line.find(' '));
  const bool looks_right = stamp.size() >= 20 && stamp[4] == '-' && stamp[10] == 'T' && stamp.back() == 'Z';
  return looks_right ? stamp : std::string_view();
}

}  // namespace

std::vector<LogSource> log_sources(const Json& status, std::string_view which) {
  std::vector<LogSource> all;
  for (const auto& node : status.value("nodes", Json::array())) {
    const std::string node_name = node.value("name", ""), role = node.value("role", "");
    std::vector<std::string> names{"agent"};
    for (const auto& process : node.value("processes", Json::array())) names.push_back(process.value("name", ""));
    for (const auto& process : names) {
      const bool agent_of_either = process == "agent" && which == "agent";
      if (which == "both" || which == role || which == node_name || which == process || agent_of_either) {
        all.push_back({process, node_name, {}});
      }
    }
  }
  // A process that is not running now may still have a log.
  const bool may_have_log = which == "api" || which.starts_with("rank");
  if (all.empty() && may_have_log) all.push_back({std::string(which), "", {}});
  if (all.empty()) {
    throw Error(Code::usage, cat("no process '", which, "'"), "head, worker, both, agent, api, rank0, rank1");
  }
  for (auto& source : all) {
    if (all.size() > 1) source.tag = source.process == "agent" ? cat(source.node, "| ") : cat(source.process, "| ");
  }
  return all;
}

std::vector<std::string> merge_logs(const std::vector<std::pair<std::string, std::vector<std::string>>>& tagged) {
  struct Line {
    std::string_view time;
    std::string text;
  };
  std::vector<Line> all;
  for (const auto& [tag, lines] : tagged) {
    std::string_view last;
    for (const auto& line : lines) {
      if (const auto time = time_of(line); !time.empty()) last = time;
      all.push_back({last, cat(tag, line)});
    }
  }
  std::ranges::stable_sort(all, {}, &Line::time);
  std::vector<std::string> out;
  for (auto& line : all) out.push_back(std::move(line.text));
  return out;
}

int run_logs(const GlobalOptions& global, const LogsOptions& options) {
  if (options.lines < 0 || options.lines > 1'000'000)
    throw Error(Code::usage, "--lines is out of bounds", "0 to 1000000");
  const Target target = resolve_target(global);
  AdminClient agent(target);
  const auto sources = log_sources(agent.get("/status"), options.which);
  if (options.follow) return follow_all(target, sources, options);
  std::vector<std::pair<std::string, std::vector<std::string>>> tagged;
  for (const auto& source : sources) {
    try {
      tagged.emplace_back(source.tag, fetch(agent, source, options));
    } catch (const Error& e) {
      if (e.code() != Code::not_found || sources.size() == 1) throw;
    }
  }
  for (const auto& line : merge_logs(tagged)) {
    print_line(global.json ? dump({{"line", line}}) : line);
  }
  return 0;
}

}  // namespace glm53::cli
