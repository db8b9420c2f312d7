// JSON and JSON schemas (draft 2020-12 subset) as grammars.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "engine/grammar/chars.h"

namespace glm53::grammar {

/// Grammars of JSON text. Between tokens of the text there may be one space, or a line break and up to 24 spaces or
/// tabs, in the places where printers put them; none before the value.
class JsonText {
 public:
  explicit JsonText(Builder& builder);
  Builder& builder() { return b_; }
  Builder::Id any() { return b_.call(any_); }
  Builder::Id object() { return b_.call(object_); }
  Builder::Id array() { return b_.call(array_); }
  Builder::Id string() { return b_.call(string_); }
  Builder::Id space() { return b_.call(space_); }
  Builder::Id colon();
  Builder::Id comma();
  /// `value` as it stands, with free spacing.
  Builder::Id constant(const nlohmann::ordered_json& value, int depth = 0);
  Builder::Id boolean() { return b_.literals({"true", "false"}); }
  Builder::Id null() { return b_.text("null"); }
  Builder::Id number();
  Builder::Id integer();

 private:
  Builder& b_;
  uint32_t space_, string_, any_, object_, array_;
};

/// Numbers between bounds, in decimal notation.
struct NumberBounds {
  std::optional<double> min, max;
  bool min_excluded = false, max_excluded = false;
};
Builder::Id integers(Builder& builder, const NumberBounds& bounds);
/// Throws Error(usage) for bounds that rounding would blur.
Builder::Id decimals(Builder& builder, const NumberBounds& bounds);
/// Decimal integers divisible by `divisor` (1 to 10000).
Builder::Id multiples(Builder& builder, uint32_t divisor);
/// Texts of a `format`; nothing for a format that is not known.
std::optional<Builder::Id> format_text(Builder& builder, std::string_view format, Writing writing);
extern const std::string_view kFormats;  ///< their names, for messages and docs

/// Texts that satisfy a schema. Every keyword is enforced, or known to be an annotation, or refused: Error(usage)
/// that begins with the path of the schema. Members of objects come in the order of `properties`.
class JsonSchema {
 public:
  /// `root` is where $ref points into; it must outlive this.
  JsonSchema(JsonText& text, const nlohmann::ordered_json& root, std::string path);
  /// How a value is written: as JSON, or bare, as an argument of a tool call: strings as they are, the rest as JSON.
  Builder::Id value(const nlohmann::ordered_json& schema, const std::string& path, bool bare);
  Builder::Id root_value(bool bare);

  struct Property {
    std::string name;
    const nlohmann::ordered_json* schema = nullptr;
    bool required = false;
  };
  /// The declared members of an object schema with `required` ones that are not declared.
  std::vector<Property> properties(const nlohmann::ordered_json& schema, const std::string& path);
  /// The schema with $ref and allOf at its top taken in.
  nlohmann::ordered_json flat(const nlohmann::ordered_json& schema, const std::string& path);
  [[noreturn]] static void refuse(const std::string& path, const std::string& what);

 private:
  using Json = nlohmann::ordered_json;
  using Id = Builder::Id;

  void check_keywords(const Json& schema, const std::string& path);
  const Json& target(const std::string& reference, const std::string& path) const;
  Id reference(const std::string& reference, const std::string& path, bool bare);
  Json merge(const Json& a, const Json& b, const std::string& path);
  void merge_member(Json& out, const std::string& key, const Json& value, const std::string& path);
  Id branches(const Json& schema, const std::string& key, const std::string& path, bool bare);
  void require_disjoint(const Json& branches, const std::string& path);
  Id enumeration(const Json& schema, const std::string& path, bool bare);
  Id typed(const std::string& type, const Json& schema, const std::string& path, bool bare);
  Id object(const Json& schema, const std::string& path);
  Id more_members(const Json& schema, const std::vector<Property>& declared, const std::string& path);
  Id members(const std::vector<Property>& declared, Id more, bool open, bool may_be_empty, const std::string& path);
  Id array(const Json& schema, const std::string& path);
  Id string(const Json& schema, const std::string& path, bool bare);
  Id number(const Json& schema, const std::string& path, bool whole);
  int64_t count(const Json& schema, const char* key, int64_t fallback, const std::string& path) const;

  JsonText& t_;
  Builder& b_;
  const Json& root_;
  const std::string path_;
  std::map<std::pair<std::string, bool>, uint32_t> references_;
  std::unique_ptr<Json> any_;
  int depth_ = 0, reference_depth_ = 0;
};

}  // namespace glm53::grammar
