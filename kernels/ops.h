// The operator set: everything the model computes, one virtual function and one argument struct each. This header is
// the contract; a backend (kernels/cpu, kernels/cuda) implements all of it. Formulas: spec model §2–§7, runtime §1–§3,
// exl3 §3, frontend §6.
//
// Rules for every operator
// * Activations ("act") are f32 on the CPU reference and bf16 on CUDA; `Ops::activation()` says which. [R] counts rows
//   including padding.
// * Nothing allocates and nothing blocks, but for the functions that say so. Calls are ordered.
// * Outputs never alias inputs unless the comment says so. Every output row is written, padding rows with zeros.
// * Window rows: R rows give the same bits as R calls of one row. Splits depend on context length only; sums have a
//   fixed order; ties go to the lower index.
// * Wrong shapes are bugs of the caller: Error(internal) naming operator, argument, found and expected.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/batch.h"
#include "kernels/tensor.h"
#include "kernels/weight.h"

namespace glm53 {

/// out[r] = table[token[r]] (f32 or bf16 [V][hidden] -> act [R][hidden]); rows with token -1 take batch.embedding, or
/// zeros without one.
struct EmbedArgs {
  const Batch* batch;
  const Weight* table;
  Tensor out;
};

/// y = x · rsqrt(mean(x²) + eps) · weight, statistics fp32. x, y act [R][n] (may alias). weight empty = no weight.
struct RmsNormArgs {
  Tensor x;
  const Weight* weight;
  float eps;
  Tensor y;
};

/// y = W x (+ beta · y). x act [R][in]; y act or f32 [R][out]; fp32 accumulation in a fixed order. x and y may be
/// column views. Rows [0, window_rows) run the window family, the rest the chunk family. w may be plain, exl3 or
/// quantised (fp8_row, int4_g32); no other operator takes quantised weights.
struct LinearArgs {
  Tensor x;
  const Weight* w;
  Tensor y;
  float beta = 0;
  int window_rows = 0;
};

/// mHC of one site (model §3). streams act [R][n][H]. Computes post f32 [R][n], comb f32 [R][n][n] (row = source), and
/// u = RMSNorm(Σ_s pre[s]·X[s]; norm) act [R][H]; without norm (null) u is the plain mix.
/// Site: fn [(2+n)n, nH], base [(2+n)n] f32, scale [3] f32.
struct MhcSite {
  const Weight *fn, *base, *scale;
};
struct MhcPreArgs {
  Tensor streams;
  MhcSite site;
  const Weight* norm;
  float rms_eps, hc_eps;
  int sinkhorn;
  Tensor post, comb, u;
};
/// X[j] = post[j]·y + Σ_i comb[i][j]·X[i], all streams at once, in place. y act [R][H].
struct MhcPostArgs {
  Tensor streams, y, post, comb;
};
/// mhc_post of one site, then mhc_pre of the next: the fusion that matters. post/comb are read, then overwritten.
struct MhcPostPreArgs {
  MhcPostArgs post;
  MhcPreArgs pre;
};
/// h = mean over streams (fp32): act [R][n][H] -> act [R][H]. Also a tap (spec speculative §1.4).
struct StreamMeanArgs {
  Tensor streams, out;
};

/// Depthwise causal convolution of kernel 4 and SiLU (model §4, runtime §3.1) on raw act [R][C] -> out act [R][C], C =
/// q|k|v channels. weight f32/bf16 [C][4], tap 3 multiplies the current token. History lives in caches.conv of the
/// row's slot: window: first drops `replay` columns (the accepted rows of the last window), then appends the new raw
/// columns after the 3 of history, kept until the next step; chunk: needs replay = 0; leaves the last three raw columns
/// as history; exports go to snap_conv.
struct KdaConvArgs {
  const Batch* batch;
  int layer;
  const Caches* caches;
  Tensor raw;
  const Weight* weight;
  Tensor out;
};

/// Kimi delta attention (model §4). q, k, v act [R][heads·dim] after conv and SiLU (before l2norm); gate act
/// [R][heads·dim] = f_b(f_a x); beta act [R][heads] = b_proj x; a_log f32 [heads]; dt_bias f32 [heads·dim]. out act
/// [R][heads·dim] = core output before the gated norm. kda_window handles rows [0, window_rows): loads S, commits
/// `replay` records and stores S, then runs the new rows on a copy and keeps their (k, v, gate, beta) as records.
/// kda_chunk handles the rest in chunks on the absolute grid of 64 with sub-blocks of 16 (runtime §3.4), stores S, and
/// saves S into snap_state after export_pos tokens. Each leaves the other's rows alone.
struct KdaArgs {
  const Batch* batch;
  int layer;
  const Caches* caches;
  Tensor q, k, v, gate, beta;
  const Weight *a_log, *dt_bias;
  float lower_bound;
  Tensor out;
};
/// Commits the pending records of each (slot, replay) pair into S, conv history and nothing else; afterwards replay is
/// 0. All layers.
struct FlushArgs {
  std::span<const SlotId> slots;
  std::span<const int> replay;
  const Caches* caches;
  std::span<const Weight* const> a_log, dt_bias;
  float lower_bound;
};
/// y = (o · rsqrt(mean_dim(o²) + eps) · weight) · σ(gate), per head. o, gate, y act [R][heads·dim]; y may alias o.
struct GatedNormArgs {
  Tensor o, gate;
  const Weight* weight;
  float eps;
  int dim;
  Tensor y;
};

/// Writes latents (already normed) of all rows into their blocks in the cache format. latent act [R][latent].
struct LatentWriteArgs {
  const Batch* batch;
  int layer;
  const Caches* caches;
  Tensor latent;
};
/// Indexer keys (model §5.2, runtime §2.7). key act [R][dim] = wk x before its LayerNorm (weight, bias, eps 1e-6); gate
/// act [R][dim]; ape [kpool][dim]. Stores normed key and gate of every row in the ring; writes each pool that a row
/// completes. Rows of a sequence in position order. Chunk regime: exports of the ring go to snap_ring.
struct IndexWriteArgs {
  const Batch* batch;
  int layer;
  const Caches* caches;
  Tensor key, gate;
  const Weight *norm_weight, *norm_bias, *ape;
};
/// Scores complete pools and selects (model §5.2). query act [R][heads·dim]; head_weight f32 [R][heads] = weights_proj
/// x, not yet scaled. selected i32 [R][top_pools]: pool numbers in ascending order; n_selected i32 [R]. All candidates
/// when there are at most top_pools, without scoring. The incomplete tail is implied: mla_sparse adds it. scores
/// (optional, tests) f32 [R][max pools].
struct IndexSelectArgs {
  const Batch* batch;
  int layer;
  const Caches* caches;
  Tensor query, head_weight;
  int heads, top_pools;
  Tensor selected, n_selected, scores;
};

/// q̃_h = W_UK,hᵀ q_h (model §5.1). q act [R][heads·nope] -> out act [R][heads·latent]; kv_b [heads·(nope+v)][latent].
struct MlaAbsorbArgs {
  Tensor q;
  const Weight* kv_b;
  int heads, nope, v;
  Tensor out;
  int window_rows = 0;
};
/// a_h = Σ_j softmax(scale · q̃_h·c_j) c_j over the selected pools and the tail. q_latent, out act [R][heads·latent].
struct MlaSparseArgs {
  const Batch* batch;
  int layer;
  const Caches* caches;
  Tensor q_latent, selected, n_selected;
  int heads;
  float scale;
  Tensor out;
};
/// o_h = W_UV,h a_h. a act [R][heads·latent] -> out act [R][heads·v].
struct MlaExpandArgs {
  Tensor a;
  const Weight* kv_b;
  int heads, nope, v;
  Tensor out;
  int window_rows = 0;
};

/// act = silu(min(gate, limit)) · clamp(up, −limit, limit). gate, up, out act [R][n]; out may alias gate.
struct SwigluArgs {
  Tensor gate, up;
  float limit;
  Tensor out;
};
/// Router (model §6), fp32 throughout. x act [R][H]; w [E][H]; bias f32 [E]. index i32 [R][k] ascending by expert id,
/// weight f32 [R][k]; padding rows get index -1. logits (optional, tests) f32 [R][E].
struct RouterArgs {
  Tensor x;
  const Weight *w, *bias;
  int groups, top_groups, k;
  bool normalize;
  float scale;
  int real_rows;
  Tensor index, weight, logits;
};
/// out = Σ_k weight_k · Expert_{index_k}(x), fp32 sum in ascending expert id; each expert is down(swiglu(gate x, up x))
/// in the format of its weights (exl3 packed, or bf16/f32). Expert weights may be this rank's slice: the result is then
/// a partial sum. out act [R][H].
struct MoeArgs {
  Tensor x, index, weight;
  std::span<const Weight> gate, up, down;
  float limit;
  Tensor out;
  int window_rows = 0;
};

/// a[i] += b[i]. Same shape and dtype.
struct AddArgs {
  Tensor a, b;
};

/// Sampling (frontend §6) of L rows. All per-row arrays are host or pinned memory. Order: mask, bias, penalties, greedy
/// or temperature, min_p, top_k, top_p, inverse CDF by descending probability (ties: lower id) with u in [0,1) given by
/// the caller.
struct SampleRow {
  float temperature = 1, top_p = 1, min_p = 0, presence = 0, frequency = 0, repetition = 1;
  int32_t top_k = 0;
  double u = 0;                         ///< Philox draw of this position
  std::span<const uint32_t> allowed{};  ///< bit per token; empty = all
  std::span<const int32_t> banned{};    ///< e.g. end tokens while min_tokens is not reached
  std::span<const std::pair<int32_t, float>> bias{};
  std::span<const std::pair<int32_t, int32_t>> seen{};  ///< token, times in the output (0 = only in the prompt)
  int32_t top_logprobs = -1;                            ///< -1 none, else N best of the raw distribution
};
/// token is -1 (logprob -inf) when the masks leave nothing to choose; the logprob is always given.
struct SampleOut {
  int32_t token = 0;
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
};
/// logits f32 [L][vocab] are overwritten. Ids from `text_vocab` on have no text and are never chosen.
struct SampleArgs {
  Tensor logits;
  int text_vocab;
  std::span<const SampleRow> rows;
  std::span<SampleOut> out;
};

// Arguments of the operators that only drafters need: kernels/draft_ops.h.
struct RopeArgs;
struct BlockConvArgs;
struct DraftWriteArgs;
struct DraftAttentionArgs;
struct TopLogitsArgs;
struct SelectorWalkArgs;

/// Recorded work that can be run again with the same pointers.
class Graph {
 public:
  virtual ~Graph() = default;
  virtual void launch() = 0;
};

/// Largest shapes that will be asked for; a backend sizes its scratch from it once.
struct OpLimits {
  int rows = 0, hidden = 0, widest = 0, heads = 0, latent = 0, max_context = 0, experts = 0, top_k = 0, vocab = 0,
      threads = 0;
};

/// One object is one device and one stream.
class Ops {
 public:
  virtual ~Ops() = default;
  virtual std::string_view backend() const = 0;  ///< "cpu", "cuda"
  virtual Dtype activation() const = 0;
  /// The cudaStream_t on which a GPU's operators run, for libraries that work beside them; null on a CPU.
  virtual void* native_stream() { return nullptr; }

