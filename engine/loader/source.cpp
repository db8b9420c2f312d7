#include "engine/loader/source.h"

#include <algorithm>
#include <cstring>
#include <future>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <sys/mman.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"
#include "kernels/half.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

constexpr size_t kSlab = size_t{4} << 20;           // small tensors share allocations of this size
constexpr size_t kOwnAllocation = size_t{1} << 20;  // larger tensors have their own
constexpr size_t kAlign = 256;
constexpr int64_t kTile = 16, kHadamard = 128;
constexpr uint32_t kMcgMarker = 0xCBAC1FEDu, kMul1Marker = 0x83DCD12Du;
constexpr std::string_view kLayoutVersion = "checkpoint-source 1";

/// Bytes of a tensor cut for one rank: `rows` runs of `bytes` each, `pitch` apart in the file. A row cut is one run.
struct Cut {
  const std::byte* from = nullptr;
  size_t rows = 0, bytes = 0, pitch = 0;
  size_t total() const { return rows * bytes; }
};

/// [begin, end) of `whole` for a rank.
struct Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

/// Tells the kernel that file pages are not wanted any more, so that loading does not hold the file beside the weights.
void drop_pages(const std::byte* data, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  // Only a hint, on a clean read-only map: a refusal costs memory, not correctness.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

class CheckpointSource final : public WeightSource {
 public:
  CheckpointSource(std::shared_ptr<const Checkpoint> checkpoint, const FormatPolicy& policy, Shard shard, Ops& ops)
      : checkpoint_(std::move(checkpoint)), policy_(policy), shard_(shard), ops_(ops) {
    if (shard.size < 1 || shard.rank < 0 || shard.rank >= shard.size)
      throw Error(Code::internal, cat("weight source of rank ", shard.rank, " of ", shard.size));
    for (int g = 0; g < kWeightGroups; ++g) check_format(static_cast<WeightGroup>(g));
  }

  Weight take(std::string_view tensor, WeightGroup group, Split split) override {
    check_format(group);
    const std::string_view stem = stem_of(tensor);
    if (checkpoint_->has(cat(stem, ".trellis"))) return take_packed(stem, split);
    const std::string plain = checkpoint_->has(tensor) ? std::string(tensor) : cat(stem, ".weight");
    return take_plain({{plain, split}}, group);
  }

  Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) override {
    check_format(group);
    if (parts.empty()) throw Error(Code::internal, "take_stacked: no parts");
    for (const StackPart& part : parts)
      if (part.split == Split::columns)
        throw Error(Code::internal, cat("take_stacked: ", part.name, " is split by columns"));
    return take_plain({parts.begin(), parts.end()}, group);
  }

  bool has(std::string_view tensor) const override {
    const std::string_view stem = stem_of(tensor);
    return checkpoint_->has(tensor) || checkpoint_->has(cat(stem, ".trellis")) ||
           checkpoint_->has(cat(stem, ".weight"));
  }

  std::string digest() const override {
    std::string key = cat(kLayoutVersion, " ", checkpoint_->digest(), " ", shard_.rank, "/", shard_.size);
    for (const WeightFormat format : policy_.of_group) key += cat(" ", static_cast<int>(format));
    return sha256_hex(key);
  }

  uint64_t bytes_taken() const override { return taken_; }

 private:
  static std::string_view stem_of(std::string_view tensor) {
    for (const std::string_view suffix : {".weight", ".trellis"})
      if (tensor.ends_with(suffix)) return tensor.substr(0, tensor.size() - suffix.size());
    return tensor;
  }

  /// As stored, or a quantised form of weights that only linears use.
  void check_format(WeightGroup group) const {
    const WeightFormat format = policy_.of(group);
    const bool stored = format == WeightFormat::f32 || format == WeightFormat::bf16 || format == WeightFormat::exl3;
    const bool linear = group != WeightGroup::routed_expert && group != WeightGroup::exact;
    if (!stored && !(linear && is_quantised(format)))
      throw Error(Code::unavailable, cat("weight group ", name(group), " cannot be converted to the format asked for"),
                  "keep it as stored");
  }

  Range range_of(int64_t whole, Split split, Split along, int64_t multiple, std::string_view tensor) const {
    if (split != along) return {0, whole};
    const int64_t part = whole / shard_.size;
    if (whole % shard_.size != 0 || part % multiple != 0)
      throw Error(Code::weights,
                  cat(tensor, ": ", whole, split == Split::rows ? " rows" : " columns", " cannot be cut into ",
                      shard_.size, " parts", multiple > 1 ? cat(" of a multiple of ", multiple) : std::string()),
                  "use a number of ranks that divides the model");
    return {part * shard_.rank, part * (shard_.rank + 1)};
  }

  /// [out, in] of a plain tensor; dimensions after the first are one, so conv1d [C,1,4] is [C,4] and a vector [n,1].
  static std::pair<int64_t, int64_t> plain_shape(const TensorInfo& info) {
    int64_t in = 1;
    for (size_t i = 1; i < info.shape.size(); ++i) in *= info.shape[i];
    return {info.shape.empty() ? 1 : info.shape[0], in};
  }

  Weight take_plain(const std::vector<StackPart>& parts, WeightGroup group) {
    Weight w;
    Dtype dtype{};
    std::vector<Cut> cuts;
    for (const StackPart& part : parts) {
      const TensorInfo& info = checkpoint_->info(part.name);
      if (info.dtype != Dtype::f32 && info.dtype != Dtype::bf16)
        throw Error(Code::weights, cat(part.name, ": stored as ", name(info.dtype)), "expected f32 or bf16");
      const auto [out, in] = plain_shape(info);
      const Range rows = range_of(out, part.split, Split::rows, 1, part.name);
      const Range columns = range_of(in, part.split, Split::columns, 1, part.name);
      if (!cuts.empty() && (w.in != columns.size() || info.dtype != dtype))
        throw Error(Code::weights, cat(part.name, ": ", name(info.dtype), " of width ", in, " cannot be stacked with ",
                                       parts.front().name));
      dtype = info.dtype;
      w.in = columns.size();
      w.out += rows.size();
      cuts.push_back(cut(part.name, static_cast<size_t>(in), rows, columns, size_of(dtype)));
    }
    if (is_quantised(policy_.of(group))) return quantise(parts.front().name, policy_.of(group), cuts, dtype, w);
    w.format = dtype == Dtype::f32 ? WeightFormat::f32 : WeightFormat::bf16;
    w.codes = copy_in(cuts, dtype, {w.out, w.in});
    return w;
  }

  /// Rows of the cuts in another format, converted by all processors.
  Weight quantise(const std::string& tensor, WeightFormat format, const std::vector<Cut>& cuts, Dtype dtype,
                  const Weight& shape) {
    if (shape.in % kQuantGroup != 0)
      throw Error(
          Code::weights,
          cat(tensor, ": ", shape.in, " inputs on this rank, quantised formats need a multiple of ", kQuantGroup),
          "keep this group of weights as stored");
    std::vector<std::byte> stored(static_cast<size_t>(shape.out * shape.in) * size_of(dtype));
    gather(cuts, stored.data());
    const int64_t code_row = code_bytes(format, 1, shape.in), scale_row = scale_bytes(format, 1, shape.in);
    std::vector<std::byte> codes(static_cast<size_t>(shape.out * code_row)),
        scales(static_cast<size_t>(shape.out * scale_row));
    const auto convert = [&](int64_t begin, int64_t end) {
      std::vector<float> values(static_cast<size_t>(shape.in));
      for (int64_t row = begin; row < end; ++row) {
        widen(stored.data() + static_cast<size_t>(row * shape.in) * size_of(dtype), dtype, values);
        quantise_rows(format, values.data(), 1, shape.in, codes.data() + row * code_row,
                      scales.data() + row * scale_row);
      }
    };
    const auto workers = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, shape.out);
    std::vector<std::future<void>> parts;
    for (int64_t i = 0; i < workers; ++i)
      parts.push_back(std::async(std::launch::async, convert, shape.out * i / workers, shape.out * (i + 1) / workers));
    for (auto& part : parts) part.wait();
    try {
      for (auto& part : parts) part.get();
    } catch (const Error& e) {
      throw Error(e.code(), cat(tensor, ": ", e.what()), e.remedy());
    }
    const Tensor c = put(codes), s = put(scales);
    return quantised_weight(format, shape.out, shape.in, c.data, s.data, c.place);
  }

  static void widen(const std::byte* from, Dtype dtype, std::vector<float>& to) {
    if (dtype == Dtype::f32) {
      std::memcpy(to.data(), from, to.size() * sizeof(float));
      return;
    }
    for (size_t i = 0; i < to.size(); ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
      to[i] = bf16_to_f32(bits);
    }
  }

  /// Bytes that are there, in memory of the backend.
  Tensor put(std::vector<std::byte>& bytes) {
    const auto n = static_cast<int64_t>(bytes.size());
    const Tensor to = place(bytes.size(), Dtype::u8, {n});
    ops_.copy(to, Tensor::of(bytes.data(), Dtype::u8, {n}));
    ops_.synchronize();
    taken_ += bytes.size();
    return to;
  }

  /// Rows and columns of a [·, width] matrix.
  Cut cut(const std::string& tensor, size_t width, Range rows, Range columns, size_t element) const {
    const std::byte* data = checkpoint_->bytes(tensor).data();
    const size_t pitch = width * element, bytes = static_cast<size_t>(columns.size()) * element;
    data += static_cast<size_t>(rows.begin) * pitch + static_cast<size_t>(columns.begin) * element;
    if (bytes == pitch) return {data, 1, static_cast<size_t>(rows.size()) * pitch, 0};
    return {data, static_cast<size_t>(rows.size()), bytes, pitch};
  }

  /// EXL3 (spec exl3 §3): outputs are tile columns and svh, inputs are tile rows and suh.
  Weight take_packed(std::string_view stem, Split split) {
    for (const char* legacy : {".su", ".sv", ".bias", ".scale"})
      if (checkpoint_->has(cat(stem, legacy)))
        throw Error(Code::weights, cat(stem, legacy, ": this form of EXL3 is not supported"),
                    "quantise again with a current exllamav3");
    const std::string trellis = cat(stem, ".trellis"), suh = cat(stem, ".suh"), svh = cat(stem, ".svh");
    const TensorInfo& info = checkpoint_->info(trellis);
    if (info.dtype != Dtype::i16 || info.shape.size() != 3 || info.shape[2] % kTile != 0 || info.shape[2] < kTile ||
        info.shape[2] > 8 * kTile)
      throw Error(Code::weights, cat(trellis, ": not i16 [in/16, out/16, 16 × 1 to 8 bits]"));
    const int64_t in = info.shape[0] * kTile, out = info.shape[1] * kTile, words = info.shape[2];
    if (in % kHadamard != 0 || out % kHadamard != 0)
      throw Error(Code::weights, cat(trellis, ": ", out, " × ", in), "EXL3 needs multiples of 128");
    expect_scales(suh, in);
    expect_scales(svh, out);
    const Range outs = range_of(out, split, Split::rows, kHadamard, stem);
    const Range ins = range_of(in, split, Split::columns, kHadamard, stem);
    const Range tile_rows{ins.begin / kTile, ins.end / kTile};
    const Range tile_columns{outs.begin / kTile * words, outs.end / kTile * words};

    Weight w;
    w.format = WeightFormat::exl3;
    w.out = outs.size();
    w.in = ins.size();
    w.bits = static_cast<int>(words / kTile);
    w.codebook = codebook_of(stem);
    const auto width = static_cast<size_t>(info.shape[1] * words);
    w.codes = copy_in({cut(trellis, width, tile_rows, tile_columns, sizeof(int16_t))}, Dtype::i16,
                      {ins.size() / kTile, outs.size() / kTile, words});
    w.suh = copy_in({cut(suh, 1, ins, {0, 1}, sizeof(uint16_t))}, Dtype::f16, {ins.size()});
    w.svh = copy_in({cut(svh, 1, outs, {0, 1}, sizeof(uint16_t))}, Dtype::f16, {outs.size()});
    return w;
  }

  void expect_scales(const std::string& tensor, int64_t n) const {
    const TensorInfo& info = checkpoint_->info(tensor);
    if (info.dtype != Dtype::f16 || info.shape != std::vector<int64_t>{n})
      throw Error(Code::weights, cat(tensor, ": not f16 [", n, "]"), "trellis and scales must belong together");
  }

  Codebook codebook_of(std::string_view stem) const {
    const bool mcg = has_marker(cat(stem, ".mcg"), kMcgMarker), mul1 = has_marker(cat(stem, ".mul1"), kMul1Marker);
    if (mcg && mul1)
      throw Error(Code::weights, cat(stem, ": both .mcg and .mul1 are there"), "at most one codebook marker");
    return mcg ? Codebook::mcg : mul1 ? Codebook::mul1 : Codebook::three_inst;
  }

  bool has_marker(const std::string& tensor, uint32_t expected) const {
    if (!checkpoint_->has(tensor)) return false;
    const auto data = checkpoint_->bytes(tensor);
    uint32_t found = 0;
    if (data.size() == sizeof found) std::memcpy(&found, data.data(), sizeof found);
    if (found != expected)
      throw Error(Code::weights, cat(tensor, ": holds ", found), cat("the marker of this codebook is ", expected));
    return true;
  }

  Tensor copy_in(const std::vector<Cut>& cuts, Dtype dtype, std::initializer_list<int64_t> shape) {
    size_t bytes = 0;
    for (const Cut& c : cuts) bytes += c.total();
    const Tensor to = place(bytes, dtype, shape);
    if (to.place == Place::device) {
      Buffer staging = ops_.allocate(std::max<size_t>(bytes, 1), Place::pinned);
      gather(cuts, staging.data());
      ops_.copy(to, staging.view(dtype, shape));
      ops_.synchronize();
    } else {
      gather(cuts, static_cast<std::byte*>(to.data));
    }
    taken_ += bytes;
    return to;
  }

  static void gather(const std::vector<Cut>& cuts, std::byte* to) {
    for (const Cut& c : cuts) {
      for (size_t r = 0; r < c.rows; ++r) {
        if (c.bytes != 0) std::memcpy(to, c.from + r * c.pitch, c.bytes);
        to += c.bytes;
      }
      if (c.rows != 0) drop_pages(c.from, (c.rows - 1) * c.pitch + c.bytes);
    }
  }

  Tensor place(size_t bytes, Dtype dtype, std::initializer_list<int64_t> shape) {
    if (bytes >= kOwnAllocation) {
      buffers_.push_back(ops_.allocate(bytes, Place::device));
      return buffers_.back().view(dtype, shape);
    }
    const size_t padded = (bytes + kAlign - 1) / kAlign * kAlign;
    if (slabs_.empty() || slab_used_ + padded > kSlab) {
      slabs_.push_back(ops_.allocate(kSlab, Place::device));
      slab_used_ = 0;
    }
    const Tensor t = slabs_.back().view(dtype, shape, slab_used_);
    slab_used_ += padded;
    return t;
  }

  std::shared_ptr<const Checkpoint> checkpoint_;
  FormatPolicy policy_;
  Shard shard_;
  Ops& ops_;
  std::vector<Buffer> buffers_, slabs_;
  size_t slab_used_ = 0;
  uint64_t taken_ = 0;
};

}  // namespace

std::string_view name(WeightGroup group) {
  constexpr std::array<std::string_view, kWeightGroups> kNames = {
      "kda_in", "kda_out", "mla", "indexer", "shared_expert", "dense_mlp", "routed_expert", "head", "drafter", "exact"};
  return kNames[static_cast<size_t>(group)];
}

std::unique_ptr<WeightSource> make_checkpoint_source(std::shared_ptr<const Checkpoint> checkpoint,
                                                     const FormatPolicy& policy, Shard shard, Ops& ops) {
  return std::make_unique<CheckpointSource>(std::move(checkpoint), policy, shard, ops);
}

std::unique_ptr<WeightSource> open_checkpoint(const std::string& dir, const FormatPolicy& policy, Shard shard,
                                              Ops& ops) {
  return make_checkpoint_source(std::make_shared<const Checkpoint>(dir), policy, shard, ops);
}

}  // namespace glm53
