#include "agent/api/hub_models.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "agent/hub/cache.h"
#include "agent/hub/names.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;
constexpr std::string_view kKeys[] = {"model", "draft"};
constexpr JsonLimits kLimits{.max_bytes = 1u << 16, .max_depth = 6};

std::string member(const Json& j, const char* name) {
  const auto it = j.find(name);
  if (it == j.end() || !it->is_string())
    throw Error(Code::usage, cat("action: a model needs the text '", std::string_view(name), "'"));
  return it->get<std::string>();
}

}  // namespace

std::vector<HubModel> hub_models(const Config& cluster) {
  std::vector<HubModel> models;
  for (const std::string_view key : kKeys) {
    const std::string& repo = cluster.text(cat(key, ".repo"));
    if (!cluster.text(cat(key, ".path")).empty() || repo.empty()) continue;
    hub::check_repo_id(repo);
    const std::string& revision = cluster.text(cat(key, ".revision"));
    if (!hub::is_commit(revision)) {
      throw Error(Code::config,
                  cat(key, ".revision = \"", revision, "\" is no commit (", cluster.source(cat(key, ".revision")), ")"),
                  cat("a start needs the commit's 40 hex digits; glm53ctl download ", repo,
                      " names the one of a branch in the last line"));
    }
    models.push_back({std::string(key), repo, revision});
  }
  return models;
}

std::string snapshot_folder(const std::string& cache, const HubModel& model) {
  return hub::Cache(cache).snapshot_dir(model.repo, model.commit);
}

Json with_local_models(Json flat, const std::string& cache) {
  for (const HubModel& m : hub_models(Config::from_json(flat, "configuration of the cluster"))) {
    flat[m.key + ".path"] = snapshot_folder(cache, m);
  }
  return flat;
}

Config with_local_models(const Config& cluster, const std::string& cache) {
  return Config::from_json(with_local_models(cluster.to_json(), cache), "configuration of the cluster");
}

std::string to_json(const std::vector<HubModel>& models) {
  Json list = Json::array();
  for (const HubModel& m : models) list.push_back({{"key", m.key}, {"repo", m.repo}, {"commit", m.commit}});
  return dump({{"models", list}});
}

std::vector<HubModel> parse_hub_models(std::string_view json) {
  const Json j = parse_json(json, kLimits);
  const auto list = j.is_object() ? j.find("models") : j.end();
  if (!j.is_object() || list == j.end() || !list->is_array() || list->empty() || list->size() > std::size(kKeys)) {
    throw Error(Code::usage, "action: 'config' must be {\"models\":[…]} with one or two models");
  }
  std::vector<HubModel> models;
  for (const Json& entry : *list) {
    if (!entry.is_object()) throw Error(Code::usage, "action: a model must be an object");
    HubModel m{member(entry, "key"), member(entry, "repo"), member(entry, "commit")};
    if (std::find(std::begin(kKeys), std::end(kKeys), m.key) == std::end(kKeys))
      throw Error(Code::usage, "action: the key of a model is model or draft");
    hub::check_repo_id(m.repo);
    if (!hub::is_commit(m.commit)) throw Error(Code::usage, "action: 'commit' must be 40 hex digits");
    models.push_back(std::move(m));
  }
  return models;
}

}  // namespace glm53::agent
