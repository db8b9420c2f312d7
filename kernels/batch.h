// What one step sees (Batch) and the caches it works on (Caches); identical on every rank.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/tensor.h"

namespace glm53 {

enum class BlockId : int32_t { null = 0 };  ///< 64 tokens of latents and pooled keys; block 0 is never given out
enum class SlotId : int32_t { none = -1 };  ///< live recurrent state of one sequence
enum class SnapId : int32_t { none = -1 };  ///< saved recurrent state

inline constexpr int kBlockTokens = 64;
inline constexpr int kChunk = 64;  ///< absolute grid of the chunk family, in positions

/// Which kernel family a position runs in. window: generated positions (decode, verify, replayed output), where R rows
/// equal R single rows bit for bit. chunk: prompt positions, on the absolute 64-token grid. Chosen by position (<
/// prompt length or not), never by row count.
enum class Regime : uint8_t { window, chunk };

/// One step's rows. Capacity is the graph bucket; rows and sequences past the real count are padding (slot -1, length
/// 0): operators write zeros for them and touch no cache. Window sequences (and their rows) come first, then chunk
/// sequences.
struct Batch {
  int rows = 0, seqs = 0;                ///< real counts
  int window_rows = 0, window_seqs = 0;  ///< of these, in the window regime
  Tensor token;        ///< i32 [R]; -1 = the row brings its own embedding (see embedding) or is a dead draft
  Tensor position;     ///< i32 [R], counts from 0
  Tensor row_seq;      ///< i32 [R], index of the row's sequence
  Tensor row_begin;    ///< i32 [S+1]
  Tensor slot;         ///< i32 [S], SlotId
  Tensor committed;    ///< i32 [S], tokens final in the slot's state before this step's replay
  Tensor replay;       ///< i32 [S], records of the last window to commit first (0 … max_window)
  Tensor block_table;  ///< i32 [S][max_blocks]; row of position p = table[p >> 6] · 64 + (p & 63)
  Tensor logit_row;    ///< i32 [L], rows whose logits are wanted
  int logit_rows = 0;
  Tensor export_pos;  ///< i32 [S][2]; chunk regime: positions p after which (p tokens in) the state is saved; -1 = none
  Tensor export_snap;  ///< i32 [S][2], SnapId to save it in
  Tensor embedding;    ///< f32 or bf16 [R][hidden] for rows with token -1; empty when no row brings one (vision, later)
};

/// Layers [first, last) of the model: the part of a pass that a batch takes in one step.
struct LayerSpan {
  int32_t first = 0, last = 0;
  bool operator==(const LayerSpan&) const = default;
};

/// Storage of latents and pooled keys (spec runtime §1.2–1.4). f32 and bf16 pool keys follow the reference maths; the
/// 8-bit forms rotate pooled keys by Hadamard-128 before the code, as §1.4.
enum class KvFormat : uint8_t { f32, bf16, fp8_c528, int8_c528 };

/// Sizes of everything cached, on this rank (heads already divided by the shard).
struct CacheGeometry {
  int mla_layers = 0, kda_layers = 0;
  int kpool = 0, latent = 0, index_dim = 0;
  int kda_heads = 0, head_dim = 0;
  int conv_channels = 0;  ///< q, k, v channels of this rank: 3 · kda_heads · head_dim
  int conv_kernel = 4;
  int max_window = 16;  ///< 1 + most drafts of a window
  KvFormat format = KvFormat::f32;

  /// Slots of the raw-key ring: kpool · bit_ceil(ceil((kpool + max_window − 1)/kpool)); 32 for kpool 4 and 16 rows.
  int ring() const {
    return kpool * static_cast<int>(std::bit_ceil(static_cast<unsigned>((kpool + max_window - 1 + kpool - 1) / kpool)));
  }
  /// Live conv columns of a slot: history, then the newest window.
  int conv_columns() const { return conv_kernel - 1 + max_window; }
  /// f32 values of one replay record of one layer: k, v and raw gate of each head, then the raw beta of each head.
  int record_width() const { return kda_heads * (3 * head_dim + 1); }
};

/// Byte offsets inside one layer's part of a block; every part starts on a 64-byte boundary.
struct BlockLayout {
  size_t codes = 0;        ///< [64][latent] in the format's element
  size_t scales = 0;       ///< f32 [64][latent/128]; only 8-bit formats
  size_t pool_keys = 0;    ///< [64/kpool][index_dim] in the format's element
  size_t pool_scales = 0;  ///< f32 [64/kpool]; only 8-bit formats
  size_t layer_bytes = 0, block_bytes = 0;
  Dtype element{};  ///< f32, bf16, e4m3 or i8
};
/// Throws Error(config) when kpool does not divide 64 or latent is not a multiple of 128 in an 8-bit format.
BlockLayout block_layout(const CacheGeometry& geometry);

/// The pools themselves. Slots and snapshots have the layer outermost after the id so that one id is one contiguous
/// copy.
struct Caches {
  CacheGeometry geometry;
  BlockLayout layout;
  Tensor blocks;   ///< u8 [blocks][block_bytes]
  Tensor state;    ///< f32 [slots][kda_layers][kda_heads][key dim][value dim]
  Tensor conv;     ///< activation dtype [slots][kda_layers][conv_columns][conv_channels]; columns 0 … kernel-2 are
                   ///< history, oldest first
  Tensor records;  ///< f32 [slots][kda_layers][max_window][record_width]
  Tensor
      ring;  ///< activation dtype [slots][mla_layers][ring][2][index_dim]: raw key, raw gate of position p at p % ring
  Tensor snap_state;  ///< f32 [snaps][kda_layers][kda_heads][dim][dim]; only flushed (record-free) state is ever saved
  Tensor snap_conv;   ///< [snaps][kda_layers][kernel-1][conv_channels]
  Tensor snap_ring;   ///< [snaps][mla_layers][ring][2][index_dim]
};

}  // namespace glm53
