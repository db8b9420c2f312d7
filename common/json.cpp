#include "common/json.h"

#include <optional>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

namespace {

using Json = nlohmann::ordered_json;

std::string position(std::string_view text, size_t offset) {
  offset = std::min(offset, text.size());
  size_t line = 1, column = 1;
  for (size_t i = 0; i < offset; ++i) {
    if (text[i] == '\n') {
      ++line;
      column = 1;
    } else {
      ++column;
    }
  }
  return cat("line ", line, ", column ", column);
}

/// The four hex digits of "\uXXXX" at `at`.
std::optional<unsigned> escape_at(std::string_view text, size_t at) {
  if (text.size() < at + 6 || text[at] != '\\' || text[at + 1] != 'u') return std::nullopt;
  unsigned value = 0;
  for (size_t i = at + 2; i < at + 6; ++i) {
    const char c = text[i];
    unsigned digit = 0;
    if (c >= '0' && c <= '9') {
      digit = static_cast<unsigned>(c - '0');
    } else if ((c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F')) {
      digit = static_cast<unsigned>((c | 0x20) - 'a') + 10;
    } else {
      return std::nullopt;
    }
    value = value * 16 + digit;
  }
  return value;
}

/// Offsets of the escapes of lone surrogates; they are replaced by as many bytes, so positions stay right.
std::vector<size_t> lone_surrogates(std::string_view text) {
  std::vector<size_t> found;
  for (size_t i = text.find('\\'); i != std::string_view::npos; i = text.find('\\', i)) {
    const auto code = escape_at(text, i);
    if (!code) {
      i += 2;
      continue;
    }
    const auto next = *code >= 0xD800 && *code <= 0xDBFF ? escape_at(text, i + 6) : std::nullopt;
    if (next && *next >= 0xDC00 && *next <= 0xDFFF) {
      i += 12;
      continue;
    }
    if (*code >= 0xD800 && *code <= 0xDFFF) found.push_back(i);
    i += 6;
  }
  return found;
}

/// Builds the value without ordered_json's search for every key, which is quadratic in the members of an object.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view text, const JsonLimits& limits) : text_(text), limits_(limits) {}
  Json take() { return std::move(root_); }

  bool null() override { return add(nullptr); }
  bool boolean(bool v) override { return add(v); }
  bool number_integer(int64_t v) override { return add(v); }
  bool number_unsigned(uint64_t v) override { return add(v); }
  bool number_float(double v, const std::string& digits) override {
    if (!limits_.keep_big_integers || digits.find_first_of(".eE") != std::string::npos) return add(v);
    return add(Json::binary(Json::binary_t::container_type(digits.begin(), digits.end())));
  }
  bool string(std::string& v) override { return add(std::move(v)); }
  bool binary(Json::binary_t&) override { return false; }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool key(std::string& v) override {
    auto& object = open_.back()->get_ref<Json::object_t&>();
    object.emplace_back(std::move(v), nullptr);
    return true;
  }
  bool end_object() override {
    merge_duplicates(open_.back()->get_ref<Json::object_t&>());
    open_.pop_back();
    return true;
  }
  bool end_array() override {
    open_.pop_back();
    return true;
  }
  bool parse_error(size_t offset, const std::string&, const Json::exception& e) override {
    std::string_view why = e.what();
    const size_t detail = why.find("syntax error");
    why = detail != std::string_view::npos ? why.substr(detail) : why.substr(std::min(why.find("] ") + 2, why.size()));
    if (why.size() > 200 || !valid_utf8(why)) why = "syntax error";
    throw Error(Code::usage, cat("invalid JSON at ", position(text_, offset == 0 ? 0 : offset - 1), ": ", why));
  }

 private:
  Json& place(Json&& value) {
    if (++values_ > limits_.max_values) {
      throw Error(Code::usage, cat("JSON has more than ", limits_.max_values, " values"));
    }
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_array()) {
      auto& array = open_.back()->get_ref<Json::array_t&>();
      return array.emplace_back(std::move(value));
    }
    return open_.back()->get_ref<Json::object_t&>().back().second = std::move(value);
  }
  bool add(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json container) {
    if (open_.size() >= static_cast<size_t>(limits_.max_depth)) {
      throw Error(Code::usage, cat("JSON is nested deeper than ", limits_.max_depth, " levels"));
    }
    // Stable: a container grows only after everything opened inside it was closed.
    open_.push_back(&place(std::move(container)));
    return true;
  }
  /// The first place and the last value of each key, in linear time.
  static void merge_duplicates(Json::object_t& object) {
    std::unordered_map<std::string_view, Json*> first;
    std::vector<bool> drop;
    for (auto& [key, value] : object) {
      const auto [at, added] = first.emplace(key, &value);
      if (!added) *at->second = std::move(value);
      drop.push_back(!added);
    }
    if (first.size() == object.size()) return;
    Json::object_t kept;
    auto dropped = drop.begin();
    for (auto& [key, value] : object) {
      if (!*dropped++) kept.emplace_back(key, std::move(value));
    }
    object = std::move(kept);
  }

  std::string_view text_;
  const JsonLimits& limits_;
  Json root_;
  std::vector<Json*> open_;
  size_t values_ = 0;
};

}  // namespace

nlohmann::ordered_json parse_json(std::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    throw Error(Code::usage, cat("JSON of ", text.size(), " bytes, at most ", limits.max_bytes, " allowed"));
  }
  std::string repaired;
  const auto lone = lone_surrogates(text);
  if (!lone.empty()) {
    repaired = text;
    for (const size_t at : lone) repaired.replace(at, 6, "\\uFFFD");
    text = repaired;
  }
  Builder builder(text, limits);
  Json::sax_parse(text, &builder);
  return builder.take();
}

std::string dump(const nlohmann::ordered_json& value) {
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace glm53
