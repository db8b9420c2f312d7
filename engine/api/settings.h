// What the API process knows before a rank connects: configuration, model folder, keys.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "common/rank_contract.h"
#include "engine/api/auth.h"

namespace glm53::api {

/// Defaults of sampling members, from generation_config.json.
struct SamplingDefaults {
  float temperature = 1, top_p = 1, min_p = 0, repetition = 1;
  int32_t top_k = 0;
};

struct Settings {
  ApiConfig process;  ///< sockets, address, version
  std::string model_dir;
  std::vector<std::string> model_names;  ///< the served name first, then aliases
  KeyRing keys;
  std::string key_file;  ///< where they are; "" = nowhere
  bool metrics_open = false, log_requests = false, always_think = false, escape_control_tokens = false, page = true;
  size_t max_queue = 1024;
  int64_t max_queue_tokens = 4'000'000;
  size_t max_body = 64u << 20, max_connections = 20000;
  std::chrono::milliseconds keepalive{15000}, stall_limit{30000};
  int32_t max_context = 0;         ///< longest prompt plus output
  int32_t default_max_tokens = 0;  ///< 0: what fits the context
  int32_t model_rows = 0;          ///< rows of the embedding
  std::vector<int32_t> eos;        ///< the first one is the primary end token
  SamplingDefaults sampling;
  int64_t created = 0;  ///< unix time, in /v1/models
};

/// Reads the configuration, the key file, and config.json and generation_config.json of the model. Throws Error(config)
/// or Error(weights).
Settings load_settings(const ApiConfig& config);

}  // namespace glm53::api