  virtual Buffer allocate(size_t bytes, Place place) = 0;  ///< allocates; zero-filled; throws Error(memory)
  virtual void reserve(const OpLimits& limits) = 0;        ///< allocates scratch
  virtual void synchronize() = 0;                          ///< blocks
  virtual uint64_t record() = 0;                           ///< ticket of all work so far
  virtual bool done(uint64_t ticket) = 0;
  virtual std::unique_ptr<Graph> capture(const std::function<void()>& body) = 0;  ///< CPU: keeps the body and runs it
  virtual void copy(Tensor dst, Tensor src) = 0;  ///< equal shapes; converts between f32 and bf16
  virtual void zero(Tensor dst) = 0;

  virtual void embed(const EmbedArgs&) = 0;
  virtual void rms_norm(const RmsNormArgs&) = 0;
  virtual void linear(const LinearArgs&) = 0;
  virtual void mhc_pre(const MhcPreArgs&) = 0;
  virtual void mhc_post(const MhcPostArgs&) = 0;
  virtual void mhc_post_pre(const MhcPostPreArgs&) = 0;
  virtual void stream_mean(const StreamMeanArgs&) = 0;
  virtual void kda_conv(const KdaConvArgs&) = 0;
  virtual void kda_window(const KdaArgs&) = 0;
  virtual void kda_chunk(const KdaArgs&) = 0;
  virtual void kda_flush(const FlushArgs&) = 0;
  virtual void gated_norm(const GatedNormArgs&) = 0;
  virtual void latent_write(const LatentWriteArgs&) = 0;
  virtual void index_write(const IndexWriteArgs&) = 0;
  virtual void index_select(const IndexSelectArgs&) = 0;
  virtual void mla_absorb(const MlaAbsorbArgs&) = 0;
  virtual void mla_sparse(const MlaSparseArgs&) = 0;
  virtual void mla_expand(const MlaExpandArgs&) = 0;
  virtual void swiglu(const SwigluArgs&) = 0;
  virtual void router(const RouterArgs&) = 0;
  virtual void moe(const MoeArgs&) = 0;
  virtual void add(const AddArgs&) = 0;
  virtual void sample(const SampleArgs&) = 0;  ///< blocks until the tokens are on the host

