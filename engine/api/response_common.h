// Pieces that both answer formats share. Includes the whole JSON library: for the two format files only.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "common/json.h"
#include "engine/api/response.h"

namespace glm53::api {

inline std::string sse(const nlohmann::ordered_json& object) {
  return "data: " + dump(object) + "\n\n";
}

/// An event with its name.
inline std::string named_sse(std::string_view name, const nlohmann::ordered_json& object) {
  std::string out = "event: ";
  out += name;
  return out + "\n" + sse(object);
}

inline nlohmann::ordered_json usage_json(const Usage& u) {
  nlohmann::ordered_json completion = {{"reasoning_tokens", u.reasoning}};
  if (u.drafted > 0) {
    completion["accepted_prediction_tokens"] = u.accepted;
    completion["rejected_prediction_tokens"] = u.drafted - u.accepted;
  }
  return {{"prompt_tokens", u.prompt},
          {"completion_tokens", u.completion},
          {"total_tokens", u.prompt + u.completion},
          {"prompt_tokens_details", {{"cached_tokens", u.cached}}},
          {"completion_tokens_details", std::move(completion)}};
}

inline nlohmann::ordered_json stop_reason_json(const StopReason& reason) {
  if (const auto* id = std::get_if<int32_t>(&reason)) return *id;
  if (const auto* text = std::get_if<std::string>(&reason)) return *text;
  return nullptr;
}

inline nlohmann::ordered_json string_or_null(const std::string& text) {
  return text.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(text);
}

}  // namespace glm53::api
