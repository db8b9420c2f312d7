#include "agent/api/model_job.h"

#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {

using reconcile::Weights;

void ModelJob::start(const std::string& request, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    const bool same = report_.request == request;
    if (same && (report_.state == Weights::fetching || report_.state == Weights::present)) return;
    if (running_) {
      cancelled_ = true;
      if (call_off_) call_off_();
      throw Error(Code::busy, cat("another ", what_, " is being ended"));
    }
    report_ = FetchReport();
    report_.request = request;
    report_.state = Weights::fetching;
    running_ = true;
    cancelled_ = false;
  }
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread([this, work = std::move(work)] { run(work); });
}

void ModelJob::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (call_off_) call_off_();
}

void ModelJob::stop() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

FetchReport ModelJob::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

void ModelJob::begin(const std::string& model, std::function<void()> call_off) {
  const std::lock_guard lock(mutex_);
  if (cancelled_) throw Error(Code::cancelled, cat("the ", what_, " was called off"));
  call_off_ = std::move(call_off);
  report_.model = model;
}

void ModelJob::progress(int64_t bytes_done, int64_t bytes_total, int64_t rate, int64_t eta_s) {
  const std::lock_guard lock(mutex_);
  report_.bytes_done = bytes_done;
  report_.bytes_total = bytes_total;
  report_.rate = rate;
  report_.eta_s = eta_s;
}

void ModelJob::run(const std::function<void()>& work) {
  try {
    work();
    finish(Weights::present, nullptr);
  } catch (const Error& e) {
    finish(e.code() == Code::cancelled ? Weights::none : Weights::failed, &e);
  } catch (const std::exception& e) {
    const Error wrapped(Code::internal, e.what());
    finish(Weights::failed, &wrapped);
  }
}

void ModelJob::finish(Weights state, const Error* error) {
  {
    const std::lock_guard lock(mutex_);
    call_off_ = nullptr;
    running_ = false;
    report_.state = state;
    if (state == Weights::none) report_.request.clear();
    if (error != nullptr && state == Weights::failed) {
      report_.error_code = name(error->code());
      report_.error = log::redact(error->what());
      report_.remedy = log::redact(error->remedy());
    }
  }
  on_change_();
}

}  // namespace glm53::agent