  // For drafters; throw Error(unavailable) unless a backend has them.
  virtual void rope(const RopeArgs&);
  virtual void block_conv(const BlockConvArgs&);
  virtual void draft_write(const DraftWriteArgs&);
  virtual void draft_attention(const DraftAttentionArgs&);
  virtual void top_logits(const TopLogitsArgs&);
  virtual void selector_walk(const SelectorWalkArgs&);

  /// Saves the (flushed) state, conv history and ring of a slot, or brings them back. Ordered with the operators.
  virtual void snapshot_save(const Caches&, SlotId from, SnapId to) = 0;
  virtual void snapshot_restore(const Caches&, SnapId from, SlotId to) = 0;
  /// Zeroes state, conv history and ring of a slot: a sequence starts from nothing.
  virtual void slot_reset(const Caches&, SlotId slot) = 0;
  virtual void block_copy(const Caches&, BlockId from, BlockId to) = 0;
};

/// `threads` ≥ 1 workers, outputs are divided among them.
std::unique_ptr<Ops> make_cpu_ops(int threads);
/// Throws Error(unavailable) when CUDA is not compiled in or there is no device. Activations are bf16; f32 is for tests
/// against fp32 references.
std::unique_ptr<Ops> make_cuda_ops(int device, Dtype activation = Dtype::bf16);
/// Every backend usable here (CUDA with f32 and with bf16 activations); golden tests loop over it and print which ran.
std::vector<std::unique_ptr<Ops>> test_backends();

}  // namespace glm53
