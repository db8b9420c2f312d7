// Small things that the tests on a local cluster share.
#pragma once

#include <string>

#include <doctest/doctest.h>

#include "tests/e2e/cluster.h"

namespace glm53::e2e {

/// Shows both when a check of it fails.
inline bool contains(const std::string& text, const std::string& part) {
  INFO("looking for '", part, "' in: ", text);
  return text.find(part) != std::string::npos;
}

/// A cluster whose ranks are the real engine.
inline ClusterOptions real_engine() {
  ClusterOptions options;
  options.fake_rank = false;
  return options;
}

}  // namespace glm53::e2e
