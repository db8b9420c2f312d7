#include "agent/api/report.h"

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

std::string text(const Json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_string() ? it->get<std::string>() : std::string();
}
int64_t number(const Json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_number() ? it->get<int64_t>() : 0;
}
bool flag(const Json& j, const char* key) {
  const auto it = j.find(key);
  return it != j.end() && it->is_boolean() && it->get<bool>();
}
const Json& object(const Json& j, const char* key) {
  static const Json kEmpty = Json::object();
  const auto it = j.find(key);
  return it != j.end() && it->is_object() ? *it : kEmpty;
}

std::string_view state_of(const ProcessReport& p) {
  if (p.ended) return "exited";
  if (p.stop_requested) return "stopping";
  return p.ready ? "ready" : "starting";
}

Json exit_json(const ProcessReport& p) {
  if (!p.ended) return nullptr;
  const bool known = p.exit_code || p.exit_signal != 0;
  return {{"code", p.exit_code ? Json(*p.exit_code) : Json(nullptr)},
          {"signal", p.exit_signal},
          {"text", known ? describe_exit(p.exit_code.value_or(0), p.exit_signal) : "unknown: no agent was there"},
          {"ms_ago", p.ended_ms_ago}};
}

Json process_json(const ProcessReport& p) {
  Json progress = nullptr;
  if (p.progress) progress = Json::array({p.progress->first, p.progress->second});
  return {{"name", p.name},
          {"pid", p.ended ? Json(nullptr) : Json(p.pid)},
          {"generation", p.generation},
          {"state", std::string(state_of(p))},
          {"phase", std::string(name(p.phase))},
          {"progress", progress},
          {"exit", exit_json(p)},
          {"restarts", p.restarts},
          {"memory_bytes", p.memory_bytes},
          {"last_error", p.last_error},
          {"ready", p.ready},
          {"stop_requested", p.stop_requested},
          {"silent_ms", p.silent_ms},
          {"extended_ms", p.extended_ms},
          {"started_ms_ago", p.started_ms_ago},
          {"config_hash", p.config_hash}};
}

Json fetch_json(const FetchReport& f) {
  if (f.request.empty()) return nullptr;
  Json error = nullptr;
  if (!f.error.empty()) error = {{"code", f.error_code}, {"message", f.error}, {"remedy", f.remedy}};
  return {{"request", f.request},
          {"state", std::string(name(f.state))},
          {"model", f.model},
          {"bytes_done", f.bytes_done},
          {"bytes_total", f.bytes_total},
          {"rate", f.rate},
          {"eta_s", f.eta_s},
          {"error", error}};
}

FetchReport parse_fetch(const Json& j) {
  FetchReport f;
  f.request = text(j, "request");
  f.state = reconcile::parse_weights(text(j, "state"));
  f.model = text(j, "model");
  f.bytes_done = number(j, "bytes_done");
  f.bytes_total = number(j, "bytes_total");
  f.rate = number(j, "rate");
  f.eta_s = number(j, "eta_s");
  const Json& error = object(j, "error");
  f.error_code = text(error, "code");
  f.error = text(error, "message");
  f.remedy = text(error, "remedy");
  return f;
}

ProcessReport parse_process(const Json& j) {
  ProcessReport p;
  p.name = text(j, "name");
  p.pid = number(j, "pid");
  p.generation = static_cast<uint64_t>(number(j, "generation"));
  p.ready = flag(j, "ready");
  p.stop_requested = flag(j, "stop_requested");
  p.phase = parse_phase(text(j, "phase")).value_or(Phase::exec);
  const auto progress = j.find("progress");
  if (progress != j.end() && progress->is_array() && progress->size() == 2 && (*progress)[0].is_number_unsigned() &&
      (*progress)[1].is_number_unsigned()) {
    p.progress = {(*progress)[0].get<uint64_t>(), (*progress)[1].get<uint64_t>()};
  }
  const auto exit = j.find("exit");
  if (exit != j.end() && exit->is_object()) {
    p.ended = true;
    const auto code = exit->find("code");
    if (code != exit->end() && code->is_number_integer()) p.exit_code = code->get<int>();
    p.exit_signal = static_cast<int>(number(*exit, "signal"));
    p.ended_ms_ago = number(*exit, "ms_ago");
  }
  p.restarts = number(j, "restarts");
  p.memory_bytes = static_cast<uint64_t>(number(j, "memory_bytes"));
  p.last_error = text(j, "last_error");
  p.silent_ms = number(j, "silent_ms");
  p.extended_ms = number(j, "extended_ms");
  p.started_ms_ago = number(j, "started_ms_ago");
  p.config_hash = text(j, "config_hash");
  return p;
}

}  // namespace

