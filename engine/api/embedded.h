// Files of the folder page/ that the API process serves as they are.
#pragma once

#include <string_view>

namespace glm53::api::embedded {

std::string_view index_html();
std::string_view chat_css();
std::string_view chat_mjs();
std::string_view markdown_mjs();
std::string_view stream_mjs();
std::string_view view_mjs();

}  // namespace glm53::api::embedded
