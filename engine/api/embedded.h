// Files that the API process serves as they are: the folder page/ and the description of its endpoints.
#pragma once

#include <string_view>

namespace glm53::api::embedded {

std::string_view index_html();
std::string_view chat_css();
std::string_view chat_mjs();
std::string_view markdown_mjs();
std::string_view stream_mjs();
std::string_view view_mjs();
std::string_view openapi_json();

}  // namespace glm53::api::embedded
