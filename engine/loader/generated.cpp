#include "engine/loader/generated.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <utility>

#include "common/digest.h"
#include "common/strings.h"
#include "engine/loader/safetensors.h"
#include "engine/loader/take_plan.h"
#include "engine/loader/weight_memory.h"
#include "kernels/half.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

constexpr size_t kPool = size_t{2} << 20;  // values before they repeat
constexpr int64_t kQuantisedRows = 64;     // rows before codes and scales repeat

/// Uniform in [−1, 1).
class Uniform {
 public:
  explicit Uniform(uint32_t seed) : random_(seed) {}
  float operator()() { return static_cast<float>(static_cast<int32_t>(random_())) * 0x1p-31F; }
  uint32_t bits() { return static_cast<uint32_t>(random_()); }

 private:
  std::mt19937 random_;
};

class GeneratedSource final : public WeightSource {
 public:
  GeneratedSource(const ModelConfig& config, const FormatPolicy& policy, Shard shard, Ops& ops,
                  GeneratedOptions options)
      : tensors_(implied_tensors(config, options.expert_bits)),
        planner_(tensors_, policy, shard),
        options_(options),
        memory_(ops) {}

  Weight take(std::string_view tensor, WeightGroup group, Split split) override {
    return take({{{std::string(tensor), split}}, group, false});
  }
  Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) override {
    return take({{parts.begin(), parts.end()}, group, true});
  }
  bool has(std::string_view tensor) const override { return planner_.has(tensor); }
  std::string digest() const override {
    return sha256_hex(cat("generated 1 ", planner_.shard().rank, "/", planner_.shard().size));
  }
  uint64_t bytes_taken() const override { return taken_; }

 private:
  Weight take(const Take& wanted) {
    const TakePlan plan = planner_.plan(wanted);
    if (!options_.keep) memory_.clear();
    Weight w = plan.weight;
    if (is_quantised(plan.to)) return quantised(plan);
    Tensor* const places[] = {&w.codes, &w.suh, &w.svh};
    for (size_t i = 0; i < plan.tensors.size(); ++i) {
      const PlannedTensor& t = plan.tensors[i];
      *places[i] = memory_.place(t.bytes(), t.dtype, t.shape);
      fill(*places[i], pool(t.dtype, w), plan.name);
    }
    return w;
  }

  /// Bytes that repeat from a place that the name decides.
  void fill(const Tensor& to, std::span<const std::byte> from, std::string_view tensor) {
    WeightMemory::Filler filler(memory_, to);
    const uint64_t hash = xxh64(std::as_bytes(std::span(tensor)));
    size_t at = static_cast<size_t>(hash % (from.size() / sizeof(float))) * sizeof(float);
    for (size_t left = to.bytes(); left > 0;) {
      const size_t n = std::min(left, from.size() - at);
      filler.append(from.subspan(at, n));
      left -= n;
      at = 0;
    }
    filler.finish();
    taken_ += to.bytes();
  }

  /// Values for a weight of that width: the output of a linear is about as large as its input. Vectors (norms, biases)
  /// are near one, scales of EXL3 near the inverse root of the width, its codes any bits.
  const std::vector<std::byte>& pool(Dtype dtype, const Weight& w) {
    const int64_t width = dtype == Dtype::i16 ? 0 : w.in;
    std::vector<std::byte>& bytes = pools_[{dtype, width}];
    if (!bytes.empty()) return bytes;
    bytes.resize(kPool * size_of(dtype));
    Uniform random(static_cast<uint32_t>(width) + 1);
    const float scale = w.in == 1 ? 0.1F : std::sqrt(3.0F / static_cast<float>(w.in)), middle = w.in == 1 ? 1.0F : 0.0F;
    for (size_t i = 0; i < kPool; ++i) {
      std::byte* to = bytes.data() + i * size_of(dtype);
      if (dtype == Dtype::f32) {
        const float v = middle + scale * random();
        std::memcpy(to, &v, sizeof v);
        continue;
      }
      uint16_t v = static_cast<uint16_t>(random.bits() >> 16);
      if (dtype == Dtype::bf16) v = f32_to_bf16(middle + scale * random());
      if (dtype == Dtype::f16)
        v = f32_to_f16((random() < 0 ? -1.0F : 1.0F) / std::sqrt(std::sqrt(static_cast<float>(w.in))));
      std::memcpy(to, &v, sizeof v);
    }
    return bytes;
  }

  Weight quantised(const TakePlan& plan) {
    const Weight& shape = plan.weight;
    const auto& [codes, scales] = quantised_rows(plan.to, shape.in);
    const int64_t code = code_bytes(plan.to, shape.out, shape.in), scale = scale_bytes(plan.to, shape.out, shape.in);
    const Tensor c = memory_.place(static_cast<size_t>(code), Dtype::u8, {code});
    const Tensor s = memory_.place(static_cast<size_t>(scale), Dtype::u8, {scale});
    fill(c, codes, plan.name);
    WeightMemory::Filler filler(memory_, s);  // from the begin, so that a scale stays whole
    for (auto left = static_cast<size_t>(scale); left > 0;) {
      const size_t n = std::min(left, scales.size());
      filler.append(std::span(scales).first(n));
      left -= n;
    }
    filler.finish();
    taken_ += static_cast<uint64_t>(scale);
    return quantised_weight(plan.to, shape.out, shape.in, c.data, s.data, c.place);
  }

  const std::pair<std::vector<std::byte>, std::vector<std::byte>>& quantised_rows(WeightFormat format, int64_t in) {
    auto& rows = quantised_[{format, in}];
    if (!rows.first.empty()) return rows;
    Uniform random(static_cast<uint32_t>(in) + 2);
    std::vector<float> values(static_cast<size_t>(kQuantisedRows * in));
    const float scale = std::sqrt(3.0F / static_cast<float>(in));
    for (float& v : values) v = scale * random();
    rows.first.resize(static_cast<size_t>(code_bytes(format, kQuantisedRows, in)));
    rows.second.resize(static_cast<size_t>(scale_bytes(format, kQuantisedRows, in)));
    quantise_rows(format, values.data(), kQuantisedRows, in, rows.first.data(), rows.second.data());
    return rows;
  }

  const TensorTable tensors_;
  TakePlanner planner_;
  GeneratedOptions options_;
  WeightMemory memory_;
  std::map<std::pair<Dtype, int64_t>, std::vector<std::byte>> pools_;
  std::map<std::pair<WeightFormat, int64_t>, std::pair<std::vector<std::byte>, std::vector<std::byte>>> quantised_;
  uint64_t taken_ = 0;
};

}  // namespace

std::unique_ptr<WeightSource> make_generated_source(const ModelConfig& config, const FormatPolicy& policy, Shard shard,
                                                    Ops& ops, GeneratedOptions options) {
  return std::make_unique<GeneratedSource>(config, policy, shard, ops, options);
}

}  // namespace glm53
