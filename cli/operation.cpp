#include "cli/operation.h"

#include <algorithm>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr size_t kLogLines = 40;

std::string text_of(const Json& json, const char* member) {
  const auto at = json.find(member);
  return at != json.end() && at->is_string() ? at->get<std::string>() : std::string();
}

/// Draws lines over the ones drawn before.
class Screen {
 public:
  void draw(const std::vector<std::string>& lines) {
    std::string out = clear_text();
    for (const auto& line : lines) out += line + "\n";
    drawn_ = lines.size();
    if (!out.empty()) print(out);
  }
  void clear() { draw({}); }

 private:
  std::string clear_text() const { return drawn_ == 0 ? "" : cat("\033[", drawn_, "A\033[J"); }
  size_t drawn_ = 0;
};

}  // namespace

std::vector<std::string> OperationView::take(std::string_view event, std::string_view data) {
  const Json json = parse_json(data);
  if (!json.is_object()) return {};
  if (event == "action") return take_action(json);
  if (event == "progress") return take_progress(json);
  if (event == "log") {
    log_lines_.push_back(cat(text_of(json, "process"), "| ", text_of(json, "text")));
    if (log_lines_.size() > kLogLines) log_lines_.erase(log_lines_.begin());
  }
  if (event == "done") take_done(json);
  return {};
}

std::vector<std::string> OperationView::take_action(const Json& event) {
  const std::string kind = text_of(event, "kind");
  const std::string state = text_of(event, "state");
  const bool has_rank = event.contains("rank") && event.at("rank").is_number_integer() && event.at("rank") >= 0;
  if (kind == "start_rank" && state == "done" && has_rank && event.at("rank") == 0) rank0_started_ = true;
  if (kind == "preflight") preflight_failed_ = state == "failed";
  if (state == "done") return {};
  std::string line = cat(text_of(event, "node"), ": ", kind);
  std::ranges::replace(line, '_', ' ');
  if (has_rank) line += cat(" ", event.at("rank").get<int>());
  if (state == "failed") line += " failed";
  if (const auto text = text_of(event, "text"); !text.empty()) line += cat(": ", text);
  return {line};
}

std::vector<std::string> OperationView::take_progress(const Json& event) {
  const std::string id = text_of(event, "process");
  if (id.empty()) return {};
  Process& process = processes_[cat(id, " ", text_of(event, "node"))];
  process.name = id;
  process.node = text_of(event, "node");
  const std::string phase = text_of(event, "phase");
  const bool changed = phase != process.phase;
  process.phase = phase;
  process.done = process.total = 0;
  if (const auto at = event.find("progress"); at != event.end() && at->is_array() && at->size() == 2) {
    process.done = (*at)[0].get<int64_t>();
    process.total = (*at)[1].get<int64_t>();
  }
  if (!changed) return {};
  return {cat(id, " on ", process.node, ": ", phase)};
}

void OperationView::take_done(const Json& event) {
  Outcome outcome{text_of(event, "state"), std::nullopt};
  if (const auto at = event.find("error"); at != event.end() && at->is_object()) {
    outcome.error = Error(parse_code(text_of(*at, "code")), text_of(*at, "message"), text_of(*at, "remedy"));
  }
  outcome.preflight_failed = preflight_failed_ && outcome.state == "failed";
  outcome_ = outcome;
}

std::vector<std::string> OperationView::bars(int width) const {
  std::vector<std::vector<std::string>> rows;
  for (const auto& [id, process] : processes_) {
    if (process.name == "download" && process.done == process.total) continue;
    std::vector<std::string> row{cat("  ", process.name), process.node, process.phase};
    if (process.total > 0) {
      const double share = static_cast<double>(process.done) / static_cast<double>(process.total);
      row.push_back(render_bar(share, std::clamp(width - 70, 10, 40)));
      row.push_back(cat(static_cast<int>(share * 100), "%"));
      const bool in_bytes = process.phase.starts_with("load_") || process.name == "download";
      row.push_back(in_bytes ? cat(human_bytes(process.done), " of ", human_bytes(process.total))
                             : cat(process.done, " of ", process.total));
    }
    rows.push_back(std::move(row));
  }
  std::vector<std::string> lines = split(render_table(rows), '\n');
  std::erase(lines, "");
  return lines;
}

