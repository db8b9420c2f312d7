#include "engine/api/settings.h"

#include <algorithm>
#include <ctime>
#include <filesystem>

#include <nlohmann/json.hpp>

#include "common/config.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::api {

namespace {

using Json = nlohmann::ordered_json;

Json read_json(const std::string& path) {
  try {
    return parse_json(read_file(path));
  } catch (const Error& e) {
    throw Error(Code::weights, cat(path, ": ", e.what()));
  }
}

std::vector<int32_t> token_ids(const Json& value, const std::string& where) {
  std::vector<int32_t> ids;
  const auto add = [&](const Json& id) {
    if (!id.is_number_integer()) throw Error(Code::weights, cat(where, ": eos_token_id is no token id"));
    ids.push_back(id.get<int32_t>());
  };
  if (value.is_array()) {
    for (const Json& id : value) add(id);
  } else {
    add(value);
  }
  return ids;
}

float number(const Json& object, const char* key, float fallback) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<float>() : fallback;
}

void read_generation_config(const std::string& path, Settings& settings) {
  const Json file = read_json(path);
  if (!file.is_object() || !file.contains("eos_token_id")) {
    throw Error(Code::weights, cat(path, ": eos_token_id is missing"));
  }
  settings.eos = token_ids(file["eos_token_id"], path);
  settings.sampling.temperature = number(file, "temperature", 1);
  settings.sampling.top_p = number(file, "top_p", 1);
  settings.sampling.min_p = number(file, "min_p", 0);
  settings.sampling.repetition = number(file, "repetition_penalty", 1);
  settings.sampling.top_k = std::max(0, static_cast<int32_t>(number(file, "top_k", 0)));
}

void read_model_config(const std::string& path, int64_t wanted_context, Settings& settings) {
  const Json file = read_json(path);
  const Json& text = file.is_object() && file.contains("text_config") ? file["text_config"] : file;
  const auto positive = [&](const char* key) {
    const auto found = text.find(key);
    if (found == text.end() || !found->is_number_integer() || found->get<int64_t>() <= 0) {
      throw Error(Code::weights, cat(path, ": ", key, " is missing or no positive integer"));
    }
    return found->get<int32_t>();
  };
  if (!text.is_object()) throw Error(Code::weights, cat(path, ": not an object"));
  settings.model_rows = positive("vocab_size");
  const int32_t longest = positive("max_position_embeddings");
  settings.max_context =
      wanted_context > 0 ? static_cast<int32_t>(std::min<int64_t>(wanted_context, longest)) : longest;
}

}  // namespace

Settings load_settings(const ApiConfig& process) {
  const Config config = Config::from_json(parse_json(process.config_json), "the API process's configuration");
  Settings s;
  s.process = process;
  if (config.text("model.path").empty()) {
    throw Error(Code::config, "model.path is empty", "set it to the folder of the checkpoint");
  }
  s.model_dir = config.path("model.path");
  std::string name = config.text("api.model_name");
  if (name.empty()) {
    const std::filesystem::path dir = std::filesystem::path(s.model_dir).lexically_normal();
    name = dir.has_filename() ? dir.filename().string() : dir.parent_path().filename().string();
  }
  s.model_names.push_back(name);
  for (const std::string& alias : config.list("api.aliases")) s.model_names.push_back(alias);
  if (!config.text("api.key_file").empty()) {
    s.key_file = config.path("api.key_file");
    s.keys = KeyRing(read_secret(s.key_file));
  }
  s.log_requests = config.boolean("log.requests");
  s.metrics_open = config.boolean("api.metrics_open");
  s.page = config.boolean("api.page");
  s.always_think = config.boolean("api.always_think");
  s.escape_control_tokens = config.boolean("api.escape_control_tokens");
  s.max_queue = static_cast<size_t>(config.integer("sched.max_queue"));
  s.max_queue_tokens = config.integer("sched.max_queue_tokens");
  s.max_body = static_cast<size_t>(config.integer("api.max_body"));
  s.max_connections = static_cast<size_t>(config.integer("api.max_connections"));
  s.keepalive = config.duration("api.keepalive");
  s.stall_limit = config.duration("ranks.watchdog");
  s.default_max_tokens = static_cast<int32_t>(config.integer("serve.default_max_tokens"));
  read_model_config(s.model_dir + "/config.json", config.integer("serve.max_context"), s);
  read_generation_config(s.model_dir + "/generation_config.json", s);
  s.created = static_cast<int64_t>(std::time(nullptr));
  return s;
}

}  // namespace glm53::api
