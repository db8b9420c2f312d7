#include "cli/api_target.h"

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {

using Json = nlohmann::ordered_json;

ApiTarget resolve_api(const GlobalOptions& global, ApiTarget given) {
  if (!given.url.empty()) return given;
  AdminClient agent(resolve_target(global));
  const Json status = agent.get("/status");
  const Json url = status.contains("api") && status["api"].is_object() ? status["api"].value("url", Json()) : Json();
  given.url = url.is_string() ? url.get<std::string>() : "";
  if (given.url.empty()) throw Error(Code::unavailable, "no API process runs", "glm53ctl start");
  if (!given.key_file.empty()) return given;
  const Json config = agent.get("/config");
  const Json entry = config.value("api.key_file", Json());
  given.key_file = entry.is_object()   ? entry.value("value", std::string())
                   : entry.is_string() ? entry.get<std::string>()
                                       : "";
  return given;
}

std::vector<std::string> read_api_keys(const std::string& file) {
  const std::string content = read_secret(file);
  std::vector<std::string> keys;
  for (const auto& line : split(content, '\n')) {
    const std::string_view text = trim(line);
    if (text.empty() || text.front() == '#') continue;
    const size_t colon = text.find(':');
    keys.emplace_back(colon == std::string_view::npos ? text : text.substr(colon + 1));
  }
  if (keys.empty()) throw Error(Code::config, cat(file, " holds no key"));
  return keys;
}

std::string api_error_message(const std::string& body) {
  try {
    return parse_json(body).at("error").at("message").get<std::string>();
  } catch (const std::exception&) {
    // Not the API's error shape: the body itself is the best there is.
    return std::string(trim(body));
  }
}

}  // namespace glm53::cli
