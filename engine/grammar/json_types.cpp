// The types of a schema: objects, arrays, strings, numbers.
#include <algorithm>
#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/grammar/json_schema.h"
#include "engine/grammar/regex.h"

namespace glm53::grammar {

using Json = nlohmann::ordered_json;
using Id = Builder::Id;

int64_t JsonSchema::count(const Json& schema, const char* key, int64_t fallback, const std::string& path) const {
  const auto found = schema.find(key);
  if (found == schema.end()) return fallback;
  if (!found->is_number() || found->get<double>() < 0 || found->get<double>() != std::floor(found->get<double>()))
    refuse(path, cat("\"", key, "\" must be a whole number"));
  const auto most = static_cast<double>(b_.budget().limits().repeat);
  if (found->get<double>() > most)
    refuse(path, cat("\"", key, "\" above ", b_.budget().limits().repeat, " cannot be enforced"));
  return static_cast<int64_t>(found->get<double>());
}

Id JsonSchema::typed(const std::string& type, const Json& schema, const std::string& path, bool bare) {
  if (type == "object") return object(schema, path);
  if (type == "array") return array(schema, path);
  if (type == "string") return string(schema, path, bare);
  if (type == "boolean") return t_.boolean();
  if (type == "null") return t_.null();
  return number(schema, path, type == "integer");
}

std::vector<JsonSchema::Property> JsonSchema::properties(const Json& schema, const std::string& path) {
  std::vector<Property> out;
  const auto declared = schema.find("properties");
  if (declared != schema.end()) {
    if (!declared->is_object()) refuse(path, "\"properties\" must be an object");
    for (const auto& [name, inner] : declared->items()) out.push_back({name, &inner, false});
  }
  const auto required = schema.find("required");
  if (required == schema.end()) return out;
  if (!required->is_array()) refuse(path, "\"required\" must be a list of names");
  std::map<std::string, size_t> place;
  for (size_t i = 0; i < out.size(); ++i) place[out[i].name] = i;
  const auto additional = schema.find("additionalProperties");
  for (const Json& name : *required) {
    b_.budget().spend(1);
    if (!name.is_string()) refuse(path, "\"required\" must be a list of names");
    const auto [at, fresh] = place.try_emplace(name.get<std::string>(), out.size());
    if (fresh) out.push_back({at->first, additional == schema.end() ? any_.get() : &*additional, true});
    out[at->second].required = true;
  }
  return out;
}

/// A member that is not declared; nothing where there are none.
Id JsonSchema::more_members(const Json& schema, const std::vector<Property>& declared, const std::string& path) {
  const auto additional = schema.find("additionalProperties");
  // Without a word about others, an object with declared members has no others; one without has any.
  if (additional == schema.end() && !declared.empty()) return b_.nothing();
  if (additional != schema.end() && *additional == false) return b_.nothing();
  const Id inner = additional == schema.end() ? t_.any() : value(*additional, path + "/additionalProperties", false);
  // Keys without escapes, so that none is a declared one in another spelling.
  CodeSet plain = CodeSet::all().without(CodeSet({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}}));
  Id key = b_.repeat(characters(b_, plain, Writing::plain), 0, Builder::kUnbounded);
  if (!declared.empty()) {
    std::vector<std::string> names;
    for (const Property& p : declared) names.push_back(p.name);
    key = b_.without(key, b_.literals(std::move(names)));
  }
  return b_.seq({b_.text("\""), key, b_.text("\""), t_.colon(), inner});
}

