#include "agent/api/worker_link.h"

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

namespace {

constexpr milliseconds kLively{500}, kQuiet{3000}, kLost{10000};
constexpr milliseconds kConnect{2000}, kRead{5000};

reconcile::Time wall_now() {
  return std::chrono::time_point_cast<milliseconds>(std::chrono::system_clock::now());
}

/// What in a report makes the reconciler look again.
std::string essence(const NodeReport& report) {
  std::string out;
  for (const ProcessReport& p : report.processes) {
    out += cat(p.name, ":", p.generation, ":", static_cast<int>(p.phase), p.ready, p.ended, p.stop_requested, ";");
  }
  return out;
}

std::string error_text(const HttpAnswer& answer) {
  try {
    const auto j = parse_json(answer.body);
    return j.at("error").at("message").get<std::string>();
  } catch (const std::exception&) {
    return cat("HTTP status ", answer.status);
  }
}

}  // namespace

/// Keeps the client's header out of worker_link.h.
class HttpClientHolder {
 public:
  explicit HttpClientHolder(const WorkerAddress& address) : address_(address) {}
  /// Connected anew after forget(): certificates may be others by then. Throws Error(unavailable).
  HttpAnswer request(std::string_view method, std::string_view path, std::string_view body = {}) {
    if (!client_) {
      client_ = std::make_unique<HttpClient>(address_.connect());
      client_->set_timeout(kConnect, kRead);
    }
    return client_->request(method, path, body);
  }
  void forget() { client_.reset(); }

 private:
  const WorkerAddress& address_;
  std::unique_ptr<HttpClient> client_;
};

WorkerLink::WorkerLink(WorkerAddress address, uint64_t epoch, std::shared_ptr<trust::Trust> trust,
                       std::function<void()> on_change)
    : address_(std::move(address)),
      epoch_(epoch),
      on_change_(std::move(on_change)),
      renewal_(address_.endpoint.starts_with("https://") ? std::move(trust) : nullptr) {
  thread_ = std::thread([this] { run(); });
}

WorkerLink::~WorkerLink() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

WorkerView WorkerLink::view() const {
  const std::lock_guard lock(mutex_);
  WorkerView v;
  v.report = report_;
  v.age = std::chrono::duration_cast<milliseconds>(steady_clock::now() - reported_);
  v.reachable = report_.has_value() && v.age < kLost;
  v.error = error_;
  v.taken_at = taken_at_;
  return v;
}

bool WorkerLink::busy() const {
  const std::lock_guard lock(mutex_);
  return command_.has_value();
}

void WorkerLink::submit(const NodeCommand& command) {
  {
    const std::lock_guard lock(mutex_);
    if (command_) throw Error(Code::busy, "the worker is at work on another action");
    command_ = command;
    command_->epoch = epoch_;
  }
  changed_.notify_all();
}

std::optional<WorkerLink::Result> WorkerLink::take_result() {
  const std::lock_guard lock(mutex_);
  return std::exchange(result_, std::nullopt);
}

void WorkerLink::reconnect() {
  const std::lock_guard lock(mutex_);
  reconnect_ = true;
}

void WorkerLink::set_lively(bool lively) {
  {
    const std::lock_guard lock(mutex_);
    if (lively == lively_) return;
    lively_ = lively;
  }
  changed_.notify_all();
}

void WorkerLink::run() {
  HttpClientHolder client(address_);
  bool lively = false;
  while (true) {
    std::optional<NodeCommand> command;
    {
      std::unique_lock lock(mutex_);
      const auto period = lively_ ? kLively : kQuiet;
      changed_.wait_for(lock, period, [&] { return stopping_ || command_ || (lively_ && !lively); });
      if (stopping_) return;
      lively = lively_;
      command = command_;
      if (std::exchange(reconnect_, false)) client.forget();
    }
    try {
      if (command) execute(client, *command);
      observe(client);
      renew(client);
    } catch (const std::exception& e) {
      log::error(cat("worker link: ", std::string_view(e.what())));
    }
    if (command) {
      const std::lock_guard lock(mutex_);
      command_.reset();
    }
    if (command) on_change_();
  }
}

void WorkerLink::execute(HttpClientHolder& client, const NodeCommand& command) {
  Result result;
  try {
    const HttpAnswer answer = client.request("POST", "/admin/v1/node/actions", to_json(command));
    if (answer.status != 200) result.error = cat("worker: ", error_text(answer));
  } catch (const Error& e) {
    result.error = cat("worker: ", e.line());
  }
  const std::lock_guard lock(mutex_);
  result_ = std::move(result);
}

void WorkerLink::renew(HttpClientHolder& client) {
  {
    const std::lock_guard lock(mutex_);
    if (!error_.empty() || !report_) return;  // it did not answer just now
  }
  try {
    const bool done = renewal_.tend([&](const std::string& body) {
      const HttpAnswer answer = client.request("POST", "/admin/v1/node/certificate", body);
      return trust::Renewal::Answer{answer.status, answer.body};
    });
    if (done) client.forget();
  } catch (const Error& e) {
    log::warn(cat("the worker's certificate was not renewed: ", e.line()));
  }
}

void WorkerLink::observe(HttpClientHolder& client) {
  std::optional<NodeReport> report;
  std::string error;
  try {
    const HttpAnswer answer = client.request("GET", cat("/admin/v1/node?epoch=", epoch_));
    if (answer.status == 200) {
      report = parse_report(answer.body);
    } else {
      error = error_text(answer);
    }
  } catch (const Error& e) {
    error = e.what();
    client.forget();
  }
  bool changed = false;
  {
    const std::lock_guard lock(mutex_);
    if (report) {
      changed = contact_lost_ || !report_ || essence(*report) != essence(*report_);
      report_ = std::move(report);
      reported_ = steady_clock::now();
      taken_at_ = wall_now();
      contact_lost_ = false;
      error_.clear();
    } else {
      const bool lost = !report_ || steady_clock::now() - reported_ >= kLost;
      changed = lost && !contact_lost_;
      contact_lost_ = contact_lost_ || lost;
      error_ = std::move(error);
    }
  }
  if (changed) on_change_();
}

}  // namespace glm53::agent
