#include <optional>
#include <set>
#include <utility>

#include "common/error.h"
#include "common/strings.h"
#include "engine/loader/config.h"
#include "engine/loader/safetensors.h"

namespace glm53 {
namespace {

constexpr size_t kMaxFindings = 200;  // lines of one message; the rest is counted
constexpr int64_t kTile = 16, kHadamard = 128;

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += cat(i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

/// Walks the tensors that a config implies; what is done with each is the business of those who derive from it.
class ImpliedTensors {
 public:
  explicit ImpliedTensors(const ModelConfig& config) : c_(config) {}
  virtual ~ImpliedTensors() = default;
  ImpliedTensors(const ImpliedTensors&) = delete;
  ImpliedTensors& operator=(const ImpliedTensors&) = delete;

 protected:
  virtual void expect(const std::string& tensor, Dtype dtype, const std::vector<int64_t>& shape) = 0;
  /// A routed expert's projection, whose tensors depend on its format.
  virtual void projection(const std::string& p, int64_t out, int64_t in) = 0;

  void walk() {
    expect("lm_head.weight", Dtype::bf16, {c_.vocab, c_.hidden});
    expect(text("embed_tokens.weight"), Dtype::bf16, {c_.vocab, c_.hidden});
    expect(text("norm.weight"), Dtype::bf16, {c_.hidden});
    for (int i = 0; i < c_.layers; ++i) backbone_layer(i);
    for (int i = 0; i < c_.mtp_layers; ++i) mtp_layer(c_.layers + i);
  }

 private:
  static std::string text(std::string_view name) { return cat("model.language_model.", name); }

  void backbone_layer(int i) {
    const std::string layer = text(cat("layers.", i, "."));
    norms(layer);
    const int64_t n = c_.streams, sites = (2 + n) * n;
    for (const char* site : {"attn", "ffn"}) {
      expect(cat(layer, "hc_", site, "_fn"), Dtype::bf16, {sites, n * c_.hidden});
      expect(cat(layer, "hc_", site, "_base"), Dtype::f32, {sites});
      expect(cat(layer, "hc_", site, "_scale"), Dtype::f32, {3});
    }
    const auto at = static_cast<size_t>(i);
    if (c_.attention[at] == AttentionKind::kda) {
      kda(layer + "self_attn.");
    } else {
      mla(layer + "self_attn.");
      if (!c_.shared_indexer[at]) indexer(layer + "self_attn.indexer.");
    }
    if (c_.mlp[at] == MlpKind::dense) {
      swiglu(layer + "mlp.", c_.intermediate);
    } else {
      moe(layer + "mlp.");
    }
  }

  void mtp_layer(int i) {
    const std::string layer = text(cat("layers.", i, "."));
    norms(layer);
    expect(layer + "eh_proj.weight", Dtype::bf16, {c_.hidden, 2 * c_.hidden});
    for (const char* norm : {"enorm", "hnorm", "shared_head.norm"})
      expect(cat(layer, norm, ".weight"), Dtype::bf16, {c_.hidden});
    mla(layer + "self_attn.");
    indexer(layer + "self_attn.indexer.");
    moe(layer + "mlp.");
  }

  void norms(const std::string& layer) {
    expect(layer + "input_layernorm.weight", Dtype::bf16, {c_.hidden});
    expect(layer + "post_attention_layernorm.weight", Dtype::bf16, {c_.hidden});
  }

  void kda(const std::string& p) {
    const int64_t heads = c_.kda_heads, dim = c_.kda_dim, width = heads * dim;
    for (const char* x : {"q", "k", "v"}) {
      expect(cat(p, x, "_proj.weight"), Dtype::bf16, {width, c_.hidden});
      expect(cat(p, x, "_conv1d.weight"), Dtype::bf16, {width, 1, c_.conv_kernel});
    }
    for (const char* x : {"f", "g"}) {
      expect(cat(p, x, "_a_proj.weight"), Dtype::bf16, {dim, c_.hidden});
      expect(cat(p, x, "_b_proj.weight"), Dtype::bf16, {width, dim});
    }
    expect(p + "b_proj.weight", Dtype::bf16, {heads, c_.hidden});
    expect(p + "o_norm.weight", Dtype::bf16, {dim});
    expect(p + "o_proj.weight", Dtype::bf16, {c_.hidden, width});
    expect(p + "dt_bias", Dtype::f32, {width});
    expect(p + "A_log", Dtype::f32, {heads});
  }

  void mla(const std::string& p) {
    const int64_t heads = c_.heads;
    expect(p + "q_a_proj.weight", Dtype::bf16, {c_.q_lora, c_.hidden});
    expect(p + "q_a_layernorm.weight", Dtype::bf16, {c_.q_lora});
    expect(p + "q_b_proj.weight", Dtype::bf16, {heads * c_.nope, c_.q_lora});
    expect(p + "kv_a_proj_with_mqa.weight", Dtype::bf16, {c_.kv_lora, c_.hidden});
    expect(p + "kv_a_layernorm.weight", Dtype::bf16, {c_.kv_lora});
    expect(p + "kv_b_proj.weight", Dtype::bf16, {heads * (c_.nope + c_.v_dim), c_.kv_lora});
    expect(p + "o_proj.weight", Dtype::bf16, {c_.hidden, heads * c_.v_dim});
  }

  void indexer(const std::string& p) {
    expect(p + "wq_b.weight", Dtype::bf16, {int64_t{c_.index_heads} * c_.index_dim, c_.q_lora});
    expect(p + "wk.weight", Dtype::bf16, {c_.index_dim, c_.hidden});
    expect(p + "k_norm.weight", Dtype::bf16, {c_.index_dim});
    expect(p + "k_norm.bias", Dtype::bf16, {c_.index_dim});
    expect(p + "weights_proj.weight", Dtype::bf16, {c_.index_heads, c_.hidden});
    expect(p + "index_kpool_compress_gate", Dtype::bf16, {c_.index_dim, c_.hidden});
    expect(p + "index_kpool_compress_ape", Dtype::bf16, {c_.kpool, c_.index_dim});
  }

  void swiglu(const std::string& p, int64_t width) {
    expect(p + "gate_proj.weight", Dtype::bf16, {width, c_.hidden});
    expect(p + "up_proj.weight", Dtype::bf16, {width, c_.hidden});
    expect(p + "down_proj.weight", Dtype::bf16, {c_.hidden, width});
  }

  void moe(const std::string& p) {
    expect(p + "gate.weight", Dtype::bf16, {c_.experts, c_.hidden});
    expect(p + "gate.e_score_correction_bias", Dtype::f32, {c_.experts});
    swiglu(p + "shared_experts.", c_.moe_intermediate * c_.shared_experts);
    for (int e = 0; e < c_.experts; ++e) {
      const std::string expert = cat(p, "experts.", e, ".");
      projection(expert + "gate_proj", c_.moe_intermediate, c_.hidden);
      projection(expert + "up_proj", c_.moe_intermediate, c_.hidden);
      projection(expert + "down_proj", c_.hidden, c_.moe_intermediate);
    }
  }

 protected:
  const ModelConfig& c_;
};

/// Compares each with the checkpoint.
class Inventory final : public ImpliedTensors {
 public:
  Inventory(const Checkpoint& checkpoint, const ModelConfig& config)
      : ImpliedTensors(config), checkpoint_(checkpoint) {}

  void check() {
    walk();
    surplus();
    report();
  }

 private:
  void find(const std::string& tensor, std::string_view file, std::string_view found, std::string_view expected) {
    ++count_;
    if (findings_.size() < kMaxFindings)
      findings_.push_back(
          cat(tensor, file.empty() ? "" : cat(" (", file, ")"), ": found ", found, ", expected ", expected));
  }

  void expect(const std::string& tensor, Dtype dtype, const std::vector<int64_t>& shape) override {
    seen_.insert(tensor);
    const std::string wanted = cat(name(dtype), " ", shape_text(shape));
    const auto at = checkpoint_.tensors().find(tensor);
    if (at == checkpoint_.tensors().end()) return find(tensor, "", "nothing", wanted);
    const TensorInfo& info = at->second;
    if (info.dtype != dtype || info.shape != shape)
      find(tensor, info.file, cat(name(info.dtype), " ", shape_text(info.shape)), wanted);
  }

  /// A routed expert's projection: BF16 `.weight`, or EXL3 when `.trellis` is there (spec exl3 §1.1).
  void projection(const std::string& p, int64_t out, int64_t in) override {
    if (!checkpoint_.has(p + ".trellis")) return expect(p + ".weight", Dtype::bf16, {out, in});
    if (out % kHadamard != 0 || in % kHadamard != 0)
      find(p, "", cat("an EXL3 projection of ", out, " × ", in), "multiples of 128");
    expect(p + ".suh", Dtype::f16, {in});
    expect(p + ".svh", Dtype::f16, {out});
    const TensorInfo& trellis = checkpoint_.info(p + ".trellis");
    seen_.insert(p + ".trellis");
    const auto& shape = trellis.shape;
    const int64_t words = shape.size() == 3 ? shape[2] : 0;
    if (trellis.dtype != Dtype::i16 || words % kTile != 0 || words < kTile || words > 8 * kTile ||
        shape[0] != in / kTile || shape[1] != out / kTile)
      find(p + ".trellis", trellis.file, cat(name(trellis.dtype), " ", shape_text(shape)),
           cat("i16 [", in / kTile, ", ", out / kTile, ", 16 × 1 to 8 bits]"));
    marker(p, ".mcg");
    marker(p, ".mul1");
    if (checkpoint_.has(p + ".mcg") && checkpoint_.has(p + ".mul1"))
      find(p, trellis.file, "both .mcg and .mul1", "at most one codebook marker");
    legacy(p);
  }

  void marker(const std::string& p, std::string_view suffix) {
    const std::string tensor = cat(p, suffix);
    const auto at = checkpoint_.tensors().find(tensor);
    if (at == checkpoint_.tensors().end()) return;
    seen_.insert(tensor);
    const TensorInfo& info = at->second;
    const bool one = info.shape.empty() || info.shape == std::vector<int64_t>{1};
    if (info.dtype != Dtype::i32 || !one)
      find(tensor, info.file, cat(name(info.dtype), " ", shape_text(info.shape)), "i32 [] or [1]");
  }

  void legacy(const std::string& p) {
    constexpr std::pair<std::string_view, std::string_view> kRefused[] = {
        {".su",
         "no packed signs of old EXL3 files (quantise again with a current exllamav3, which writes .suh and .svh)"},
        {".sv",
         "no packed signs of old EXL3 files (quantise again with a current exllamav3, which writes .suh and .svh)"},
        {".bias", "no bias (experts of this model have none)"},
        {".scale", "no scale of very old EXL3 files (quantise again)"},
    };
    for (const auto& [suffix, expected] : kRefused) {
      const auto at = checkpoint_.tensors().find(cat(p, suffix));
      if (at == checkpoint_.tensors().end()) continue;
      seen_.insert(at->first);
      find(at->first, at->second.file, cat(name(at->second.dtype), " ", shape_text(at->second.shape)), expected);
    }
  }

  void surplus() {
    for (const auto& [tensor, info] : checkpoint_.tensors())
      if (!seen_.contains(tensor) && !tensor.starts_with("model.visual."))
        find(tensor, info.file, cat(name(info.dtype), " ", shape_text(info.shape)), "no such tensor");
  }

  void report() const {
    if (count_ == 0) return;
    std::string out = cat(checkpoint_.dir(), ": ", count_, " tensors do not fit config.json:\n", join(findings_, "\n"));
    if (count_ > findings_.size()) out += cat("\n… and ", count_ - findings_.size(), " more");
    throw Error(Code::weights, out, "config.json and weights must belong to one revision; download the model again");
  }

  const Checkpoint& checkpoint_;
  std::set<std::string, std::less<>> seen_;
  std::vector<std::string> findings_;
  size_t count_ = 0;
};

/// Lists them as if they lay in one file, one behind the other.
class TensorList final : public ImpliedTensors {
 public:
  TensorList(const ModelConfig& config, int bits) : ImpliedTensors(config), bits_(bits) {}
  TensorTable list() {
    walk();
    return std::move(table_);
  }

 private:
  void expect(const std::string& tensor, Dtype dtype, const std::vector<int64_t>& shape) override {
    TensorInfo info{"", dtype, shape, at_, at_ + size_of(dtype)};
    for (const int64_t d : shape) info.end = info.begin + (info.end - info.begin) * static_cast<uint64_t>(d);
    at_ = info.end;
    table_.emplace(tensor, std::move(info));
  }
  void projection(const std::string& p, int64_t out, int64_t in) override {
    if (bits_ == 0) return expect(p + ".weight", Dtype::bf16, {out, in});
    expect(p + ".trellis", Dtype::i16, {in / kTile, out / kTile, kTile * bits_});
    expect(p + ".suh", Dtype::f16, {in});
    expect(p + ".svh", Dtype::f16, {out});
    expect(p + ".mcg", Dtype::i32, {1});
  }

  int bits_;
  uint64_t at_ = 0;
  TensorTable table_;
};

}  // namespace

void check_inventory(const Checkpoint& checkpoint, const ModelConfig& config) {
  Inventory(checkpoint, config).check();
}

bool has_exl3_experts(const Checkpoint& checkpoint) {
  for (const auto& [tensor, info] : checkpoint.tensors())
    if (tensor.ends_with(".trellis") && tensor.find(".mlp.experts.") != std::string::npos) return true;
  return false;
}

TensorTable implied_tensors(const ModelConfig& config, int bits) {
  if (bits < 0 || bits > 8) throw Error(Code::usage, cat("experts of ", bits, " bits"), "0 for bf16, or 1 to 8");
  return TensorList(config, bits).list();
}

}  // namespace glm53
