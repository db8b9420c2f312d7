#include "common/config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include <nlohmann/json.hpp>

#include "common/config_toml.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53 {

namespace {

using Json = nlohmann::ordered_json;

const ConfigKey* find_key(std::string_view name) {
  const auto keys = config_keys();
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const ConfigKey& k) { return k.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

const ConfigKey& key_of(std::string_view name, KeyType type) {
  const ConfigKey* key = find_key(name);
  if (key == nullptr)
    throw Error(Code::internal, cat("the program asks for an unknown configuration key '", name, "'"));
  if (key->type != type) throw Error(Code::internal, cat("the program asks for '", name, "' as another type"));
  return *key;
}

Error unknown_key(std::string_view name, const std::string& source, Code code) {
  std::vector<std::string> names;
  for (const auto& key : config_keys()) names.emplace_back(key.name);
  const auto near = nearest(name, names);
  return {code, cat(source, ": unknown key '", name, "'"),
          near ? cat("did you mean '", *near, "'?") : "config.toml.example lists every key"};
}

const char* type_name(KeyType type) {
  switch (type) {
    case KeyType::text:
      return "text";
    case KeyType::integer:
      return "an integer";
    case KeyType::real:
      return "a number";
    case KeyType::boolean:
      return "true or false";
    case KeyType::bytes:
      return "a size such as 512MiB or 14GiB";
    case KeyType::duration:
      return "a duration such as 250ms, 30s, 2m or 1h";
    case KeyType::list:
      return "a list of texts";
  }
  return "";
}

/// Shown in errors: never whole files, never line breaks.
std::string shortened(std::string_view text) {
  std::string out(text.substr(0, 60));
  std::replace_if(
      out.begin(), out.end(), [](char c) { return static_cast<unsigned char>(c) < 0x20; }, ' ');
  return text.size() > 60 ? out + "…" : out;
}

/// The value as a number for bounds: integers, bytes, milliseconds; nullopt when the text is none.
std::optional<double> number_of(const ConfigKey& key, std::string_view text) {
  switch (key.type) {
    case KeyType::integer:
      if (const auto v = parse_int(text)) return static_cast<double>(*v);
      return std::nullopt;
    case KeyType::real:
      return parse_double(text);
    case KeyType::bytes:
      if (const auto v = parse_bytes(text)) return static_cast<double>(*v);
      return std::nullopt;
    case KeyType::duration:
      if (const auto v = parse_duration(text)) return static_cast<double>(v->count());
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

bool is_number(KeyType type) {
  return type == KeyType::integer || type == KeyType::real || type == KeyType::bytes || type == KeyType::duration;
}

std::string bound_text(const ConfigKey& key, double bound) {
  if (key.type == KeyType::duration) return cat(static_cast<int64_t>(bound), "ms");
  if (key.type == KeyType::bytes) return human_bytes(static_cast<int64_t>(bound));
  return bound == std::floor(bound) && std::abs(bound) < 1e15 ? cat(static_cast<int64_t>(bound)) : cat(bound);
}

std::string bounds_text(const ConfigKey& key) {
  const std::string least = bound_text(key, key.min);
  return key.max == 0 ? cat("at least ", least) : cat("from ", least, " to ", bound_text(key, key.max));
}

/// Throws unless the text is a value of the key.
void check(const ConfigKey& key, std::string_view text, const std::string& source, Code code) {
  if (is_number(key.type)) {
    const auto number = number_of(key, text);
    if (!number) {
      throw Error(code,
                  cat(source, ": '", key.name, "' must be ", type_name(key.type), ", not '", shortened(text), "'"));
    }
    if (*number < key.min || (key.max != 0 && *number > key.max)) {
      throw Error(code, cat(source, ": '", key.name, "' is ", shortened(text)), cat("a value ", bounds_text(key)));
    }
  } else if (key.type == KeyType::boolean && text != "true" && text != "false") {
    throw Error(code, cat(source, ": '", key.name, "' must be true or false, not '", shortened(text), "'"));
  } else if (!valid_utf8(text) || text.find('\0') != std::string_view::npos) {
    throw Error(code, cat(source, ": '", key.name, "' is not valid UTF-8 text"));
  }
  if (key.choices.empty()) return;
  const auto choices = split(key.choices, '|');
  if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
    throw Error(code, cat(source, ": '", key.name, "' is '", shortened(text), "'"),
                cat("one of ", join(choices, ", ")));
  }
}

/// "a, b" as its parts; "" has none.
std::vector<std::string> parse_list(std::string_view text) {
  std::vector<std::string> parts;
  if (trim(text).empty()) return parts;
  for (const auto& part : split(text, ',')) parts.emplace_back(trim(part));
  return parts;
}

void check_list(const ConfigKey& key, const std::vector<std::string>& parts, const std::string& source, Code code) {
  for (const auto& part : parts) {
    if (part.empty()) throw Error(code, cat(source, ": '", key.name, "' has an empty element"));
    check(key, part, source, code);
  }
}

/// A JSON value as the text of a key; nullopt when it has another type.
std::optional<std::string> text_of(const ConfigKey& key, const Json& value) {
  switch (key.type) {
    case KeyType::text:
      return value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt;
    case KeyType::boolean:
      return value.is_boolean() ? std::optional(dump(value)) : std::nullopt;
    case KeyType::integer:
      return value.is_number_integer() ? std::optional(dump(value)) : std::nullopt;
    case KeyType::real:
      return value.is_number() ? std::optional(dump(value)) : std::nullopt;
    case KeyType::bytes:
      if (value.is_number_integer()) return dump(value);
      return value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt;
    case KeyType::duration:
      return value.is_string() ? std::optional(value.get<std::string>()) : std::nullopt;
    case KeyType::list:
      break;
  }
  return std::nullopt;
}

std::optional<std::vector<std::string>> list_of(const Json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<std::string> parts;
  for (const auto& part : value) {
    if (!part.is_string()) return std::nullopt;
    parts.push_back(part.get<std::string>());
  }
  return parts;
}

std::string example_value(const ConfigKey& key) {
  if (key.type == KeyType::list) return dump(Json(parse_list(key.fallback)));
  const bool bare = key.type == KeyType::integer || key.type == KeyType::real || key.type == KeyType::boolean ||
                    (key.type == KeyType::bytes && parse_int(key.fallback));
  return bare ? std::string(key.fallback) : dump(Json(std::string(key.fallback)));
}

/// Lines of at most 118 characters, each with "# " before it.
std::string comment(std::string_view text) {
  std::string out, line = "#";
  for (const auto& word : split(text, ' ')) {
    if (line.size() + 1 + word.size() > 118) {
      out += line + "\n";
      line = "#";
    }
    line += " " + word;
  }
  return out + line + "\n";
}

std::string facts(const ConfigKey& key) {
  std::vector<std::string> facts;
  if (!key.choices.empty()) facts.push_back(cat("One of ", join(split(key.choices, '|'), ", ")));
  if (!key.unit.empty()) facts.push_back(cat("Unit: ", key.unit));
  if (is_number(key.type) && (key.max != 0 || key.min != 0)) facts.push_back(cat("Bounds: ", bounds_text(key)));
  facts.push_back(key.scope == KeyScope::node ? "Set on each machine" : "Set on the head");
  return cat(join(facts, ". "), ".");
}

}  // namespace

Config::Config() {
  for (const auto& key : config_keys()) {
    Value& value = values_[std::string(key.name)];
    value.text = key.fallback;
    value.source = "default";
    if (key.type == KeyType::list) value.list = parse_list(key.fallback);
  }
}

Config Config::load(const std::string& path) {
  std::string text;
  try {
    text = read_file(path, size_t{1} << 20);
  } catch (const Error& e) {
    throw Error(Code::config, cat("configuration: ", std::string_view(e.what())));
  }
  Config config = parse(text, path);
  const auto parent = std::filesystem::absolute(path).parent_path();
  config.base_dir_ = parent.string();
  return config;
}

Config Config::parse(std::string_view toml, const std::string& source) {
  Config config;
  for (auto& entry : read_toml(toml, source)) {
    const std::string at = cat(source, ":", entry.line);
    const ConfigKey* key = find_key(entry.key);
    if (key == nullptr) throw unknown_key(entry.key, at, Code::config);
    config.assign(*key, entry.value, entry.found, at);
  }
  return config;
}

Config Config::from_json(const Json& flat, const std::string& source) {
  if (!flat.is_object()) throw Error(Code::config, cat(source, ": expected a JSON object of dotted keys"));
  Config config;
  for (const auto& [name, value] : flat.items()) {
    const ConfigKey* key = find_key(name);
    if (key == nullptr) throw unknown_key(name, source, Code::config);
    config.assign(*key, value, value.type_name(), source);
  }
  return config;
}

void Config::assign(const ConfigKey& key, const Json& value, std::string_view found, const std::string& source) {
  const auto wrong_type = [&] {
    return Error(Code::config, cat(source, ": '", key.name, "' must be ", type_name(key.type), ", not ", found));
  };
  Value& target = values_.at(std::string(key.name));
  if (key.type == KeyType::list) {
    auto parts = list_of(value);
    if (!parts) throw wrong_type();
    check_list(key, *parts, source, Code::config);
    target.list = std::move(*parts);
    target.text = join(target.list, ",");
  } else {
    auto text = text_of(key, value);
    if (!text) throw wrong_type();
    check(key, *text, source, Code::config);
    target.text = std::move(*text);
  }
  target.source = source;
}

void Config::set(std::string_view name, std::string_view value, const std::string& source) {
  const ConfigKey* key = find_key(name);
  if (key == nullptr) throw unknown_key(name, source, Code::usage);
  Value& target = values_.at(std::string(name));
  if (key->type == KeyType::list) {
    auto parts = parse_list(value);
    check_list(*key, parts, source, Code::usage);
    target.list = std::move(parts);
    target.text = join(target.list, ",");
  } else {
    const std::string_view text = key->type == KeyType::text ? value : trim(value);
    check(*key, text, source, Code::usage);
    target.text = text;
  }
  target.source = source;
}

const std::string& Config::text(std::string_view key) const {
  key_of(key, KeyType::text);
  return values_.find(key)->second.text;
}

int64_t Config::integer(std::string_view key) const {
  const ConfigKey* found = find_key(key);
  const bool as_bytes = found != nullptr && found->type == KeyType::bytes;
  if (!as_bytes) key_of(key, KeyType::integer);
  const std::string& text = values_.find(key)->second.text;
  const auto value = as_bytes ? parse_bytes(text) : parse_int(text);
  if (!value) throw Error(Code::internal, cat("configuration key '", key, "' has no value"));
  return *value;
}

double Config::real(std::string_view key) const {
  key_of(key, KeyType::real);
  const auto value = parse_double(values_.find(key)->second.text);
  if (!value) throw Error(Code::internal, cat("configuration key '", key, "' has no value"));
  return *value;
}

bool Config::boolean(std::string_view key) const {
  key_of(key, KeyType::boolean);
  return values_.find(key)->second.text == "true";
}

std::chrono::milliseconds Config::duration(std::string_view key) const {
  key_of(key, KeyType::duration);
  const auto value = parse_duration(values_.find(key)->second.text);
  if (!value) throw Error(Code::internal, cat("configuration key '", key, "' has no value"));
  return *value;
}

const std::vector<std::string>& Config::list(std::string_view key) const {
  key_of(key, KeyType::list);
  return values_.find(key)->second.list;
}

const std::string& Config::source(std::string_view key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) {
    throw Error(Code::internal, cat("the program asks for an unknown configuration key '", key, "'"));
  }
  return found->second.source;
}

Json Config::to_json(bool only_cluster) const {
  Json out = Json::object();
  for (const auto& key : config_keys()) {
    if (only_cluster && key.scope != KeyScope::cluster) continue;
    const Value& value = values_.find(key.name)->second;
    Json& member = out[std::string(key.name)];
    switch (key.type) {
      case KeyType::text:
      case KeyType::duration:
        member = value.text;
        break;
      case KeyType::integer:
      case KeyType::bytes:
        member = integer(key.name);
        break;
      case KeyType::real:
        member = real(key.name);
        break;
      case KeyType::boolean:
        member = boolean(key.name);
        break;
      case KeyType::list:
        member = value.list;
        break;
    }
  }
  return out;
}

std::string Config::hash() const {
  // Equal values have equal text: numbers are normalised by to_json, durations here.
  Json normal = to_json(true);
  for (const auto& key : config_keys()) {
    if (key.scope == KeyScope::cluster && key.type == KeyType::duration) {
      normal[std::string(key.name)] = duration(key.name).count();
    }
  }
  return sha256_hex(dump(normal));
}

std::string Config::path(std::string_view key) const {
  const std::string& value = text(key);
  if (value.empty() || value.front() == '/') return value;
  return (std::filesystem::path(base_dir_) / value).lexically_normal().string();
}

std::string example_config() {
  std::string out =
      "# Configuration of glm53: every key with its default. Leave out what you do not change.\n"
      "# The same names serve in --set key=value. Sizes: 512MiB, 14GiB or a number of bytes; durations: 250ms, 30s, "
      "2m, "
      "1h.\n";
  std::string section;
  for (const auto& key : config_keys()) {
    const size_t dot = key.name.rfind('.');
    const std::string_view own = key.name.substr(0, dot);
    if (own != section) out += cat("\n[", section = own, "]\n");
    out += cat("\n", comment(key.doc), comment(facts(key)), key.name.substr(dot + 1), " = ", example_value(key), "\n");
  }
  return out;
}

std::vector<RankPlace> parse_ranks(const Config& config) {
  std::vector<RankPlace> places;
  const std::string& source = config.source("topology.ranks");
  for (const auto& text : config.list("topology.ranks")) {
    const size_t colon = text.rfind(':');
    const auto device = colon == std::string::npos ? std::nullopt : parse_int(std::string_view(text).substr(colon + 1));
    RankPlace place{text.substr(0, colon), device ? static_cast<int>(std::clamp<int64_t>(*device, -1, 1024)) : -1};
    const bool known = place.node == "head" || place.node == "worker";
    if (!known || place.device < 0 || place.device > 1023) {
      throw Error(Code::config, cat(source, ": 'topology.ranks' has '", shortened(text), "'"),
                  "node:device, where node is head or worker, such as \"head:0\"");
    }
    places.push_back(std::move(place));
  }
  if (places.empty() || places.front().node != "head") {
    throw Error(Code::config, cat(source, ": 'topology.ranks' must begin with a rank on the head"),
                "for example [\"head:0\", \"worker:0\"]");
  }
  return places;
}

HostPort parse_host_port(std::string_view text) {
  const auto wrong = [&] {
    return Error(Code::config, cat("'", shortened(text), "' is not an address and port"),
                 "for example 127.0.0.1:8890 or [::1]:8890");
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) throw wrong();
  std::string_view host = text.substr(0, colon);
  const auto port = parse_int(text.substr(colon + 1));
  if (!port || *port < 0 || *port > 65535) throw wrong();
  if (host.size() > 2 && host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of(":[]") != std::string_view::npos) {
    throw wrong();
  }
  if (host.empty() || host.find_first_of(" \t\n\r/") != std::string_view::npos) throw wrong();
  return {std::string(host), static_cast<uint16_t>(*port)};
}

}  // namespace glm53
