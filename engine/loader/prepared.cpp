#include "engine/loader/prepared.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/loader/finite.h"
#include "engine/loader/prepared_manifest.h"
#include "engine/loader/weight_memory.h"

namespace glm53 {
namespace {

constexpr std::string_view kRemedy =
    "make it with glm53-engine prepare (docs/weights.md), or empty model.prepared to convert while loading";

Error refused(const std::string& dir, const std::string& why) {
  return {Code::weights, cat("prepared weights in '", dir, "': ", why), std::string(kRemedy)};
}

/// True for the tensors of which some bytes are in the sample: all outside the experts, and each layer's first expert.
bool sampled(std::string_view tensor) {
  return tensor.find(".experts.") == std::string_view::npos || tensor.find(".experts.0.") != std::string_view::npos;
}

}  // namespace

PreparedKey prepared_key(const Checkpoint& checkpoint, const std::string& config_digest, const FormatPolicy& formats,
                         Shard shard) {
  constexpr size_t kSample = 64;
  Sha256 sample;
  for (const auto& [tensor, info] : checkpoint.tensors()) {
    if (!sampled(tensor)) continue;
    const auto bytes = checkpoint.bytes(tensor);
    const auto middle = bytes.subspan((bytes.size() - std::min(bytes.size(), kSample)) / 2);
    const auto some = middle.first(std::min(middle.size(), kSample));
    sample.update({reinterpret_cast<const char*>(some.data()), some.size()});
  }
  return {config_digest, checkpoint.digest(), sample.hex(), formats, shard};
}

std::string prepared_folder(Shard shard) {
  return cat("rank", shard.rank, "of", shard.size);
}

/// The file `weights` while it is being written, under another name.
struct PreparedWriter::Impl {
  Impl(std::string folder, const PreparedKey& key, FileOps& with)
      : dir(std::move(folder)), manifest(manifest_of(key)), ops(with) {
    make_dirs(dir);
    const std::string old = cat(dir, "/", kPreparedManifest);
    if (ops.unlink(old.c_str()) != 0 && errno != ENOENT)
      throw_errno(Code::unavailable, cat("cannot remove '", old, "'"));
    temporary = cat(dir, "/", kPreparedData, ".", random_hex(6), ".tmp");
    fd = UniqueFd(ops.open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!fd) throw_errno(Code::unavailable, cat("cannot write '", temporary, "'"));
    chunk.reserve(kPreparedChunk);
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (!temporary.empty()) (void)ops.unlink(temporary.c_str());  // nothing can be done about a failure
  }

  void write(const Take& take, Weight w) {
    PreparedWeight entry;
    entry.take = take;
    for (const Tensor* t : tensors_of(w)) {
      if (t->place == Place::device) throw Error(Code::internal, "weights to be prepared lie in device memory");
      align();
      PreparedTensor placed;
      placed.dtype = t->dtype;
      placed.shape.assign(t->shape.begin(), t->shape.begin() + t->rank);
      placed.begin = manifest.bytes;
      entry.tensors.push_back(std::move(placed));
      append({static_cast<const std::byte*>(t->data), t->bytes()});
    }
    entry.weight = w;
    manifest.weights.push_back(std::move(entry));
  }

  void align() {
    static constexpr std::byte kZero[kPreparedAlign] = {};
    append({kZero, static_cast<size_t>((kPreparedAlign - manifest.bytes % kPreparedAlign) % kPreparedAlign)});
  }

  void append(std::span<const std::byte> bytes) {
    manifest.bytes += bytes.size();
    while (!bytes.empty()) {
      const size_t n = std::min<size_t>(bytes.size(), kPreparedChunk - chunk.size());
      chunk.insert(chunk.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n));
      bytes = bytes.subspan(n);
      if (chunk.size() == kPreparedChunk) flush();
    }
  }

