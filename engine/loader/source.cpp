#include "engine/loader/source.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <thread>
#include <unistd.h>
#include <utility>

#include <sys/mman.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"
#include "engine/loader/finite.h"
#include "engine/loader/take_plan.h"
#include "engine/loader/weight_memory.h"
#include "kernels/half.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

constexpr std::string_view kLayoutVersion = "checkpoint-source 1";
/// Bytes between two runs of a cut that are rather read than skipped: a skip makes another, small read.
constexpr uint64_t kSmallGap = uint64_t{64} << 10;

/// Gets a cut's bytes in the order in which they will lie.
using Sink = std::function<void(std::span<const std::byte>)>;

/// Tells the kernel that file pages are not wanted any more, so that loading does not hold the file beside the weights.
void drop_pages(const std::byte* data, size_t bytes) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  // Only a hint, on a clean read-only map: a refusal costs memory, not correctness.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

/// Calls use(begin, end) for each stretch of the file that is read for a cut.
template <class Use>
void for_each_extent(const Cut& cut, const Use& use) {
  if (cut.total() == 0) return;
  if (cut.rows == 1 || cut.pitch - cut.bytes <= kSmallGap) return use(cut.begin, cut.begin + cut.span());
  for (uint64_t r = 0; r < cut.rows; ++r) use(cut.begin + r * cut.pitch, cut.begin + r * cut.pitch + cut.bytes);
}

/// Hands on what of `bytes`, which lie at `at` in the file, belongs to the cut.
void emit(const Cut& cut, uint64_t at, std::span<const std::byte> bytes, const Sink& sink) {
  const uint64_t from = at - cut.begin, to = from + bytes.size(), pitch = std::max<uint64_t>(cut.pitch, 1);
  if (cut.rows == 1) return sink(bytes);
  for (uint64_t r = from / pitch; r < cut.rows && r * pitch < to; ++r) {
    const uint64_t low = std::max(from, r * pitch), high = std::min(to, r * pitch + cut.bytes);
    if (low < high) sink(bytes.subspan(low - from, high - low));
  }
}

/// Bytes of cuts in the order in which they will be asked for, read ahead.
class CutStream {
 public:
  CutStream(const Checkpoint& checkpoint, const TakePlanner& planner, const std::vector<Take>& takes,
            const ReadOptions& options) {
    std::map<std::string, size_t> places;
    std::vector<std::string> files;
    std::vector<FileBlock> blocks;
    const auto add = [&](const Cut& cut) {
      const std::string& file = checkpoint.info(cut.tensor).file;
      const auto [at, added] = places.emplace(file, files.size());
      if (added) files.push_back(cat(checkpoint.dir(), "/", file));
      for_each_extent(cut,
                      [&](uint64_t begin, uint64_t end) { append_blocks(blocks, at->second, begin, end, options); });
    };
    for (const Take& take : takes) {
      const TakePlan plan = planner.plan(take);
      for (const PlannedTensor& tensor : plan.tensors)
        for (const Cut& cut : tensor.cuts) add(cut);
      for (const PlannedMarker& marker : plan.markers) add(marker.cut);
    }
    reader_ = std::make_unique<BlockReader>(files, std::move(blocks), options);
  }

  void read(const Cut& cut, const Sink& sink) {
    for_each_extent(cut, [&](uint64_t begin, uint64_t end) {
      while (begin < end) {
        const auto bytes = reader_->next();
        emit(cut, begin, bytes, sink);
        begin += bytes.size();
      }
    });
  }

 private:
  std::unique_ptr<BlockReader> reader_;
};

class CheckpointSource final : public WeightSource {
 public:
  CheckpointSource(std::shared_ptr<const Checkpoint> checkpoint, const FormatPolicy& policy, Shard shard, Ops& ops,
                   SourceOptions options)
      : checkpoint_(std::move(checkpoint)),
        planner_(checkpoint_->tensors(), policy, shard),
        options_(std::move(options)),
        memory_(ops) {
    if (!options_.takes.empty())
      stream_ = std::make_unique<CutStream>(*checkpoint_, planner_, options_.takes, options_.read);
  }

