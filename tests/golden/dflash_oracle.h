// DFlash2 in plain fp64, written from the text of the specification (speculative §1) and sharing nothing with
// engine/draft: what the drafter is compared with where there are no vectors. Nothing is cached and nothing is fast.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace glm53::oracle {

using Row = std::vector<double>;
using Rows = std::vector<Row>;

/// Sizes of a drafter, and one thing that can be done wrong for tests that must notice it.
struct Shape {
  int hidden = 0, layers = 0, heads = 0, kv_heads = 0, dim = 0, mlp = 0, block = 0, window = 0, taps = 0, kernel = 0,
      group = 0, rank = 0, top_k = 0, vocab = 0, mask = 0;
  double eps = 1e-5, theta = 10000;
};
enum class Mistake {
  none,
  causal_block,       ///< a row of the block sees only rows before it
  block_outside,      ///< no row of the block sees another one
  wide_window,        ///< one context position more
  narrow_window,      ///< one less
  shifted_positions,  ///< context keys turned by their position + 1
  anchor_feature,     ///< context ends one position early
  taps_swapped,
  conv_across_rows,  ///< row 0 has the last row as predecessor
  conv_sides_swapped,
  conv_of_output,  ///< coefficients of side 1 from the sublayer's output
  eps,             ///< 1e-6
  theta,           ///< 1e6
  interleaved_rope,
  norm_plus_one,
  codebooks_swapped,
  clamped_swiglu
};

struct Tensors {
  std::map<std::string, Row> of;  ///< by published name, row-major
  Row embedding, head;            ///< of the target, [vocab][hidden]
};

/// Taps of positions first, first + 1, …: [position][taps · hidden].
struct Context {
  int first = 0;
  Rows taps;
};

struct Block {
  Rows z;                             ///< [block][hidden]
  std::vector<std::vector<int>> ids;  ///< candidates of rows 1 …, best first
  Rows unary, score;                  ///< of them; scores along the walk
  std::vector<int> draft;
};

/// One block: `anchor` at position `n`, behind a context that ends before n.
Block draft(const Shape& shape, const Tensors& tensors, const Context& context, int anchor, int n,
            Mistake mistake = Mistake::none);

}  // namespace glm53::oracle