  void flush() {
    if (chunk.empty()) return;
    for (size_t done = 0; done < chunk.size();) {
      const ssize_t n = ops.write(fd.get(), chunk.data() + done, chunk.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw_errno(Code::unavailable, cat("cannot write '", temporary, "'"));
      done += static_cast<size_t>(n);
    }
    manifest.sums.push_back(xxh64(chunk));
    chunk.clear();
    constexpr size_t kSyncEvery = 64;
    if (manifest.sums.size() % kSyncEvery != 0) return;
    // Written pages would push out what the machine needs.
    if (ops.fdatasync(fd.get()) != 0) throw_errno(Code::unavailable, cat("cannot write '", temporary, "'"));
    (void)posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }

  void finish() {
    flush();
    if (ops.fsync(fd.get()) != 0) throw_errno(Code::unavailable, cat("cannot write '", temporary, "'"));
    fd.reset();
    const std::string data = cat(dir, "/", kPreparedData);
    if (ops.rename(temporary.c_str(), data.c_str()) != 0)
      throw_errno(Code::unavailable, cat("cannot replace '", data, "'"));
    temporary.clear();
    write_file(cat(dir, "/", kPreparedManifest), write_manifest(manifest), 0644, ops);
  }

  std::string dir, temporary;
  PreparedManifest manifest;
  FileOps& ops;
  UniqueFd fd;
  std::vector<std::byte> chunk;
};

PreparedWriter::PreparedWriter(std::string dir, PreparedKey key, WeightSource& from, FileOps& ops)
    : from_(from), impl_(std::make_unique<Impl>(std::move(dir), key, ops)) {}
PreparedWriter::~PreparedWriter() = default;

Weight PreparedWriter::take(std::string_view name, WeightGroup group, Split split) {
  Weight w = from_.take(name, group, split);
  impl_->write({{{std::string(name), split}}, group, false}, w);
  return w;
}

Weight PreparedWriter::take_stacked(std::span<const StackPart> parts, WeightGroup group) {
  Weight w = from_.take_stacked(parts, group);
  impl_->write({{parts.begin(), parts.end()}, group, true}, w);
  return w;
}

void PreparedWriter::finish() {
  impl_->finish();
}

namespace {

class PreparedSource final : public WeightSource {
 public:
  PreparedSource(std::string dir, const PreparedKey& key, Ops& ops, ReadOptions options, bool check_values)
      : dir_(std::move(dir)), check_values_(check_values), memory_(ops) {
    const std::string where = cat(dir_, "/", kPreparedManifest), data = cat(dir_, "/", kPreparedData);
    std::error_code failed;
    if (!std::filesystem::exists(where, failed))
      throw refused(dir_,
                    std::filesystem::exists(dir_, failed) ? "its preparation was not finished" : "no such folder");
    try {
      manifest_ = read_manifest(read_file(where), where);
    } catch (const Error& e) {
      throw refused(dir_, e.what());
    }
    if (const std::string why = difference(manifest_, key); !why.empty()) throw refused(dir_, why);
    const auto size = std::filesystem::file_size(data, failed);
    if (failed || size != manifest_.bytes)
      throw refused(dir_,
                    cat("'", kPreparedData, "' has ", failed ? 0 : size, " bytes, ", manifest_.bytes, " were written"));
    // One chunk is one read, so that its sum can be taken by the thread that read it.
    options.block = kPreparedChunk;
    std::vector<FileBlock> blocks;
    append_blocks(blocks, 0, 0, manifest_.bytes, options);
    if (blocks.size() != manifest_.sums.size()) throw refused(dir_, "the manifest has too few sums");
    reader_ = std::make_unique<BlockReader>(
        std::vector<std::string>{data}, std::move(blocks), options,
        [sums = manifest_.sums, data](size_t number, std::span<const std::byte> bytes) {
          if (xxh64(bytes) != sums[number])
            throw Error(Code::weights,
                        cat("'", data, "': bytes ", number * kPreparedChunk, " to ",
                            number * kPreparedChunk + bytes.size(), " are not as they were written"),
                        std::string(kRemedy));
        });
  }

  Weight take(std::string_view name, WeightGroup group, Split split) override {
    return take({{{std::string(name), split}}, group, false});
  }
  Weight take_stacked(std::span<const StackPart> parts, WeightGroup group) override {
    return take({{parts.begin(), parts.end()}, group, true});
  }
  bool has(std::string_view name) const override {
    return std::any_of(manifest_.weights.begin(), manifest_.weights.end(), [&](const PreparedWeight& w) {
      return std::any_of(w.take.parts.begin(), w.take.parts.end(), [&](const StackPart& p) { return p.name == name; });
    });
  }
  std::string digest() const override { return sha256_hex(write_manifest(manifest_)); }
  uint64_t bytes_taken() const override { return taken_; }

 private:
  Weight take(const Take& wanted) {
    if (next_ == manifest_.weights.size() || !(manifest_.weights[next_].take == wanted))
      throw refused(dir_, cat("weight ", next_, " is not ", wanted.parts.empty() ? "" : wanted.parts.front().name,
                              ": made by another version"));
    const PreparedWeight& entry = manifest_.weights[next_++];
    Weight w = entry.weight;
    const std::vector<Tensor*> places = tensors_of(w);
    if (places.size() != entry.tensors.size()) throw refused(dir_, cat("weight ", next_ - 1, " lacks a tensor"));
    for (size_t i = 0; i < places.size(); ++i) *places[i] = read(wanted.parts.front().name, entry.tensors[i]);
    if (next_ == manifest_.weights.size()) reader_.reset();
    return w;
  }

  Tensor read(const std::string& tensor, const PreparedTensor& planned) {
    uint64_t bytes = size_of(planned.dtype);
    for (const int64_t d : planned.shape) bytes *= static_cast<uint64_t>(d);
    if (planned.begin < at_ || planned.begin > manifest_.bytes || bytes > manifest_.bytes - planned.begin)
      throw refused(dir_, cat("the place of ", tensor, " makes no sense"));
    stream(planned.begin - at_, [](std::span<const std::byte>) {});
    const Tensor to = memory_.place(bytes, planned.dtype, planned.shape);
    WeightMemory::Filler filler(memory_, to);
    ValueCheck values(planned.dtype);
    stream(bytes, [&](std::span<const std::byte> some) {
      if (check_values_) values.append(some);
      filler.append(some);
    });
    filler.finish();
    if (!values.ok())
      throw refused(
          dir_, cat(layer_of(tensor), tensor, ": ", values.nan(), " NaN and ", values.infinite(), " infinite values"));
    taken_ += bytes;
    return to;
  }

  /// The next n bytes of the file.
  template <class Sink>
  void stream(uint64_t n, const Sink& sink) {
    at_ += n;
    while (n > 0) {
      if (rest_.empty()) rest_ = reader_->next();
      const auto some = rest_.first(static_cast<size_t>(std::min<uint64_t>(n, rest_.size())));
      sink(some);
      rest_ = rest_.subspan(some.size());
      n -= some.size();
    }
  }

  std::string dir_;
  bool check_values_;
  PreparedManifest manifest_;
  WeightMemory memory_;
  std::unique_ptr<BlockReader> reader_;
  std::span<const std::byte> rest_;  // of the block that the reader gave out
  uint64_t at_ = 0, taken_ = 0;
  size_t next_ = 0;
};

}  // namespace

std::unique_ptr<WeightSource> open_prepared(const std::string& dir, const PreparedKey& key, Ops& ops,
                                            const ReadOptions& options, bool check_values) {
  return std::make_unique<PreparedSource>(dir, key, ops, options, check_values);
}

}  // namespace glm53
