#include "agent/api/config_file.h"

#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "agent/api/settings.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::agent {
namespace {

using Json = nlohmann::ordered_json;

std::string stamp_of(const std::string& path) {
  struct stat st {};
  if (::stat(path.c_str(), &st) != 0) return "missing";
  return cat(static_cast<int64_t>(st.st_mtim.tv_sec), ".", static_cast<int64_t>(st.st_mtim.tv_nsec), ":",
             static_cast<int64_t>(st.st_size), ":", static_cast<uint64_t>(st.st_ino));
}

std::string shown(const Json& value) {
  return value.is_string() ? value.get<std::string>() : dump(value);
}

ConfigFile::Drift compare(const Config& file, const std::string& running_json,
                          const std::map<std::string, std::string>& settings) {
  ConfigFile::Drift drift;
  const Effective now = make_effective(file, settings);
  drift.hash_file = now.hash;
  const Json running = parse_json(running_json), wanted = parse_json(now.json);
  for (const auto& [key, value] : wanted.items()) {
    const auto it = running.find(key);
    if (it == running.end() || *it == value) continue;
    drift.lines.push_back(
        cat(key, ": runs with ", shown(*it), ", the file says ", shown(value), " (", file.source(key), ")"));
  }
  return drift;
}

}  // namespace

ConfigFile::ConfigFile(std::string path) : path_(std::move(path)), config_(Config::load(path_)) {}

Config ConfigFile::config() const {
  const std::lock_guard lock(mutex_);
  return config_;
}

Config ConfigFile::reload() {
  Config fresh = Config::load(path_);
  const std::lock_guard lock(mutex_);
  config_ = fresh;
  return fresh;
}

ConfigFile::Drift ConfigFile::drift(const std::string& running_json,
                                    const std::map<std::string, std::string>& settings) {
  const std::string stamp = stamp_of(path_);
  const std::string key = running_json + settings_json(settings);
  const std::lock_guard lock(mutex_);
  if (stamp == stamp_ && key == key_) return drift_;
  drift_ = {};
  try {
    drift_ = compare(Config::load(path_), running_json, settings);
  } catch (const Error& e) {
    drift_.error = e.line();
  }
  stamp_ = stamp;
  key_ = key;
  return drift_;
}

std::map<std::string, std::string> parse_settings(const std::string& json) {
  std::map<std::string, std::string> settings;
  const Json j = parse_json(json);
  if (!j.is_object()) throw Error(Code::usage, "settings must be an object of key and value");
  for (const auto& [key, value] : j.items()) {
    if (value.is_object() || value.is_null())
      throw Error(Code::usage, cat("settings: the value of ", key, " must be text"));
    if (value.is_array()) {
      std::vector<std::string> parts;
      for (const Json& part : value) parts.push_back(shown(part));
      settings[key] = join(parts, ",");
    } else {
      settings[key] = shown(value);
    }
  }
  return settings;
}

std::string settings_json(const std::map<std::string, std::string>& settings) {
  Json j = Json::object();
  for (const auto& [key, value] : settings) j[key] = value;
  return dump(j);
}

}  // namespace glm53::agent
