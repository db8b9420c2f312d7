// glm53ctl status.
#include <chrono>
#include <cmath>
#include <thread>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;
using Rows = std::vector<std::vector<std::string>>;

// Answers of an older or newer agent may lack members: every look-up has a fallback.
std::string text(const Json& json, const char* member) {
  if (!json.is_object()) return {};
  const auto at = json.find(member);
  if (at == json.end() || at->is_null()) return {};
  return at->is_string() ? at->get<std::string>() : at->dump();
}

int64_t integer(const Json& json, const char* member, int64_t fallback = 0) {
  if (!json.is_object()) return fallback;
  const auto at = json.find(member);
  return at != json.end() && at->is_number() ? at->get<int64_t>() : fallback;
}

double real(const Json& json, const char* member) {
  const auto at = json.is_object() ? json.find(member) : json.end();
  return json.is_object() && at != json.end() && at->is_number() ? at->get<double>() : 0.0;
}

bool flag(const Json& json, const char* member) {
  const auto at = json.is_object() ? json.find(member) : json.end();
  return json.is_object() && at != json.end() && at->is_boolean() && at->get<bool>();
}

const Json& part(const Json& json, const char* member) {
  static const Json nothing = nullptr;
  if (!json.is_object()) return nothing;
  const auto at = json.find(member);
  return at == json.end() ? nothing : *at;
}

Colour colour_of(std::string_view state) {
  if (state == "up" || state == "ready") return Colour::green;
  if (state == "failed" || state == "exited") return Colour::red;
  if (state == "down") return Colour::none;
  return Colour::yellow;
}

std::string bytes_or_dash(const Json& json, const char* member) {
  const int64_t bytes = integer(json, member);
  return bytes > 0 ? human_bytes(bytes) : "-";
}

std::string one_decimal(double value) {
  const auto tenths = std::llround(value * 10);
  return cat(tenths / 10, ".", tenths % 10);
}

std::string render_cluster(const Json& cluster, int64_t now_ms, bool colours) {
  if (!cluster.is_object()) return "this node is a worker; the cluster is shown on the head\n";
  const std::string state = text(cluster, "state");
  std::string line = cat(text(cluster, "name"), "  ", paint(state, colour_of(state), colours));
  if (const int64_t since = integer(cluster, "state_since"); since > 0)
    line += cat(" for ", human_time(now_ms - since));
  line += cat(", generation ", integer(cluster, "generation"), ", wanted ", text(cluster, "wanted"));
  if (const int64_t restarts = integer(cluster, "restarts"); restarts > 0) {
    line += cat(", ", restarts, restarts == 1 ? " restart" : " restarts");
  }
  line += "\n";
  if (const auto reason = text(cluster, "reason"); !reason.empty()) line += cat("  reason: ", reason, "\n");
  if (const auto operation = text(cluster, "operation"); !operation.empty()) {
    line += cat("  at work: ", operation, "\n");
  }
  return line;
}

std::string render_api(const Json& api, const Json& model, bool colours) {
  Rows rows;
  if (api.is_object()) {
    const bool ready = flag(api, "ready"), healthy = flag(api, "healthy");
    rows.push_back(
        {"api", text(api, "url"),
         cat(ready ? paint("ready", Colour::green, colours) : paint("not ready", Colour::yellow, colours), ", ",
             healthy ? paint("healthy", Colour::green, colours) : paint("not healthy", Colour::red, colours)),
         cat(integer(api, "requests_running"), " running, ", integer(api, "requests_waiting"), " waiting"),
         cat(one_decimal(real(api, "tokens_per_second")), " tokens/s, ", integer(api, "tokens_total"), " in all")});
  }
  if (model.is_object()) {
    const std::string served = text(api, "model").empty() ? text(model, "name") : text(api, "model");
    rows.push_back({"model", served, text(model, "path"), text(model, "digest").substr(0, 12)});
  }
  return render_table(rows);
}

