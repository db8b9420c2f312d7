// What runs on the other side of glm53ctl node add.
#pragma once

#include <string_view>

namespace glm53::cli {

/// A script for sh. Its one argument is the folder that came along: bundle, digest, config.toml, root, head, ca, token.
std::string_view install_script();

}  // namespace glm53::cli
