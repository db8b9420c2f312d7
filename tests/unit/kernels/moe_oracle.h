// The mixture of experts in f64, and the routing it takes.
#pragma once

#include <algorithm>
#include <cmath>

#include "tests/unit/kernels/weights.h"

namespace glm53::test {

struct Routing {
  Ints index;
  Floats weight;
  int64_t k;
};

/// Σ weight · down(swiglu(gate x, up x)) of each row's experts (model §6). `e` has TestWeights gate, up and down.
template <class Experts>
Doubles moe_oracle(const Floats& x, const Routing& routing, int64_t rows, int64_t hidden, const Experts& e,
                   double limit) {
  Doubles out(at(rows * hidden));
  for (int64_t r = 0; r < rows; ++r) {
    const Doubles row(x.begin() + r * hidden, x.begin() + (r + 1) * hidden);
    for (int64_t j = 0; j < routing.k; ++j) {
      const int32_t id = routing.index[at(r * routing.k + j)];
      if (id < 0) continue;
      Doubles a = product(e.gate[at(id)], row, 1);
      const Doubles b = product(e.up[at(id)], row, 1);
      for (size_t i = 0; i < a.size(); ++i) {
        const double g = std::min(a[i], limit);
        a[i] = g / (1 + std::exp(-g)) * std::clamp(b[i], -limit, limit);
      }
      const Doubles y = product(e.down[at(id)], a, 1);
      for (int64_t d = 0; d < hidden; ++d) {
        out[at(r * hidden + d)] += static_cast<double>(routing.weight[at(r * routing.k + j)]) * y[at(d)];
      }
    }
  }
  return out;
}

}  // namespace glm53::test
