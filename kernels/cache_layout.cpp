#include <string>

#include "common/error.h"
#include "kernels/batch.h"

namespace glm53 {
namespace {

constexpr size_t kPart = 64;        // alignment of every part of a block
constexpr int kScaleGroup = 128;    // latents that share one scale in the 8-bit formats
constexpr int kRotatedWidth = 128;  // the Hadamard rotation of 8-bit pool keys is 128 wide

constexpr size_t aligned(size_t bytes) {
  return (bytes + kPart - 1) / kPart * kPart;
}

Dtype element_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32:
      return Dtype::f32;
    case KvFormat::bf16:
      return Dtype::bf16;
    case KvFormat::fp8_c528:
      return Dtype::e4m3;
    case KvFormat::int8_c528:
      return Dtype::i8;
  }
  throw Error(Code::config, "cache geometry: unknown cache format", "use f32, bf16, fp8_c528 or int8_c528");
}

void require(bool ok, const std::string& what, const std::string& remedy) {
  if (!ok) throw Error(Code::config, "cache geometry: " + what, remedy);
}

}  // namespace

BlockLayout block_layout(const CacheGeometry& g) {
  BlockLayout layout;
  layout.element = element_of(g.format);
  require(g.mla_layers >= 0, "mla_layers is " + std::to_string(g.mla_layers), "must not be negative");
  if (g.mla_layers == 0) return layout;  // a model without latents has empty blocks
  require(g.kpool > 0 && kBlockTokens % g.kpool == 0, "kpool is " + std::to_string(g.kpool),
          "kpool must divide the block of " + std::to_string(kBlockTokens) + " tokens");
  require(g.latent > 0, "latent is " + std::to_string(g.latent), "must be positive");
  require(g.index_dim > 0, "index_dim is " + std::to_string(g.index_dim), "must be positive");
  const bool coded = size_of(layout.element) == 1;
  require(!coded || g.latent % kScaleGroup == 0, "latent is " + std::to_string(g.latent),
          "8-bit formats need a multiple of 128; use f32 or bf16");
  require(!coded || g.index_dim == kRotatedWidth, "index_dim is " + std::to_string(g.index_dim),
          "8-bit formats need 128; use f32 or bf16");

  const auto tokens = static_cast<size_t>(kBlockTokens), latent = static_cast<size_t>(g.latent);
  const auto pools = static_cast<size_t>(kBlockTokens / g.kpool), index_dim = static_cast<size_t>(g.index_dim);
  const size_t element = size_of(layout.element);
  layout.codes = 0;
  layout.scales = aligned(tokens * latent * element);
  layout.pool_keys = layout.scales + (coded ? aligned(tokens * (latent / kScaleGroup) * sizeof(float)) : 0);
  layout.pool_scales = layout.pool_keys + aligned(pools * index_dim * element);
  layout.layer_bytes = layout.pool_scales + (coded ? aligned(pools * sizeof(float)) : 0);
  layout.block_bytes = static_cast<size_t>(g.mla_layers) * layout.layer_bytes;
  return layout;
}

}  // namespace glm53
