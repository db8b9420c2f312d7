// What the golden tests of the model share: reference files, a runner that feeds sequences to a Model, and comparisons.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/comm/communicator.h"
#include "engine/loader/safetensors.h"
#include "engine/model/model.h"
#include "kernels/ops.h"

namespace glm53::golden {

/// Folder of this repository.
std::string source_path(const std::string& relative);
/// A file of tiny-random, which the build unpacks from tests/golden/data/tiny-random.tar.xz; without a name its folder.
std::string tiny_random(const std::string& name = {});

/// The trained model of this repository, and limits in which its longest vectors and samples fit.
inline const std::string kTrained = "models/glm53-tiny";
ModelLimits trained_limits();

/// A tensor brought to the host as f32 (integers are exact below 2^24).
struct Values {
  std::vector<int64_t> shape;
  std::vector<float> data;
  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  int64_t width() const { return rows() == 0 ? 0 : static_cast<int64_t>(data.size()) / rows(); }
  std::span<const float> row(int64_t r) const {
    return std::span(data).subspan(static_cast<size_t>(r * width()), static_cast<size_t>(width()));
  }
  /// Rows [begin, end).
  Values part(int64_t begin, int64_t end) const;
};

/// Tensors of one reference file.
class Reference {
 public:
  explicit Reference(const std::string& path);
  Values values(const std::string& name) const;
  std::vector<int32_t> ids(const std::string& name) const;

 private:
  SafetensorsFile file_;
};

/// Runs `body` for every backend with f32 activations and prints which; the figures of the fp32 references are for
/// those.
void for_each_backend(const std::function<void(Ops&)>& body);

/// Copies a tensor of any place to the host.
Values fetch(Ops& ops, Tensor tensor);
/// Puts values into memory of the backend.
Buffer upload(Ops& ops, Dtype dtype, const Values& values);

float largest_difference(const Values& a, const Values& b);
int64_t argmax(std::span<const float> row);
/// True when all values have the same bits.
bool same_bits(const Values& a, const Values& b);

/// A recorded greedy continuation of the trained model before its experts were quantised.
struct Sample {
  std::string name;
  std::vector<int32_t> prompt, output;
  double smallest_margin = 0;  ///< least distance of the two best logits along the way
};
std::vector<Sample> samples();

/// One sequence's rows of a step.
struct Piece {
  int sequence = 0;
  std::vector<int32_t> tokens;
  Regime regime = Regime::chunk;
};

/// A model with caches for some sequences. Window rows are taken as accepted: the next step of that sequence replays
/// them.
class Runner {
 public:
  Runner(const std::string& dir, const ModelLimits& limits, int sequences, Ops& ops, Communicator& comm,
         const FormatPolicy& policy = FormatPolicy::as_stored());
  Runner(std::unique_ptr<Model> model, int sequences, Ops& ops);

  /// One step; window pieces must come first. Returns the logits of all rows in order (empty rows off rank 0), or of
  /// the last row of each piece. `padding` rows are added at the end.
  Values step(const std::vector<Piece>& pieces, bool all_rows = true, int padding = 0);
  /// A prompt in the chunk regime, in pieces of at most `piece` tokens; logits of all rows.
  Values prefill(int sequence, std::span<const int32_t> tokens, int piece);
  /// Greedy continuation in the window regime from the logits of the last row. Returns tokens, and in `rows` the logits
  /// that chose them.
  std::vector<int32_t> greedy(int sequence, const Values& last, int count, Values* rows = nullptr);
  /// The last rows of a sequence's last window were not accepted after all.
  void take_back(int sequence, int rows);
  /// Commits what is pending in a sequence's slot.
  void flush(int sequence);

  Model& model() { return *model_; }
  /// Of the last step. The batch's tensors are overwritten by the next one.
  const Batch& batch() const { return batch_; }
  const ForwardOut& out() const { return out_; }
  /// Block table of a sequence; its slot has the sequence's number.
  std::vector<BlockId> table(int sequence) const;
  int position(int sequence) const { return sequences_.at(static_cast<size_t>(sequence)).position; }
  const Caches& caches() const { return owned_.caches; }
  /// Values of the last step by probe name; call watch() first.
  void watch();
  const Values& seen(const std::string& name) const;

 private:
  struct Sequence {
    int position = 0, pending = 0;
  };
  Tensor ints(size_t index, std::initializer_list<int64_t> shape, const std::vector<int32_t>& values);

  Ops& ops_;
  std::unique_ptr<Model> model_;
  OwnedCaches owned_;
  std::vector<Sequence> sequences_;
  Batch batch_;
  ForwardOut out_;
  int blocks_each_ = 0;
  std::vector<Buffer> inputs_;
  std::map<std::string, Values> seen_;
};

}  // namespace glm53::golden