namespace {

/// One attempt to read the event stream from its start; `seen` events were already shown.
class Follower {
 public:
  Follower(AdminClient& agent, std::string operation, const FollowOptions& options)
      : agent_(agent), operation_(std::move(operation)), options_(options), started_(Clock::now()) {
    bars_ = !options.json && stdout_is_terminal();
  }

  Outcome run() {
    auto last_contact = Clock::now();
    while (!finished()) {
      try {
        read_events();
        last_contact = Clock::now();
      } catch (const Error& e) {
        const bool agent_away = e.code() == Code::unavailable || e.code() == Code::peer_lost;
        if (e.code() != Code::stalled && (!agent_away || Clock::now() - last_contact > 30s)) throw;
      }
      if (!finished()) std::this_thread::sleep_for(300ms);
      check_limit();
    }
    screen_.clear();
    if (view_.outcome()) return *view_.outcome();
    return {"launched", std::nullopt};
  }
  const OperationView& view() const { return view_; }

 private:
  bool finished() const { return view_.outcome() || (options_.until_launched && view_.launched()); }

  void read_events() {
    const auto silence = options_.limit == 0ms ? std::chrono::milliseconds(1h) : std::max(left(), 100ms);
    size_t index = 0;
    SseParser parser([&](std::string_view name, std::string_view data) {
      const bool fresh = index++ >= seen_;
      if (!fresh && name != "done") return;
      seen_ = std::max(seen_, index);
      show(view_.take(name, data));
    });
    agent_.stream(
        cat("/operations/", operation_, "/events"),
        [&](std::string_view bytes) {
          parser.feed(bytes);
          check_limit();
          return !finished();
        },
        silence);
  }

  void show(const std::vector<std::string>& lines) {
    if (options_.json) return;
    if (!bars_) {
      for (const auto& line : lines) print_line(line);
      return;
    }
    const auto now = Clock::now();
    if (lines.empty() && now - drawn_ < 50ms) return;
    drawn_ = now;
    screen_.draw(view_.bars(terminal_width()));
  }

  std::chrono::milliseconds left() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(started_ + options_.limit - Clock::now());
  }

  void check_limit() const {
    if (options_.limit == 0ms || left() > 0ms) return;
    throw Error(Code::stalled,
                cat(operation_, " is not done after ", human_time(options_.limit.count()), "; it goes on"),
                "glm53ctl status shows where it is");
  }

  AdminClient& agent_;
  std::string operation_;
  FollowOptions options_;
  OperationView view_;
  Screen screen_;
  Clock::time_point started_, drawn_{};
  size_t seen_ = 0;
  bool bars_ = false;
};

}  // namespace

Outcome follow(AdminClient& agent, const std::string& operation, const FollowOptions& options) {
  const InterruptGuard guard(cat(operation, " goes on; glm53ctl status shows where it is"));
  Follower follower(agent, operation, options);
  Outcome outcome = follower.run();
  if (outcome.state == "failed" && !options.json) {
    for (const auto& line : follower.view().log_lines()) print_line(line);
  }
  return outcome;
}

int follow_to_end(const GlobalOptions& global, AdminClient& agent, const std::string& operation, bool detach,
                  std::string_view done) {
  if (detach) {
    print_line(global.json ? dump({{"operation", operation}, {"state", "running"}}) : operation);
    return 0;
  }
  const Outcome outcome = follow(agent, operation, {.json = global.json});
  if (outcome.error && !global.json) throw *outcome.error;
  if (global.json) {
    Json result = {{"operation", operation}, {"state", outcome.state}};
    if (outcome.error) {
      result["error"] = {{"code", std::string(name(outcome.error->code()))}, {"message", outcome.error->what()}};
    }
    print_line(dump(result));
  } else {
    print_line(outcome.state == "done" ? std::string(done) : outcome.state);
  }
  if (outcome.error) return std::max(1, ctl_exit(outcome.error->code()));
  return outcome.state == "done" ? 0 : 1;
}

}  // namespace glm53::cli
