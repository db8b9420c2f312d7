#pragma once
#include <string_view>
namespace glm53 {
/// "0.1.0 (a1b2c3d)"; commit is "unknown" outside a checkout.
std::string_view version();
}  // namespace glm53
