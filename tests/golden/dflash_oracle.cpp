#include "tests/golden/dflash_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace glm53::oracle {
namespace {

Row multiply(const Row& w, const Row& x, size_t out) {
  Row y(out, 0.0);
  for (size_t o = 0; o < out; ++o)
    for (size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
  return y;
}

class Forward {
 public:
  Forward(const Shape& s, const Tensors& t, Mistake m) : s_(s), t_(t), m_(m) {
    if (m == Mistake::eps) s_.eps = 1e-6;
    if (m == Mistake::theta) s_.theta = 1e6;
  }

  Block run(const Context& given, int anchor, int n) {
    Context context = given;
    if (m_ == Mistake::anchor_feature) context.taps.pop_back();
    Rows h_ctx;
    for (Row taps : context.taps) {
      if (m_ == Mistake::taps_swapped) std::rotate(taps.begin(), taps.begin() + s_.hidden, taps.end());
      h_ctx.push_back(norm(multiply(t_.of.at("fc.weight"), taps, size(s_.hidden)), "hidden_norm.weight"));
    }
    Rows h;
    for (int i = 0; i < s_.block; ++i) {
      const auto id = size(i == 0 ? anchor : s_.mask) * size(s_.hidden);
      h.emplace_back(t_.embedding.begin() + static_cast<ptrdiff_t>(id),
                     t_.embedding.begin() + static_cast<ptrdiff_t>(id + size(s_.hidden)));
    }
    for (int layer = 0; layer < s_.layers; ++layer) {
      layer_ = "layers." + std::to_string(layer) + ".";
      attention(h, h_ctx, context.first, n);
      mlp(h);
    }
    Block block;
    for (const Row& row : h) block.z.push_back(norm(row, "norm.weight"));
    walk(block, anchor);
    return block;
  }

 private:
  static size_t size(int v) { return static_cast<size_t>(v); }
  const Row& own(const std::string& name) const { return t_.of.at(layer_ + name); }

  Row norm(const Row& x, const Row& w) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(x.size()) + s_.eps);
    Row y;
    for (size_t i = 0; i < x.size(); ++i) y.push_back(x[i] * scale * (w[i] + (m_ == Mistake::norm_plus_one ? 1 : 0)));
    return y;
  }
  Row norm(const Row& x, const std::string& weight) const { return norm(x, t_.of.at(weight)); }

  /// Heads of a row: normed each, then turned by the position.
  Rows turned_heads(const Row& x, int heads, const std::string& weight, int position) const {
    Rows out;
    for (int head = 0; head < heads; ++head) {
      const Row v = norm(Row(x.begin() + head * s_.dim, x.begin() + (head + 1) * s_.dim), own(weight));
      Row y(v.size());
      for (int j = 0; j < s_.dim / 2; ++j) {
        const double phi = position * std::pow(s_.theta, -2.0 * j / s_.dim);
        const bool pairs = m_ == Mistake::interleaved_rope;
        const size_t a = size(pairs ? 2 * j : j), b = size(pairs ? 2 * j + 1 : j + s_.dim / 2);
        y[a] = v[a] * std::cos(phi) - v[b] * std::sin(phi);
        y[b] = v[b] * std::cos(phi) + v[a] * std::sin(phi);
      }
      out.push_back(y);
    }
    return out;
  }
  Rows heads(const Row& x, int count) const {
    Rows out;
    for (int head = 0; head < count; ++head)
      out.emplace_back(x.begin() + head * s_.dim, x.begin() + (head + 1) * s_.dim);
    return out;
  }

