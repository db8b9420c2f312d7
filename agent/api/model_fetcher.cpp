#include "agent/api/model_fetcher.h"

#include <optional>

#include "agent/hub/command.h"
#include "agent/hub/downloader.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::agent {

void ModelFetcher::start(const std::string& request, std::vector<HubModel> models, const Config& own,
                         const std::string& cache) {
  job_.start(request, [this, models = std::move(models), own, cache] {
    for (const HubModel& model : models) fetch(model, own, cache);
  });
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
  job_.begin(model.repo, [downloader] { downloader->cancel(); });
  const hub::DownloadResult result = downloader->run(
      request,
      [this](const hub::Progress& p) {
        job_.progress(p.bytes_done, p.bytes_total, static_cast<int64_t>(p.rate), p.eta_s);
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

}  // namespace glm53::agent
