#include "agent/api/model_fetcher.h"

#include <optional>

#include "agent/hub/command.h"
#include "agent/hub/downloader.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {

using reconcile::Weights;

ModelFetcher::ModelFetcher(std::function<void()> on_change, std::function<void(const std::string&)> on_event)
    : on_change_(std::move(on_change)), on_event_(std::move(on_event)) {}

void ModelFetcher::stop() {
  cancel();
  if (thread_.joinable()) thread_.join();
}

void ModelFetcher::start(const std::string& request, std::vector<HubModel> models, const Config& own,
                         const std::string& cache) {
  {
    const std::lock_guard lock(mutex_);
    const bool same = report_.request == request;
    if (same && (report_.state == Weights::fetching || report_.state == Weights::present)) return;
    if (running_) {
      cancelled_ = true;
      if (downloader_) downloader_->cancel();
      throw Error(Code::busy, "another download is being ended");
    }
    report_ = FetchReport();
    report_.request = request;
    report_.state = Weights::fetching;
    running_ = true;
    cancelled_ = false;
  }
  if (thread_.joinable()) thread_.join();
  thread_ = std::thread([this, request, models = std::move(models), own, cache] { run(request, models, own, cache); });
}

void ModelFetcher::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (downloader_) downloader_->cancel();
}

FetchReport ModelFetcher::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

void ModelFetcher::run(const std::string&, const std::vector<HubModel>& models, const Config& own,
                       const std::string& cache) {
  try {
    for (const HubModel& model : models) fetch(model, own, cache);
    finish(Weights::present, nullptr);
  } catch (const Error& e) {
    finish(e.code() == Code::cancelled ? Weights::none : Weights::failed, &e);
  } catch (const std::exception& e) {
    const Error wrapped(Code::internal, e.what());
    finish(Weights::failed, &wrapped);
  }
}

void ModelFetcher::fetch(const HubModel& model, const Config& own, const std::string& cache) {
  // The head's keys say which model; the node's own say from where.
  Config config = own;
  config.set(model.key + ".repo", model.repo, "the cluster");
  config.set(model.key + ".revision", model.commit, "the cluster");
  hub::CommandOptions options;
  options.what = cat(model.repo, "@", model.commit);
  options.cache = cache;
  options.no_env = true;  // the variables of a service manager are nobody's wish
  auto [settings, request] = hub::resolve_command(
      options, config, [](const std::string&) { return std::optional<std::string>(); }, on_event_);
  if (!settings.token.empty()) log::add_secret(settings.token);
  const auto downloader = std::make_shared<hub::Downloader>(settings);
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_) throw Error(Code::cancelled, "the download was called off");
    downloader_ = downloader;
    report_.model = model.repo;
  }
  const hub::DownloadResult result = downloader->run(
      request,
      [this](const hub::Progress& p) {
        const std::lock_guard lock(mutex_);
        report_.bytes_done = p.bytes_done;
        report_.bytes_total = p.bytes_total;
        report_.rate = static_cast<int64_t>(p.rate);
        report_.eta_s = p.eta_s;
      },
      on_event_);
  if (!result.complete) {
    throw Error(Code::weights, cat("E601 ", result.snapshot, " is not complete after the download"),
                "look at hub.exclude: it must not leave out what the model needs");
  }
  if (result.bytes_downloaded > 0) {
    on_event_(cat(model.repo, "@", model.commit.substr(0, 12), ": ", human_bytes(result.bytes_downloaded),
                  " downloaded from ", result.source));
  }
}

void ModelFetcher::finish(Weights state, const Error* error) {
  {
    const std::lock_guard lock(mutex_);
    downloader_.reset();
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