  /// coefficients [row][side][tap][channel] of a sublayer whose normed input is u.
  using Coefficients = std::vector<std::vector<Rows>>;
  Coefficients coefficients(const std::string& conv, const Rows& u) const {
    const int groups = s_.hidden / s_.group;
    const Row& base = own(conv + ".base_kernel");
    Coefficients all;
    for (const Row& row : u) {
      const Row delta = multiply(own(conv + ".kernel_projection.weight"), row, size(2 * s_.kernel * groups));
      std::vector<Rows> sides(2, Rows(size(s_.kernel), Row(size(s_.hidden))));
      for (int side = 0; side < 2; ++side)
        for (int tap = 0; tap < s_.kernel; ++tap)
          for (int c = 0; c < s_.hidden; ++c)
            sides[size(side)][size(tap)][size(c)] = base[size((side * s_.kernel + tap) * s_.hidden + c)] +
                                                    delta[size((side * s_.kernel + tap) * groups + c / s_.group)];
      all.push_back(sides);
    }
    return all;
  }
  Rows convolve(const Coefficients& k, const Rows& v, int side) const {
    if (m_ == Mistake::conv_sides_swapped) side = 1 - side;
    Rows out(v.size(), Row(size(s_.hidden), 0.0));
    for (int t = 0; t < s_.block; ++t)
      for (int tap = 0; tap < s_.kernel; ++tap) {
        int from = t - tap;
        if (from < 0 && m_ == Mistake::conv_across_rows) from += s_.block;
        if (from < 0) continue;
        for (size_t c = 0; c < size(s_.hidden); ++c)
          out[size(t)][c] += k[size(t)][size(side)][size(tap)][c] * v[size(from)][c];
      }
    return out;
  }

  /// The part around a sublayer: norm, first convolution, the sublayer, second convolution, residual.
  template <class Sublayer>
  void around(Rows& h, const std::string& norm_weight, const std::string& conv, Sublayer sublayer) {
    Rows u;
    for (const Row& row : h) u.push_back(norm(row, own(norm_weight)));
    const Coefficients k = coefficients(conv, u);
    const Rows y = sublayer(convolve(k, u, 0));
    const Rows out = convolve(m_ == Mistake::conv_of_output ? coefficients(conv, y) : k, y, 1);
    for (size_t t = 0; t < h.size(); ++t)
      for (size_t c = 0; c < h[t].size(); ++c) h[t][c] += out[t][c];
  }

  /// May a row at `position` see context position t?
  bool sees(int position, int t) const {
    const int window = s_.window + (m_ == Mistake::wide_window ? 1 : m_ == Mistake::narrow_window ? -1 : 0);
    return position - t <= window - 1;
  }
  bool sees_row(int row, int other) const {
    if (m_ == Mistake::causal_block) return other <= row;
    return m_ != Mistake::block_outside || other == row;
  }

  void attention(Rows& h, const Rows& h_ctx, int first, int n) {
    const size_t q_width = size(s_.heads * s_.dim), kv_width = size(s_.kv_heads * s_.dim);
    std::vector<Rows> k_ctx, v_ctx;
    for (size_t i = 0; i < h_ctx.size(); ++i) {
      const int position = first + static_cast<int>(i) + (m_ == Mistake::shifted_positions ? 1 : 0);
      k_ctx.push_back(turned_heads(multiply(own("self_attn.k_proj.weight"), h_ctx[i], kv_width), s_.kv_heads,
                                   "self_attn.k_norm.weight", position));
      v_ctx.push_back(heads(multiply(own("self_attn.v_proj.weight"), h_ctx[i], kv_width), s_.kv_heads));
    }
    around(h, "input_layernorm.weight", "attention_conv", [&](const Rows& u) {
      std::vector<Rows> q, k, v;
      for (int i = 0; i < s_.block; ++i) {
        const Row& x = u[size(i)];
        q.push_back(turned_heads(multiply(own("self_attn.q_proj.weight"), x, q_width), s_.heads,
                                 "self_attn.q_norm.weight", n + i));
        k.push_back(turned_heads(multiply(own("self_attn.k_proj.weight"), x, kv_width), s_.kv_heads,
                                 "self_attn.k_norm.weight", n + i));
        v.push_back(heads(multiply(own("self_attn.v_proj.weight"), x, kv_width), s_.kv_heads));
      }
      Rows out;
      for (int i = 0; i < s_.block; ++i) {
        Row all;
        for (int head = 0; head < s_.heads; ++head) {
          const size_t shared = size(head * s_.kv_heads / s_.heads);
          Row score;
          Rows value;
          const auto see = [&](const Row& key, const Row& val) {
            score.push_back(std::inner_product(key.begin(), key.end(), q[size(i)][size(head)].begin(), 0.0) /
                            std::sqrt(s_.dim));
            value.push_back(val);
          };
          for (size_t c = 0; c < k_ctx.size(); ++c)
            if (sees(n + i, first + static_cast<int>(c))) see(k_ctx[c][shared], v_ctx[c][shared]);
          for (int j = 0; j < s_.block; ++j)
            if (sees_row(i, j)) see(k[size(j)][shared], v[size(j)][shared]);
          const double top = *std::max_element(score.begin(), score.end());
          double total = 0;
          Row sum(size(s_.dim), 0.0);
          for (size_t c = 0; c < score.size(); ++c) {
            const double w = std::exp(score[c] - top);
            total += w;
            for (size_t d = 0; d < sum.size(); ++d) sum[d] += w * value[c][d];
          }
          for (const double x : sum) all.push_back(x / total);
        }
        out.push_back(multiply(own("self_attn.o_proj.weight"), all, size(s_.hidden)));
      }
      return out;
    });
  }

