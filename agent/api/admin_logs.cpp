// GET /logs: of this node, and of the worker through the head.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "agent/api/admin_server.h"
#include "agent/supervise/log_file.h"
#include "common/error.h"
#include "common/http_client.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

constexpr int kMostLines = 1'000'000;
constexpr const char* kText = "text/plain; charset=utf-8";

std::string query_text(const HttpRequest& request, const std::string& key) {
  const auto it = request.query.find(key);
  return it == request.query.end() ? std::string() : it->second;
}

int64_t query_number(const HttpRequest& request, const std::string& key, int64_t fallback, int64_t most) {
  const std::string text = query_text(request, key);
  if (text.empty()) return fallback;
  const auto n = parse_int(text);
  if (!n || *n < 0 || *n > most)
    throw Error(Code::usage, cat("query ", key, "=", text, " must be a number from 0 to ", most));
  return *n;
}

/// "api", "agent" or "rankN": anything else would be a path.
void check_process(const std::string& process) {
  const bool rank = process.starts_with("rank") && process.size() > 4 && process.size() < 9 &&
                    std::all_of(process.begin() + 4, process.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (process != "api" && process != "agent" && !rank) {
    throw Error(Code::usage, cat("query process=", process, " names no process"), "rank0, rank1, api or agent");
  }
}

/// ISO time of an event line, as the other logs have it.
std::string event_line(const state::EventRow& row) {
  const auto at = static_cast<time_t>(row.at / 1000);
  std::tm utc{};
  gmtime_r(&at, &utc);
  char stamp[32];
  const size_t n = std::strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%S", &utc);
  const std::string millis = cat(1000 + row.at % 1000).substr(1);
  return cat(std::string(stamp, n), ".", millis, "Z ", row.level, "  agent: ", row.text, "\n");
}

/// Passes the worker's answer on until it ends, the client leaves or the agent stops. What the worker refuses is
/// refused to the client in the worker's words.
void pass_on(const WorkerAddress& address, const std::string& path, bool follow,
             const std::shared_ptr<HttpReply>& reply, const std::atomic<bool>& stopping) {
  std::string target = path;
  bool begun = false;
  const auto begin = [&] {
    if (!begun) reply->start_stream(200, kText);
    begun = true;
  };
  while (!stopping && reply->connected()) {
    try {
      HttpClient client = address.connect();
      client.set_timeout(std::chrono::seconds(2), std::chrono::seconds(2));
      const HttpAnswer answer = client.stream("GET", target, "", [&](std::string_view chunk) {
        begin();
        return !stopping && reply->write(std::string(chunk));
      });
      if (answer.status != 200 && !begun) {
        HttpResponse refusal;
        refusal.status = answer.status;
        refusal.body = answer.body;
        reply->send(std::move(refusal));
        return;
      }
      break;  // the log ended
    } catch (const Error& e) {
      begin();
      if (e.code() != Code::stalled && !follow)
        reply->write(cat("[the worker's agent does not answer: ", e.what(), "]\n"));
      if (e.code() != Code::stalled && follow) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    }
    if (!follow) break;
    // A quiet log ends the attempt so that a client that left is noticed; the next one goes on with new lines only.
    target = path.substr(0, path.rfind("&lines=")) + "&lines=0";
  }
  begin();
  reply->finish();
}

}  // namespace

bool AdminServer::is_remote(const std::string& node, const std::string& process) {
  if (context_.driver == nullptr) return false;
  if (node == context_.settings.name || node == "head") return false;
  const DriverView view = context_.driver->view();
  if (!view.worker) return false;
  if (node == "worker" || (view.worker->report && node == view.worker->report->name)) return true;
  if (!node.empty()) throw Error(Code::not_found, cat("there is no node '", node, "'"), "head or worker");
  if (process == "agent" || process == "api") return false;
  const auto runs_here = [&](const NodeReport& report) {
    return std::any_of(report.processes.begin(), report.processes.end(),
                       [&](const auto& p) { return p.name == process; });
  };
  return !runs_here(view.head) && view.worker->report && runs_here(*view.worker->report);
}

void AdminServer::get_logs(const HttpRequest& request, const Reply& reply) {
  const std::string process = query_text(request, "process");
  check_process(process);
  const auto lines = static_cast<int>(query_number(request, "lines", 100, kMostLines));
  const bool follow = query_number(request, "follow", 0, 1) == 1;
  const std::string generation = query_text(request, "generation");
  if (is_remote(query_text(request, "node"), process)) {
    worker_log(request, reply);
    return;
  }
  if (process == "agent") {
    agent_log(lines, follow, reply);
    return;
  }
  const auto known = supervise::log_generations(context_.settings.logs_dir, process);
  if (known.empty()) throw Error(Code::not_found, cat("there is no log of ", process, " on ", context_.settings.name));
  const auto n =
      static_cast<uint64_t>(query_number(request, "generation", static_cast<int64_t>(known.back()), int64_t{1} << 53));
  if (std::find(known.begin(), known.end(), n) == known.end()) {
    throw Error(Code::not_found, cat("there is no log of ", process, " of generation ", n),
                cat("the oldest one kept is ", known.front(), ", the newest ", known.back()));
  }
  supervise::LogReader reader(supervise::log_path(context_.settings.logs_dir, process, n));
  const std::string text = redact_lines(reader.tail(lines));
  if (!follow) {
    HttpResponse response;
    response.content_type = kText;
    response.body = text;
    reply->send(std::move(response));
    return;
  }
  reply->start_stream(200, kText);
  if (!text.empty()) reply->write(text);
  context_.streams.follow_log(reply, std::move(reader));
}

void AdminServer::agent_log(int lines, bool follow, const Reply& reply) {
  const auto rows = context_.journal.last(std::min(lines, 10'000));
  std::string text;
  for (const auto& row : rows) text += event_line(row);
  if (!follow) {
    HttpResponse response;
    response.content_type = kText;
    response.body = text;
    reply->send(std::move(response));
    return;
  }
  reply->start_stream(200, kText);
  if (!text.empty()) reply->write(text);
  const auto newest = context_.journal.last(1);
  context_.streams.follow_lines(reply, newest.empty() ? 0 : newest.back().id, event_line);
}

void AdminServer::worker_log(const HttpRequest& request, const Reply& reply) {
  const auto address = context_.driver->worker();
  if (!address) throw Error(Code::not_found, "there is no worker");
  const bool follow = query_number(request, "follow", 0, 1) == 1;
  std::string path = cat("/admin/v1/logs?process=", query_text(request, "process"));
  if (const std::string n = query_text(request, "generation"); !n.empty()) {
    path += cat("&generation=", query_number(request, "generation", 0, int64_t{1} << 53));
  }
  if (follow) path += "&follow=1";
  const std::string first = cat(path, "&lines=", query_number(request, "lines", 100, kMostLines));
  in_background(
      [this, address = *address, first, follow, reply] { pass_on(address, first, follow, reply, stopping_); });
}

}  // namespace glm53::agent
