#include "agent/api/streams.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;
using std::chrono::steady_clock;
constexpr milliseconds kTick{300};
constexpr auto kKeepAlive = std::chrono::seconds(10);
constexpr int kBatch = 200;

}  // namespace

std::string sse(std::string_view event, std::string_view data) {
  return cat("event: ", event, "\ndata: ", data, "\n\n");
}

std::string redact_lines(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    out += log::redact(text.substr(at, end - at));
    if (end < text.size()) out += '\n';
    at = end + 1;
  }
  return out;
}

Json to_json(const state::EventRow& row) {
  Json j{{"id", row.id},
         {"at", row.at},
         {"level", row.level},
         {"kind", row.kind},
         {"operation", row.operation.empty() ? Json(nullptr) : Json(row.operation)},
         {"generation", row.generation},
         {"text", row.text}};
  return j;
}

Streams::Streams(Journal& journal, Reports reports) : journal_(journal), reports_(std::move(reports)) {
  thread_ = std::thread([this] { run(); });
}

Streams::~Streams() {
  stop();
}

void Streams::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Streams::notify() {
  {
    const std::lock_guard lock(mutex_);
    news_ = true;
  }
  changed_.notify_all();
}

void Streams::add(EventStream stream) {
  if (!stream.line) stream.reply->start_stream(200, "text/event-stream", {{"Cache-Control", "no-cache"}});
  stream.spoke = steady_clock::now();
  {
    const std::lock_guard lock(mutex_);
    fresh_events_.push_back(std::move(stream));
    news_ = true;
  }
  changed_.notify_all();
}

void Streams::follow_operation(std::shared_ptr<HttpReply> reply, const std::string& operation) {
  EventStream stream;
  stream.reply = std::move(reply);
  stream.operation = operation;
  add(std::move(stream));
}

void Streams::follow_events(std::shared_ptr<HttpReply> reply, int64_t after) {
  EventStream stream;
  stream.reply = std::move(reply);
  stream.last = after;
  add(std::move(stream));
}

void Streams::follow_lines(std::shared_ptr<HttpReply> reply, int64_t after,
                           std::function<std::string(const state::EventRow&)> line) {
  EventStream stream;
  stream.reply = std::move(reply);
  stream.last = after;
  stream.line = std::move(line);
  add(std::move(stream));
}

void Streams::follow_log(std::shared_ptr<HttpReply> reply, supervise::LogReader reader) {
  {
    const std::lock_guard lock(mutex_);
    fresh_logs_.push_back({std::move(reply), std::move(reader)});
    news_ = true;
  }
  changed_.notify_all();
}

void Streams::run() {
  while (true) {
    {
      std::unique_lock lock(mutex_);
      const auto ready = [&] { return news_ || stopping_; };
      if (events_.empty() && logs_.empty()) {
        changed_.wait(lock, ready);
      } else {
        changed_.wait_for(lock, kTick, ready);
      }
      if (stopping_) break;
      news_ = false;
      for (auto& stream : fresh_events_) events_.push_back(std::move(stream));
      for (auto& stream : fresh_logs_) logs_.push_back(std::move(stream));
      fresh_events_.clear();
      fresh_logs_.clear();
    }
    try {
      serve();
    } catch (const std::exception& e) {
      log::error(cat("streams: ", std::string_view(e.what())));
    }
  }
  for (auto& stream : events_) stream.reply->finish();
  for (auto& stream : logs_) stream.reply->finish();
}

void Streams::serve() {
  const bool wants_progress =
      std::any_of(events_.begin(), events_.end(), [](const auto& s) { return !s.operation.empty(); });
  const auto reports = wants_progress ? reports_() : std::vector<NodeReport>();
  for (EventStream& stream : events_) pump(stream, reports);
  std::erase_if(events_, [](const EventStream& s) { return s.finished || !s.reply->connected(); });
  for (LogStream& stream : logs_) {
    const std::string text = redact_lines(stream.reader.read_new());
    if (!text.empty()) stream.reply->write(text);
  }
  std::erase_if(logs_, [](const LogStream& s) { return !s.reply->connected(); });
}

void Streams::pump(EventStream& stream, const std::vector<NodeReport>& reports) {
  const bool of_operation = !stream.operation.empty();
  if (of_operation) send_progress(stream, reports);
  while (true) {
    const auto rows = journal_.after(stream.last, kBatch, stream.operation);
    for (const state::EventRow& row : rows) {
      stream.last = row.id;
      stream.spoke = steady_clock::now();
      const std::string text =
          stream.line ? stream.line(row) : sse(row.kind, of_operation ? row.data_json : dump(to_json(row)));
      if (!stream.reply->write(text)) {
        stream.finished = true;
        return;
      }
      if (of_operation && row.kind == "done") {
        stream.reply->finish();
        stream.finished = true;
        return;
      }
    }
    if (rows.size() < static_cast<size_t>(kBatch)) break;
  }
  // A comment now and then: a client that is gone is noticed, one that waits knows that we live.
  if (!stream.line && steady_clock::now() - stream.spoke > kKeepAlive) {
    stream.spoke = steady_clock::now();
    stream.reply->write(": waiting\n\n");
  }
}

void Streams::send_progress(EventStream& stream, const std::vector<NodeReport>& reports) {
  for (const NodeReport& node : reports) {
    send_download(stream, node);
    for (const ProcessReport& p : node.processes) {
      if (p.ended) continue;
      Json progress = nullptr;
      if (p.progress) progress = Json::array({p.progress->first, p.progress->second});
      Json data{{"at", state::now_ms()},
                {"node", node.role},
                {"process", p.name},
                {"phase", std::string(name(p.phase))},
                {"progress", progress}};
      const std::string key = cat(node.role, p.name, p.generation);
      const std::string essence = cat(name(p.phase), dump(progress));
      std::string& sent = stream.progress[key];
      if (sent == essence) continue;
      sent = essence;
      stream.spoke = steady_clock::now();
      stream.reply->write(sse("progress", dump(data)));
    }
  }
}

void Streams::send_download(EventStream& stream, const NodeReport& node) {
  if (node.fetch.state != reconcile::Weights::fetching || node.fetch.bytes_total <= 0) return;
  const Json progress = Json::array({node.fetch.bytes_done, node.fetch.bytes_total});
  const Json data{{"at", state::now_ms()},     {"node", node.role},    {"process", "download"},
                  {"phase", node.fetch.model}, {"progress", progress}, {"rate", node.fetch.rate},
                  {"eta_s", node.fetch.eta_s}};
  std::string& sent = stream.progress[cat(node.role, "download")];
  const std::string essence = cat(node.fetch.model, dump(progress));
  if (sent == essence) return;
  sent = essence;
  stream.spoke = steady_clock::now();
  stream.reply->write(sse("progress", dump(data)));
}

}  // namespace glm53::agent