/// Members in their order; each place is a rule: what may come from here on, with something before it or without.
Id JsonSchema::members(const std::vector<Property>& declared, Id more, bool open, bool may_be_empty,
                       const std::string& path) {
  Id pick = b_.nothing();
  if (open) {
    const uint32_t rest = b_.rule("more members");
    b_.define(rest, b_.repeat(b_.seq({t_.comma(), more}), 0, Builder::kUnbounded));
    pick = b_.seq({more, b_.call(rest)});
  }
  bool required = false;  // from here on
  for (size_t i = declared.size(); i-- > 0;) {
    const Property& p = declared[i];
    const uint32_t rest = b_.rule("members");  // behind this one
    std::vector<Id> behind;
    if (!required) behind.push_back(b_.empty());
    if (pick != b_.nothing()) behind.push_back(b_.seq({t_.comma(), pick}));
    b_.define(rest, b_.alt(std::move(behind)));
    const Id name = b_.text(cat("\"", written(p.name, Writing::json), "\""));
    const Id inner = value(*p.schema, path + "/properties/" + p.name, false);
    std::vector<Id> here{b_.seq({name, t_.colon(), inner, b_.call(rest)})};
    if (!p.required && pick != b_.nothing()) here.push_back(pick);
    const uint32_t rule = b_.add_rule("member " + p.name, b_.alt(std::move(here)));
    pick = b_.call(rule);
    required = required || p.required;
  }
  if (required || !may_be_empty) return pick;
  return pick == b_.nothing() ? b_.empty() : b_.optional(pick);
}

Id JsonSchema::object(const Json& schema, const std::string& path) {
  const std::vector<Property> declared = properties(schema, path);
  const int64_t required =
      std::count_if(declared.begin(), declared.end(), [](const Property& p) { return p.required; });
  const int64_t least = count(schema, "minProperties", 0, path);
  if (least > std::max<int64_t>(required, 1)) {
    refuse(path, cat("\"minProperties\" ", least, " cannot be enforced beyond the required members"));
  }
  const Id more = more_members(schema, declared, path);
  const bool open = more != b_.nothing();
  const bool may_be_empty = least == 0;
  Id inside = 0;
  if (schema.contains("maxProperties")) {
    const int64_t most = count(schema, "maxProperties", 0, path);
    if (declared.empty() && open) {
      inside = most == 0 ? b_.empty() : b_.seq({more, b_.repeat(b_.seq({t_.comma(), more}), 0, most - 1)});
      if (may_be_empty) inside = b_.optional(inside);
    } else if (open || static_cast<int64_t>(declared.size()) > most) {
      refuse(path, cat("\"maxProperties\" ", most, " below the number of declared members cannot be enforced"));
    } else {
      inside = members(declared, more, open, may_be_empty, path);
    }
  } else {
    inside = members(declared, more, open, may_be_empty, path);
  }
  return b_.seq({b_.text("{"), t_.space(), inside, t_.space(), b_.text("}")});
}

Id JsonSchema::array(const Json& schema, const std::string& path) {
  const int64_t min = count(schema, "minItems", 0, path);
  const int64_t max = count(schema, "maxItems", Builder::kUnbounded, path);
  const auto as_rule = [&](const Json& item, const std::string& where) {
    return b_.call(b_.add_rule("item", value(item, where, false)));
  };
  std::vector<Id> first;
  if (schema.contains("prefixItems")) {
    if (!schema["prefixItems"].is_array()) refuse(path, "\"prefixItems\" must be a list of schemas");
    for (const Json& item : schema["prefixItems"])
      first.push_back(as_rule(item, cat(path, "/prefixItems/", first.size())));
  }
  const auto items = schema.find("items");
  if (items != schema.end() && items->is_array()) refuse(path, "\"items\" as a list is \"prefixItems\" today");
  const auto n = static_cast<int64_t>(first.size());
  const bool closed = (items != schema.end() && *items == false) || (max >= 0 && max <= n);
  const Id item = closed ? b_.nothing() : items == schema.end() ? t_.any() : as_rule(*items, path + "/items");
  // From the end: what may come behind the first i items.
  const auto left = [](int64_t count, int64_t taken) { return std::max<int64_t>(count - taken, 0); };
  Id tail = closed ? (min > n ? b_.nothing() : b_.empty())
                   : b_.repeat(b_.seq({t_.comma(), item}), left(min, std::max<int64_t>(n, 1)),
                               max < 0 ? max : left(max, std::max<int64_t>(n, 1)));
  if (n == 0 && !closed) {
    tail = b_.seq({item, tail});
    if (min == 0) tail = b_.optional(tail);
  }
  if (max == 0) tail = min > 0 ? b_.nothing() : b_.empty();
  for (int64_t i = n; i-- > 0;) {
    if (max >= 0 && i >= max) {
      tail = b_.empty();
      continue;
    }
    tail = b_.seq({i == 0 ? b_.empty() : t_.comma(), first[static_cast<size_t>(i)], tail});
    if (i >= min) tail = b_.optional(tail);
  }
  return b_.seq({b_.text("["), t_.space(), tail, t_.space(), b_.text("]")});
}