Json to_json(const NodeReport& r) {
  Json processes = Json::array();
  for (const ProcessReport& p : r.processes) processes.push_back(process_json(p));
  return {{"name", r.name},
          {"role", r.role},
          {"address", r.address},
          {"agent",
           {{"version", r.version},
            {"pid", r.pid},
            {"uptime_s", r.uptime_s},
            {"memory_bytes", r.agent_memory},
            {"epoch", r.epoch}}},
          {"memory", {{"total", r.memory_total}, {"available", r.memory_available}}},
          {"download", fetch_json(r.fetch)},
          {"processes", processes}};
}

NodeReport parse_report(std::string_view json) {
  const Json j = parse_json(json, {.max_bytes = 4u << 20, .max_depth = 16});
  if (!j.is_object()) throw Error(Code::corrupt, "the answer to /node is no object");
  NodeReport r;
  r.name = text(j, "name");
  r.role = text(j, "role");
  r.address = text(j, "address");
  const Json& agent = object(j, "agent");
  r.version = text(agent, "version");
  r.pid = number(agent, "pid");
  r.uptime_s = number(agent, "uptime_s");
  r.agent_memory = static_cast<uint64_t>(number(agent, "memory_bytes"));
  r.epoch = static_cast<uint64_t>(number(agent, "epoch"));
  const Json& memory = object(j, "memory");
  r.memory_total = static_cast<uint64_t>(number(memory, "total"));
  r.memory_available = static_cast<uint64_t>(number(memory, "available"));
  r.fetch = parse_fetch(object(j, "download"));
  const auto processes = j.find("processes");
  if (processes != j.end() && processes->is_array()) {
    for (const Json& p : *processes) {
      if (p.is_object()) r.processes.push_back(parse_process(p));
    }
  }
  return r;
}

Code parse_code(std::string_view text) {
  for (int i = 0; i <= static_cast<int>(Code::internal); ++i) {
    if (glm53::name(static_cast<Code>(i)) == text) return static_cast<Code>(i);
  }
  return Code::internal;
}

int rank_of(std::string_view process_name) {
  if (!process_name.starts_with("rank")) return -1;
  return static_cast<int>(parse_int(process_name.substr(4)).value_or(-1));
}

std::string fetch_text(const FetchReport& f) {
  if (f.state == reconcile::Weights::failed) return f.error;
  if (f.bytes_total <= 0) return cat(f.model, ": asking what there is");
  return cat(f.model, ": ", f.bytes_done * 100 / f.bytes_total, " % of ", human_bytes(f.bytes_total), ", ",
             human_bytes(f.rate), "/s");
}

reconcile::ObservedNode to_observed(const NodeReport& report, reconcile::Time now, bool reachable,
                                    const std::string& request) {
  using std::chrono::milliseconds;
  reconcile::ObservedNode node;
  node.name = report.role;
  node.reachable = reachable;
  const bool leftover = request.empty() && report.fetch.state == reconcile::Weights::fetching;
  if (leftover || (!request.empty() && report.fetch.request == request)) {
    node.weights = report.fetch.state;
    node.weights_text = fetch_text(report.fetch);
  }
  for (const ProcessReport& p : report.processes) {
    reconcile::ObservedProcess o;
    o.rank = rank_of(p.name);
    o.generation = p.generation;
    o.ready = p.ready;
    o.stop_requested = p.stop_requested;
    o.phase = p.phase;
    o.started_at = now - milliseconds(p.started_ms_ago);
    o.last_heard = now - milliseconds(p.silent_ms);
    o.extended_until = now + milliseconds(p.extended_ms);
    if (p.extended_ms == 0) o.extended_until = {};
    if (p.ended) o.end = reconcile::ProcessEnd{p.exit_code, p.exit_signal, now - milliseconds(p.ended_ms_ago)};
    o.last_error = p.last_error;
    o.config_hash = p.config_hash;
    node.processes.push_back(std::move(o));
  }
  return node;
}

HostMemory host_memory() {
  HostMemory memory;
  std::string content;
  try {
    content = read_file("/proc/meminfo", 1u << 16);
  } catch (const Error&) {
    return memory;
  }
  for (const std::string& line : split(content, '\n')) {
    const auto value = [&](std::string_view key) -> std::optional<uint64_t> {
      if (!line.starts_with(key)) return std::nullopt;
      std::string_view rest = trim(std::string_view(line).substr(key.size()));
      rest = rest.substr(0, rest.find(' '));
      const auto kib = parse_int(rest);
      return kib ? std::optional(static_cast<uint64_t>(*kib) * 1024) : std::nullopt;
    };
    if (const auto total = value("MemTotal:")) memory.total = *total;
    if (const auto available = value("MemAvailable:")) memory.available = *available;
  }
  return memory;
}

}  // namespace glm53::agent