  void mlp(Rows& h) {
    around(h, "post_attention_layernorm.weight", "mlp_conv", [&](const Rows& u) {
      Rows out;
      for (const Row& x : u) {
        Row gate = multiply(own("mlp.gate_proj.weight"), x, size(s_.mlp));
        const Row up = multiply(own("mlp.up_proj.weight"), x, size(s_.mlp));
        for (size_t i = 0; i < gate.size(); ++i) {
          const double g = m_ == Mistake::clamped_swiglu ? std::min(gate[i], 1.0) : gate[i];
          gate[i] = g / (1 + std::exp(-g)) * up[i];
        }
        out.push_back(multiply(own("mlp.down_proj.weight"), gate, size(s_.hidden)));
      }
      return out;
    });
  }

  void walk(Block& block, int anchor) const {
    const Row *a = &t_.of.at("candidate_selector.predecessor_codebook"),
              *b = &t_.of.at("candidate_selector.successor_codebook");
    if (m_ == Mistake::codebooks_swapped) std::swap(a, b);
    int previous = anchor;
    for (size_t i = 1; i < block.z.size(); ++i) {
      const Row logits = multiply(t_.head, block.z[i], size(s_.vocab));
      std::vector<int> ids(size(s_.vocab));
      std::iota(ids.begin(), ids.end(), 0);
      std::stable_sort(ids.begin(), ids.end(), [&](int x, int y) { return logits[size(x)] > logits[size(y)]; });
      ids.resize(size(s_.top_k));
      const Row hidden = multiply(t_.of.at("candidate_selector.hidden_projection.weight"), block.z[i], size(s_.rank));
      Row unary, score;
      for (const int id : ids) {
        unary.push_back(logits[size(id)]);
        score.push_back(unary.back());
        for (size_t r = 0; r < size(s_.rank); ++r)
          score.back() += (*a)[size(previous * s_.rank) + r] * hidden[r] * (*b)[size(id * s_.rank) + r];
      }
      previous = ids[static_cast<size_t>(std::max_element(score.begin(), score.end()) - score.begin())];
      block.ids.push_back(ids);
      block.unary.push_back(unary);
      block.score.push_back(score);
      block.draft.push_back(previous);
    }
  }

  Shape s_;
  const Tensors& t_;
  Mistake m_;
  std::string layer_;
};

}  // namespace

Block draft(const Shape& shape, const Tensors& tensors, const Context& context, int anchor, int n, Mistake mistake) {
  return Forward(shape, tensors, mistake).run(context, anchor, n);
}

}  // namespace glm53::oracle
