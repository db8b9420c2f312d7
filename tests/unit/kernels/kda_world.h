// Inputs of the KDA operators and the recurrence of spec model §4 in fp64.
#pragma once

#include "cache_world.h"

namespace glm53::test {

/// One layer's inputs over T positions of one sequence.
struct KdaInputs {
  KdaInputs(Random& random, int tokens, int head_count, int head_dim, bool worst_decay)
      : T(tokens), heads(head_count), dim(head_dim) {
    const int64_t n = int64_t{T} * heads * dim;
    q = random.normals(n);
    k = random.normals(n);
    v = random.normals(n);
    gate = worst_decay ? Floats(at(n), 50.0F) : random.normals(n, 1.5F, -1.0F);
    beta = random.normals(int64_t{T} * heads, 2.0F);
    a_log = random.normals(heads, 0.7F);
    dt_bias = random.normals(int64_t{heads} * dim, 1.0F);
    if (worst_decay) std::fill(a_log.begin(), a_log.end(), 1.0F);  // σ = 1, so every log decay is the lower bound
    a_log_weight = plain(a_log, heads, 1);
    dt_bias_weight = plain(dt_bias, int64_t{heads} * dim, 1);
  }

  int T, heads, dim;
  float lower = -5.0F;
  Floats q, k, v, gate, beta, a_log, dt_bias;
  Weight a_log_weight, dt_bias_weight;
};

/// The recurrence, token by token: decay, delta, read. Outputs [T][heads][dim]; the state of every head is carried.
struct KdaOracle {
  KdaOracle(int heads, int dim) : state(at(heads) * at(dim) * at(dim), 0.0) {}

  void token(const KdaInputs& in, int t, double* out) {
    const int D = in.dim;
    for (int h = 0; h < in.heads; ++h) {
      const size_t row = at((int64_t{t} * in.heads + h) * D);
      double* S = state.data() + at(h) * at(D) * at(D);
      double qq = 0, kk = 0;
      for (size_t a = 0; a < at(D); ++a) {
        qq += double(in.q[row + a]) * double(in.q[row + a]);
        kk += double(in.k[row + a]) * double(in.k[row + a]);
      }
      const double beta = 1 / (1 + std::exp(-double(in.beta[at(int64_t{t} * in.heads + h)])));
      Doubles p(at(D), 0.0);
      for (size_t a = 0; a < at(D); ++a) {
        const double f = double(in.gate[row + a]) + double(in.dt_bias[at(h) * at(D) + a]);
        const double g = double(in.lower) / (1 + std::exp(-std::exp(double(in.a_log[at(h)])) * f));
        for (size_t b = 0; b < at(D); ++b) {
          S[a * at(D) + b] *= std::exp(g);
          p[b] += double(in.k[row + a]) / std::sqrt(kk + 1e-6) * S[a * at(D) + b];
        }
      }
      for (size_t b = 0; b < at(D); ++b) {
        const double delta = beta * (double(in.v[row + b]) - p[b]);
        double o = 0;
        for (size_t a = 0; a < at(D); ++a) {
          S[a * at(D) + b] += double(in.k[row + a]) / std::sqrt(kk + 1e-6) * delta;
          o += double(in.q[row + a]) / std::sqrt(qq + 1e-6) / std::sqrt(double(D)) * S[a * at(D) + b];
        }
        if (out != nullptr) out[at(h) * at(D) + b] = o;
      }
    }
  }

  Doubles state;
};

/// Runs rows [from, from + step rows) of the inputs of one sequence; the step's rows must be in that order.
struct KdaRun {
  KdaRun(KdaInputs& inputs, Step& wanted_step, int from, const Caches& caches, int layer) : step(wanted_step) {
    const int64_t R = step.rows, width = int64_t{inputs.heads} * inputs.dim;
    out.assign(at(R * width), NAN);
    const auto rows = [&](Floats& all, int64_t n, Floats& mine) {
      mine.assign(at(R * n), NAN);  // padding rows stay NaN
      std::copy_n(all.begin() + from * n, step.batch.rows * n, mine.begin());
      return tensor(mine, {R, n});
    };
    args = {&step.batch,
            layer,
            &caches,
            rows(inputs.q, width, q),
            rows(inputs.k, width, k),
            rows(inputs.v, width, v),
            rows(inputs.gate, width, gate),
            rows(inputs.beta, inputs.heads, beta),
            &inputs.a_log_weight,
            &inputs.dt_bias_weight,
            inputs.lower,
            tensor(out, {R, width})};
  }

  Step& step;
  Floats q, k, v, gate, beta, out;
  KdaArgs args{};
};

inline CacheGeometry kda_geometry(int heads, int dim, int layers = 1) {
  CacheGeometry g;
  g.kda_layers = layers;
  g.kda_heads = heads;
  g.head_dim = dim;
  g.conv_channels = 3 * heads * dim;
  return g;
}

}  // namespace glm53::test