Id JsonSchema::string(const Json& schema, const std::string& path, bool bare) {
  const Writing writing = bare ? Writing::plain : Writing::json;
  const int64_t min = count(schema, "minLength", 0, path);
  const int64_t max = count(schema, "maxLength", Builder::kUnbounded, path);
  std::optional<Id> text;
  const auto also = [&](Id more) { text = text ? b_.both(*text, more) : more; };
  try {
    if (schema.contains("pattern")) {
      if (!schema["pattern"].is_string()) refuse(path, "\"pattern\" must be a string");
      also(regex(b_, schema["pattern"].get<std::string>(), writing, Anchoring::search));
    }
    if (schema.contains("format")) {
      if (!schema["format"].is_string()) refuse(path, "\"format\" must be a string");
      const auto known = format_text(b_, schema["format"].get<std::string>(), writing);
      if (!known) refuse(path, cat("format ", dump(schema["format"]), " cannot be enforced; known are ", kFormats));
      also(*known);
    }
  } catch (const Error& e) {
    if (std::string_view(e.what()).starts_with("regular expression")) refuse(path, cat("\"pattern\": ", e.what()));
    throw;
  }
  if (min > 0 || max >= 0) also(b_.repeat(characters(b_, CodeSet::all(), writing), min, max));
  if (!text && !bare) return t_.string();
  if (!text) return b_.repeat(characters(b_, CodeSet::all(), Writing::plain), 0, Builder::kUnbounded);
  if (bare) return *text;
  return b_.seq({b_.text("\""), *text, b_.text("\"")});
}

Id JsonSchema::number(const Json& schema, const std::string& path, bool whole) {
  NumberBounds bounds;
  const auto limit = [&](const char* key, bool lower, bool excluded) {
    const auto found = schema.find(key);
    if (found == schema.end()) return;
    if (!found->is_number()) refuse(path, cat("\"", key, "\" must be a number"));
    const double value = found->get<double>();
    std::optional<double>& bound = lower ? bounds.min : bounds.max;
    bool& strict = lower ? bounds.min_excluded : bounds.max_excluded;
    if (bound && (lower ? *bound > value : *bound < value)) return;
    strict = bound && *bound == value ? strict || excluded : excluded;
    bound = value;
  };
  limit("minimum", true, false);
  limit("exclusiveMinimum", true, true);
  limit("maximum", false, false);
  limit("exclusiveMaximum", false, true);
  const bool bounded = bounds.min || bounds.max;
  const auto multiple = schema.find("multipleOf");
  if (multiple != schema.end()) {
    if (!multiple->is_number() || multiple->get<double>() <= 0) refuse(path, "\"multipleOf\" must be above 0");
    const double divisor = multiple->get<double>();
    if (divisor != std::floor(divisor) || divisor > 10000)
      refuse(path, cat("\"multipleOf\" ", divisor, " cannot be enforced, only whole numbers up to 10000 can"));
    const Id all = bounded || divisor == 1 ? integers(b_, bounds) : b_.nothing();
    if (divisor == 1) return all;
    const Id some = multiples(b_, static_cast<uint32_t>(divisor));
    return bounded ? b_.both(all, some)
                   : b_.both(b_.seq({b_.optional(b_.text("-")), b_.repeat(b_.range('0', '9'), 1, 18)}), some);
  }
  if (!bounded) return whole ? t_.integer() : t_.number();
  try {
    return whole ? integers(b_, bounds) : decimals(b_, bounds);
  } catch (const Error& e) {
    refuse(path, e.what());
  }
}

}  // namespace glm53::grammar