std::vector<std::string> process_row(const std::string& node, const Json& process, bool colours) {
  std::string phase = text(process, "phase");
  const Json& progress = part(process, "progress");
  if (progress.is_array() && progress.size() == 2 && progress[1].is_number() && progress[1].get<int64_t>() > 0) {
    const double share = progress[0].get<double>() / progress[1].get<double>();
    if (share < 1) phase += cat(" ", static_cast<int>(share * 100), "%");
  }
  const std::string state = text(process, "state");
  const int64_t pid = integer(process, "pid");
  return {node,
          text(process, "name"),
          pid > 0 ? cat(pid) : "-",
          paint(state, colour_of(state), colours),
          phase.empty() ? "-" : phase,
          cat(integer(process, "generation")),
          cat(integer(process, "restarts")),
          bytes_or_dash(process, "memory_bytes"),
          text(process, "last_error")};
}

std::string render_nodes(const Json& status, bool colours) {
  Rows rows{{"NODE", "PROCESS", "PID", "STATE", "PHASE", "GEN", "RESTARTS", "MEMORY", "LAST ERROR"}};
  for (const auto& node : part(status, "nodes")) {
    const std::string name = text(node, "name");
    const Json& agent = part(node, "agent");
    if (node.contains("reachable") && !flag(node, "reachable")) {
      rows.push_back(
          {name, "agent", "-", paint("unreachable", Colour::red, colours), "-", "-", "-", "-", text(node, "address")});
    } else {
      rows.push_back({name, "agent", cat(integer(agent, "pid")), paint("up", Colour::green, colours),
                      human_time(integer(agent, "uptime_s") * 1000), "-", "-", bytes_or_dash(agent, "memory_bytes"),
                      ""});
    }
    for (const auto& process : part(node, "processes")) rows.push_back(process_row(name, process, colours));
  }
  std::string out = render_table(rows);
  for (const auto& node : part(status, "nodes")) {
    const Json& memory = part(node, "memory");
    if (integer(memory, "total") == 0) continue;
    out += cat(text(node, "name"), " (", text(node, "role"), ", ", text(node, "address"),
               "): ", human_bytes(integer(memory, "available")), " of ", human_bytes(integer(memory, "total")),
               " memory free\n");
  }
  return out;
}

std::string render_notes(const Json& status, int64_t now_ms, bool colours) {
  std::string out;
  for (const auto& drift : part(part(status, "config"), "drift")) {
    out += cat(paint("drift", Colour::yellow, colours), "  ",
               drift.is_string() ? drift.get<std::string>() : drift.dump(), "\n");
  }
  for (const auto& warning : part(status, "warnings")) {
    out += cat(paint("warning", Colour::yellow, colours), "  ", text(warning, "name"), ": ", text(warning, "text"));
    if (const auto remedy = text(warning, "remedy"); !remedy.empty()) out += cat(" (", remedy, ")");
    out += "\n";
  }
  for (const auto& event : part(status, "last_events")) {
    out += cat("  ", human_time(now_ms - integer(event, "at")), " ago: ", text(event, "text"), "\n");
  }
  return out;
}

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string render_status(const Json& status, int64_t now, bool colours) {
  std::string out = render_cluster(part(status, "cluster"), now, colours);
  out += render_api(part(status, "api"), part(status, "model"), colours);
  out += "\n" + render_nodes(status, colours);
  if (const auto notes = render_notes(status, now, colours); !notes.empty()) out += "\n" + notes;
  return out;
}

int run_status(const GlobalOptions& global, const StatusOptions& options) {
  AdminClient agent(resolve_target(global));
  if (options.watch && (options.interval < 0.1 || options.interval > 3600)) {
    throw Error(Code::usage, "--interval is out of bounds", "0.1 to 3600 seconds");
  }
  while (true) {
    const Json status = agent.get("/status");
    std::string page = global.json ? dump(status) + "\n" : render_status(status, now_ms(), colours_wanted());
    if (options.watch && !global.json && stdout_is_terminal()) page.insert(0, "\033[H\033[2J");
    print(page);
    if (!options.watch) return 0;
    std::this_thread::sleep_for(std::chrono::duration<double>(options.interval));
  }
}

}  // namespace glm53::cli