  Weight take(std::string_view tensor, WeightGroup group, Split split) override {
    return take({{{std::string(tensor), split}}, group, false});
  }
  Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) override {
    return take({{parts.begin(), parts.end()}, group, true});
  }
  bool has(std::string_view tensor) const override { return planner_.has(tensor); }

  std::string digest() const override {
    const Shard shard = planner_.shard();
    std::string key = cat(kLayoutVersion, " ", checkpoint_->digest(), " ", shard.rank, "/", shard.size);
    for (const WeightFormat format : planner_.policy().of_group) key += cat(" ", static_cast<int>(format));
    return sha256_hex(key);
  }

  uint64_t bytes_taken() const override { return taken_; }

 private:
  Weight take(const Take& wanted) {
    check_format(wanted.group, planner_.policy().of(wanted.group));
    const TakePlan plan = planner_.plan(wanted);
    if (!options_.keep) memory_.clear();
    if (stream_ && !(options_.takes[taken_so_far_] == wanted)) stream_.reset();
    Weight w = plan.weight;
    if (is_quantised(plan.to)) {
      w = quantise(plan);
    } else {
      Tensor* const places[] = {&w.codes, &w.suh, &w.svh};
      for (size_t i = 0; i < plan.tensors.size(); ++i) *places[i] = copy_in(plan.tensors[i]);
    }
    for (const PlannedMarker& marker : plan.markers) check(marker);
    if (stream_ && ++taken_so_far_ == options_.takes.size()) stream_.reset();
    return w;
  }

  /// A planned tensor's bytes, looked at on their way where values are checked.
  void read(const PlannedTensor& planned, const Sink& sink) {
    for (const Cut& cut : planned.cuts) {
      if (!options_.check_values) {
        read(cut, sink);
        continue;
      }
      ValueCheck values(planned.dtype);
      read(cut, [&](std::span<const std::byte> bytes) {
        values.append(bytes);
        sink(bytes);
      });
      if (!values.ok())
        throw Error(Code::weights,
                    cat(layer_of(cut.tensor), cut.tensor, ": ", values.nan(), " NaN and ", values.infinite(),
                        " infinite values in this rank's part"),
                    "the checkpoint is damaged; glm53-engine check --check-weights lists all such tensors");
    }
  }

  void read(const Cut& cut, const Sink& sink) {
    if (stream_) return stream_->read(cut, sink);
    if (cut.total() == 0) return;
    const std::byte* data = checkpoint_->bytes(cut.tensor).data() + (cut.begin - checkpoint_->info(cut.tensor).begin);
    for (uint64_t r = 0; r < cut.rows; ++r) sink({data + r * cut.pitch, cut.bytes});
    drop_pages(data, cut.span());
  }

  /// Rows of the cuts in another format, converted by all processors.
  Weight quantise(const TakePlan& plan) {
    const WeightFormat format = plan.to;
    const Weight& shape = plan.weight;
    const PlannedTensor& planned = plan.tensors.front();
    const Dtype dtype = planned.dtype;
    std::vector<std::byte> stored(planned.bytes());
    size_t at = 0;
    read(planned, [&](std::span<const std::byte> bytes) {
      std::memcpy(stored.data() + at, bytes.data(), bytes.size());
      at += bytes.size();
    });
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
      throw Error(e.code(), cat(plan.name, ": ", e.what()), e.remedy());
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
  Tensor put(std::span<const std::byte> bytes) {
    const Tensor to = memory_.place(bytes.size(), Dtype::u8, {static_cast<int64_t>(bytes.size())});
    WeightMemory::Filler filler(memory_, to);
    filler.append(bytes);
    filler.finish();
    taken_ += bytes.size();
    return to;
  }

  Tensor copy_in(const PlannedTensor& planned) {
    const Tensor to = memory_.place(planned.bytes(), planned.dtype, planned.shape);
    WeightMemory::Filler filler(memory_, to);
    read(planned, [&](std::span<const std::byte> bytes) { filler.append(bytes); });
    filler.finish();
    taken_ += planned.bytes();
    return to;
  }

  void check(const PlannedMarker& marker) {
    uint32_t found = 0;
    size_t at = 0;
    read(marker.cut, [&](std::span<const std::byte> bytes) {
      std::memcpy(reinterpret_cast<std::byte*>(&found) + at, bytes.data(), bytes.size());
      at += bytes.size();
    });
    if (found != marker.expected)
      throw Error(Code::weights, cat(marker.cut.tensor, ": holds ", found),
                  cat("the marker of this codebook is ", marker.expected));
  }

  std::shared_ptr<const Checkpoint> checkpoint_;
  TakePlanner planner_;
  SourceOptions options_;
  WeightMemory memory_;
  std::unique_ptr<CutStream> stream_;
  size_t taken_so_far_ = 0;
  uint64_t taken_ = 0;
};

}  // namespace

std::unique_ptr<WeightSource> make_checkpoint_source(std::shared_ptr<const Checkpoint> checkpoint,
                                                     const FormatPolicy& policy, Shard shard, Ops& ops,
                                                     SourceOptions options) {
  return std::make_unique<CheckpointSource>(std::move(checkpoint), policy, shard, ops, std::move(options));
}

std::unique_ptr<WeightSource> open_checkpoint(const std::string& dir, const FormatPolicy& policy, Shard shard,
                                              Ops& ops) {
  return make_checkpoint_source(std::make_shared<const Checkpoint>(dir), policy, shard, ops);
}

}  // namespace glm53
