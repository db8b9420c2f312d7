// EXL3 decoding for hosts: the format in one place (spec exl3 §1–§3). Used by the CPU backend, by loaders that check
// tensors, and by tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/weight.h"

namespace glm53::exl3 {

/// fp16 bits of the codebook entry of a 16-bit state.
uint16_t code_bits(Codebook codebook, uint16_t state);
/// All 65536 entries widened to f32; built once.
std::span<const float> code_table(Codebook codebook);
/// State of trellis element i (0 … 255) of a tile of 16·bits words.
uint16_t state_at(std::span<const uint16_t> tile, int bits, int i);
/// Row (k) and column (n) of trellis element i inside its 16×16 tile.
struct Position {
  int k, n;
};
Position position_of(int i);
/// Orthonormal Hadamard transform of 128 values in place, natural order.
void hadamard128(float* v);
/// Inner matrix as fp16 bits, [in][out], before Hadamard and scales. Exact.
std::vector<uint16_t> inner_matrix(const Weight& w);
/// W = diag(suh) H Ŵ H diag(svh), returned [out][in] in f32.
std::vector<float> dense_matrix(const Weight& w);

}  // namespace glm53::exl3
