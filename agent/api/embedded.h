// Files of this folder that the agent serves as they are.
#pragma once

#include <string_view>

namespace glm53::agent::embedded {

std::string_view openapi_json();
std::string_view index_html();
std::string_view page_css();
std::string_view page_js();

}  // namespace glm53::agent::embedded
