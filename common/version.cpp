#include "common/version.h"

namespace glm53 {

std::string_view version() {
  return GLM53_VERSION " (" GLM53_COMMIT ")";
}

}  // namespace glm53
