#include "engine/loader/take_plan.h"

#include <algorithm>

#include "common/error.h"
#include "common/strings.h"
#include "engine/loader/source.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

constexpr int64_t kTile = 16, kHadamard = 128;
constexpr uint32_t kMcgMarker = 0xCBAC1FEDu, kMul1Marker = 0x83DCD12Du;

std::string_view stem_of(std::string_view tensor) {
  for (const std::string_view suffix : {".weight", ".trellis"})
    if (tensor.ends_with(suffix)) return tensor.substr(0, tensor.size() - suffix.size());
  return tensor;
}

/// [out, in] of a plain tensor; dimensions after the first are one, so conv1d [C,1,4] is [C,4] and a vector [n,1].
std::pair<int64_t, int64_t> plain_shape(const TensorInfo& info) {
  int64_t in = 1;
  for (size_t i = 1; i < info.shape.size(); ++i) in *= info.shape[i];
  return {info.shape.empty() ? 1 : info.shape[0], in};
}

}  // namespace

/// [begin, end) of `whole` for a rank.
struct TakePlanner::Range {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

uint64_t PlannedTensor::bytes() const {
  uint64_t bytes = 0;
  for (const Cut& c : cuts) bytes += c.total();
  return bytes;
}

bool operator==(const Take& a, const Take& b) {
  return a.group == b.group && a.stacked == b.stacked &&
         std::equal(a.parts.begin(), a.parts.end(), b.parts.begin(), b.parts.end(),
                    [](const StackPart& x, const StackPart& y) { return x.name == y.name && x.split == y.split; });
}

Weight TakeRecorder::take(std::string_view name, WeightGroup group, Split split) {
  takes_.push_back({{{std::string(name), split}}, group, false});
  return {};
}
Weight TakeRecorder::take_stacked(std::span<const StackPart> parts, WeightGroup group) {
  takes_.push_back({{parts.begin(), parts.end()}, group, true});
  return {};
}

void check_format(WeightGroup group, WeightFormat format) {
  const bool stored = format == WeightFormat::f32 || format == WeightFormat::bf16 || format == WeightFormat::exl3;
  const bool linear = group != WeightGroup::routed_expert && group != WeightGroup::exact;
  if (!stored && !(linear && is_quantised(format)))
    throw Error(Code::unavailable, cat("weight group ", name(group), " cannot be converted to the format asked for"),
                "keep it as stored");
}

TakePlanner::TakePlanner(const TensorTable& tensors, const FormatPolicy& policy, Shard shard)
    : tensors_(tensors), policy_(policy), shard_(shard) {
  if (shard.size < 1 || shard.rank < 0 || shard.rank >= shard.size)
    throw Error(Code::internal, cat("weight source of rank ", shard.rank, " of ", shard.size));
  for (int g = 0; g < kWeightGroups; ++g) {
    const auto group = static_cast<WeightGroup>(g);
    check_format(group, policy_.of(group));
  }
}

TakePlan TakePlanner::plan(const Take& take) const {
  if (take.stacked) {
    if (take.parts.empty()) throw Error(Code::internal, "take_stacked: no parts");
    for (const StackPart& part : take.parts)
      if (part.split == Split::columns)
        throw Error(Code::internal, cat("take_stacked: ", part.name, " is split by columns"));
    return plain(take.parts, take.group);
  }
  const auto& [tensor, split] = take.parts.at(0);
  const std::string_view stem = stem_of(tensor);
  if (tensors_.contains(cat(stem, ".trellis"))) return packed(stem, split);
  return plain({{tensors_.contains(tensor) ? tensor : cat(stem, ".weight"), split}}, take.group);
}

const TensorInfo& TakePlanner::info(std::string_view tensor) const {
  const auto at = tensors_.find(tensor);
  if (at == tensors_.end()) throw Error(Code::weights, cat("no tensor ", tensor));
  return at->second;
}

bool TakePlanner::has(std::string_view tensor) const {
  const std::string_view stem = stem_of(tensor);
  return tensors_.contains(tensor) || tensors_.contains(cat(stem, ".trellis")) ||
         tensors_.contains(cat(stem, ".weight"));
}

TakePlanner::Range TakePlanner::range_of(int64_t whole, Split split, Split along, int64_t multiple,
                                         std::string_view tensor) const {
  if (split != along) return {0, whole};
  const int64_t part = whole / shard_.size;
  if (whole % shard_.size != 0 || part % multiple != 0)
    throw Error(Code::weights,
                cat(tensor, ": ", whole, split == Split::rows ? " rows" : " columns", " cannot be cut into ",
                    shard_.size, " parts", multiple > 1 ? cat(" of a multiple of ", multiple) : std::string()),
                "use a number of ranks that divides the model");
  return {part * shard_.rank, part * (shard_.rank + 1)};
}

/// Rows and columns of a [·, width] matrix.
Cut TakePlanner::cut(const std::string& tensor, uint64_t width, Range rows, Range columns, size_t element) const {
  const uint64_t pitch = width * element, bytes = static_cast<uint64_t>(columns.size()) * element;
  const uint64_t begin =
      info(tensor).begin + static_cast<uint64_t>(rows.begin) * pitch + static_cast<uint64_t>(columns.begin) * element;
  if (bytes == pitch) return {tensor, begin, 1, static_cast<uint64_t>(rows.size()) * pitch, 0};
  return {tensor, begin, static_cast<uint64_t>(rows.size()), bytes, pitch};
}

TakePlan TakePlanner::plain(const std::vector<StackPart>& parts, WeightGroup group) const {
  TakePlan plan;
  plan.name = parts.front().name;
  Weight& w = plan.weight;
  PlannedTensor codes;
  for (const StackPart& part : parts) {
    const TensorInfo& found = info(part.name);
    if (found.dtype != Dtype::f32 && found.dtype != Dtype::bf16)
      throw Error(Code::weights, cat(part.name, ": stored as ", glm53::name(found.dtype)), "expected f32 or bf16");
    const auto [out, in] = plain_shape(found);
    const Range rows = range_of(out, part.split, Split::rows, 1, part.name);
    const Range columns = range_of(in, part.split, Split::columns, 1, part.name);
    if (!codes.cuts.empty() && (w.in != columns.size() || found.dtype != codes.dtype))
      throw Error(Code::weights, cat(part.name, ": ", glm53::name(found.dtype), " of width ", in,
                                     " cannot be stacked with ", plan.name));
    codes.dtype = found.dtype;
    w.in = columns.size();
    w.out += rows.size();
    codes.cuts.push_back(cut(part.name, static_cast<uint64_t>(in), rows, columns, size_of(found.dtype)));
  }
  w.format = codes.dtype == Dtype::f32 ? WeightFormat::f32 : WeightFormat::bf16;
  plan.to = is_quantised(policy_.of(group)) ? policy_.of(group) : w.format;
  if (is_quantised(plan.to) && w.in % kQuantGroup != 0)
    throw Error(Code::weights,
                cat(plan.name, ": ", w.in, " inputs on this rank, quantised formats need a multiple of ", kQuantGroup),
                "keep this group of weights as stored");
  codes.shape = {w.out, w.in};
  plan.tensors.push_back(std::move(codes));
  return plan;
}

/// EXL3 (spec exl3 §3): outputs are tile columns and svh, inputs are tile rows and suh.
TakePlan TakePlanner::packed(std::string_view stem, Split split) const {
  for (const char* legacy : {".su", ".sv", ".bias", ".scale"})
    if (tensors_.contains(cat(stem, legacy)))
      throw Error(Code::weights, cat(stem, legacy, ": this form of EXL3 is not supported"),
                  "quantise again with a current exllamav3");
  const std::string trellis = cat(stem, ".trellis"), suh = cat(stem, ".suh"), svh = cat(stem, ".svh");
  const TensorInfo& found = info(trellis);
  if (found.dtype != Dtype::i16 || found.shape.size() != 3 || found.shape[2] % kTile != 0 || found.shape[2] < kTile ||
      found.shape[2] > 8 * kTile)
    throw Error(Code::weights, cat(trellis, ": not i16 [in/16, out/16, 16 × 1 to 8 bits]"));
  const int64_t in = found.shape[0] * kTile, out = found.shape[1] * kTile, words = found.shape[2];
  if (in % kHadamard != 0 || out % kHadamard != 0)
    throw Error(Code::weights, cat(trellis, ": ", out, " × ", in), "EXL3 needs multiples of 128");
  expect_scales(suh, in);
  expect_scales(svh, out);
  const Range outs = range_of(out, split, Split::rows, kHadamard, stem);
  const Range ins = range_of(in, split, Split::columns, kHadamard, stem);
  const Range tile_rows{ins.begin / kTile, ins.end / kTile};
  const Range tile_columns{outs.begin / kTile * words, outs.end / kTile * words};

  TakePlan plan;
  plan.name = stem;
  plan.to = plan.weight.format = WeightFormat::exl3;
  plan.weight.out = outs.size();
  plan.weight.in = ins.size();
  plan.weight.bits = static_cast<int>(words / kTile);
  plan.weight.codebook = markers(stem, plan.markers);
  const auto width = static_cast<uint64_t>(found.shape[1] * words);
  plan.tensors = {{{cut(trellis, width, tile_rows, tile_columns, sizeof(int16_t))},
                   Dtype::i16,
                   {ins.size() / kTile, outs.size() / kTile, words}},
                  {{cut(suh, 1, ins, {0, 1}, sizeof(uint16_t))}, Dtype::f16, {ins.size()}},
                  {{cut(svh, 1, outs, {0, 1}, sizeof(uint16_t))}, Dtype::f16, {outs.size()}}};
  return plan;
}

void TakePlanner::expect_scales(const std::string& tensor, int64_t n) const {
  const TensorInfo& found = info(tensor);
  if (found.dtype != Dtype::f16 || found.shape != std::vector<int64_t>{n})
    throw Error(Code::weights, cat(tensor, ": not f16 [", n, "]"), "trellis and scales must belong together");
}

Codebook TakePlanner::markers(std::string_view stem, std::vector<PlannedMarker>& out) const {
  const auto marked = [&](std::string_view suffix, uint32_t expected) {
    const std::string tensor = cat(stem, suffix);
    if (!tensors_.contains(tensor)) return false;
    const TensorInfo& found = info(tensor);
    if (found.end - found.begin != sizeof expected)
      throw Error(Code::weights, cat(tensor, ": ", found.end - found.begin, " bytes"),
                  cat("the marker of this codebook is ", expected));
    out.push_back({{tensor, found.begin, 1, sizeof expected, 0}, expected});
    return true;
  };
  const bool mcg = marked(".mcg", kMcgMarker), mul1 = marked(".mul1", kMul1Marker);
  if (mcg && mul1)
    throw Error(Code::weights, cat(stem, ": both .mcg and .mul1 are there"), "at most one codebook marker");
  return mcg ? Codebook::mcg : mul1 ? Codebook::mul1 : Codebook::three_inst;
}

}  // namespace glm53
