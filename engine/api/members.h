// Typed access to the members of a request; whatever is wrong becomes a 400 that names the member.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace glm53::api {

/// What happens to a documented member. (Members in no table are ignored and listed in x-glm53-ignored.)
enum class Use {
  honoured,  ///< read by the request's parser
  accepted,  ///< means nothing here, such as `user`
  refused,   ///< 400, except for null and for values that say what happens anyway
};
struct MemberRule {
  std::string_view name;
  Use use = Use::honoured;
  std::string_view harmless = "";  ///< of a refused member: the JSON value that is let through
};

class Members {
 public:
  /// `object` must outlive this; throws ApiError(400) when it is no object.
  explicit Members(const nlohmann::ordered_json& object);

  /// Throws ApiError(400) for refused members; returns unknown ones.
  std::vector<std::string> check(std::span<const MemberRule> rules) const;

  /// The member; null when absent.
  const nlohmann::ordered_json& get(std::string_view name) const;
  bool given(std::string_view name) const;
  bool boolean(std::string_view name, bool fallback) const;
  std::optional<int64_t> integer(std::string_view name, int64_t min, int64_t max) const;
  std::optional<double> number(std::string_view name, double min, double max) const;
  std::optional<std::string> text(std::string_view name) const;
  /// An array of ids that satisfy `valid`; empty when absent.
  template <class Valid>
  std::vector<int32_t> ids(std::string_view name, const Valid& valid) const {
    std::vector<int32_t> out = integers(name);
    for (const int32_t id : out) {
      if (!valid(id)) refuse_id(name, id);
    }
    return out;
  }
  /// Throws ApiError(400, "NAME: what", NAME).
  [[noreturn]] static void refuse(std::string_view name, std::string_view what);

 private:
  std::vector<int32_t> integers(std::string_view name) const;
  [[noreturn]] static void refuse_id(std::string_view name, int32_t id);
  const nlohmann::ordered_json& object_;
};

/// A member of an object inside a request; null when absent.
const nlohmann::ordered_json& member_of(const nlohmann::ordered_json& object, const char* key);
/// One that must be a string; throws ApiError(400) naming `where` and the key.
std::string need_text(const nlohmann::ordered_json& object, const char* key, const std::string& where);

}  // namespace glm53::api
