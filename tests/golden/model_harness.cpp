#include "tests/golden/model_harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/half.h"

namespace glm53::golden {

std::string source_path(const std::string& relative) {
  const char* elsewhere = std::getenv("GLM53_TEST_ROOT");  // where the sources are not what they were built from
  return cat(elsewhere != nullptr ? elsewhere : GLM53_SOURCE_DIR, "/", relative);
}

std::string tiny_random(const std::string& name) {
  const char* elsewhere = std::getenv("GLM53_TEST_ROOT");
  const std::string dir =
      elsewhere != nullptr ? cat(elsewhere, "/golden/tiny-random") : GLM53_BINARY_DIR "/golden/tiny-random";
  return name.empty() ? dir : cat(dir, "/", name);
}

ModelLimits trained_limits() {
  ModelLimits l;
  l.max_rows = 448;
  l.max_context = 512;
  l.max_logit_rows = 448;
  return l;
}

Values Values::part(int64_t begin, int64_t end) const {
  Values out;
  out.shape = shape;
  out.shape[0] = end - begin;
  out.data.assign(data.begin() + begin * width(), data.begin() + end * width());
  return out;
}

namespace {

Values to_values(const Tensor& t) {
  Values v;
  v.shape.assign(t.shape.begin(), t.shape.begin() + t.rank);
  v.data.resize(static_cast<size_t>(t.elements()));
  for (size_t i = 0; i < v.data.size(); ++i) {
    switch (t.dtype) {
      case Dtype::f32:
        v.data[i] = t.as<const float>()[i];
        break;
      case Dtype::i32:
        v.data[i] = static_cast<float>(t.as<const int32_t>()[i]);
        break;
      case Dtype::f16:
        v.data[i] = f16_to_f32(t.as<const uint16_t>()[i]);
        break;
      case Dtype::bf16:
        v.data[i] = bf16_to_f32(t.as<const uint16_t>()[i]);
        break;
      default:
        throw Error(Code::internal, "a reference of an unexpected dtype");
    }
  }
  return v;
}

}  // namespace

Reference::Reference(const std::string& path) : file_(path.starts_with('/') ? path : source_path(path)) {}
Values Reference::values(const std::string& name) const {
  return to_values(file_.view(name));
}
std::vector<int32_t> Reference::ids(const std::string& name) const {
  const Tensor t = file_.view(name);
  return {t.as<const int32_t>(), t.as<const int32_t>() + t.elements()};
}

void for_each_backend(const std::function<void(Ops&)>& body) {
  int ran = 0;
  for (const auto& ops : test_backends()) {
    const std::string name(ops->backend());
    if (ops->activation() != Dtype::f32) {
      std::printf("backend %s: not run, fp32 references need f32 activations\n", name.c_str());
      continue;
    }
    std::printf("backend %s\n", name.c_str());
    body(*ops);
    ++ran;
  }
  if (ran == 0) throw Error(Code::internal, "no backend ran");
}

Values fetch(Ops& ops, Tensor tensor) {
  if (tensor.empty()) return {};
  std::vector<int64_t> shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
  const Buffer host = ops.allocate(std::max<size_t>(tensor.bytes(), 1), Place::pinned);
  const Tensor copy = host.view(tensor.dtype, shape);
  ops.copy(copy, tensor);
  ops.synchronize();
  return to_values(copy);
}

Buffer upload(Ops& ops, Dtype dtype, const Values& values) {
  Buffer host = ops.allocate(std::max<size_t>(values.data.size() * sizeof(float), 1), Place::pinned);
  if (dtype == Dtype::i32) {
    for (size_t i = 0; i < values.data.size(); ++i)
      reinterpret_cast<int32_t*>(host.data())[i] = static_cast<int32_t>(values.data[i]);
  } else {
    std::memcpy(host.data(), values.data.data(), values.data.size() * sizeof(float));
  }
  return host;
}

float largest_difference(const Values& a, const Values& b) {
  if (a.data.size() != b.data.size())
    throw Error(Code::internal, cat("compared ", a.data.size(), " with ", b.data.size(), " values"));
  float largest = 0;
  for (size_t i = 0; i < a.data.size(); ++i) {
    const float d = std::fabs(a.data[i] - b.data[i]);
    if (!(d <= largest)) largest = d;  // a NaN stays
    if (std::isnan(largest)) return INFINITY;
  }
  return largest;
}

int64_t argmax(std::span<const float> row) {
  return std::max_element(row.begin(), row.end()) - row.begin();
}

bool same_bits(const Values& a, const Values& b) {
  return a.data.size() == b.data.size() &&
         std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0;
}

std::vector<Sample> samples() {
  std::ifstream in(source_path("tests/golden/data/glm53-tiny/samples.json"));
  const nlohmann::json json = nlohmann::json::parse(in);
  std::vector<Sample> out;
  for (const auto& s : json)
    out.push_back({s.at("name").get<std::string>(), s.at("prompt_ids").get<std::vector<int32_t>>(),
                   s.at("output_ids").get<std::vector<int32_t>>(), s.at("smallest_margin").get<double>()});
  return out;
}

Runner::Runner(const std::string& dir, const ModelLimits& limits, int sequences, Ops& ops, Communicator& comm,
               const FormatPolicy& policy)
    : Runner(load_model(dir, policy, limits, ops, comm), sequences, ops) {}

Runner::Runner(std::unique_ptr<Model> model, int sequences, Ops& ops)
    : ops_(ops), model_(std::move(model)), sequences_(static_cast<size_t>(sequences)), inputs_(16) {
  blocks_each_ = (model_->limits().max_context + kBlockTokens - 1) / kBlockTokens;
  owned_ = make_caches(model_->geometry(), {1 + sequences * blocks_each_, sequences, 2}, ops);
}

Tensor Runner::ints(size_t index, std::initializer_list<int64_t> shape, const std::vector<int32_t>& values) {
  Buffer& buffer = inputs_.at(index);
  const size_t bytes = std::max<size_t>(values.size() * sizeof(int32_t), 4);
  if (buffer.bytes() < bytes) buffer = ops_.allocate(bytes, Place::pinned);
  std::copy(values.begin(), values.end(), reinterpret_cast<int32_t*>(buffer.data()));
  return buffer.view(Dtype::i32, shape);
}

Values Runner::step(const std::vector<Piece>& pieces, bool all_rows, int padding) {
  std::vector<int32_t> token, position, row_seq, row_begin{0}, slot, committed, replay, table, logit_row;
  Batch batch;
  for (const Piece& piece : pieces) {
    Sequence& s = sequences_.at(static_cast<size_t>(piece.sequence));
    const bool window = piece.regime == Regime::window;
    if (!window && s.pending != 0) throw Error(Code::internal, "a chunk piece needs flush() first");
    for (const int32_t id : piece.tokens) {
      row_seq.push_back(batch.seqs);
      position.push_back(s.position + static_cast<int32_t>(token.size()) - row_begin.back());
      token.push_back(id);
    }
    slot.push_back(piece.sequence);
    committed.push_back(s.position - s.pending);
    replay.push_back(s.pending);
    for (int b = 0; b < blocks_each_; ++b) table.push_back(1 + piece.sequence * blocks_each_ + b);
    row_begin.push_back(static_cast<int32_t>(token.size()));
    ++batch.seqs;
    if (window) {
      batch.window_seqs = batch.seqs;
      batch.window_rows = static_cast<int>(token.size());
    }
    s.position += static_cast<int>(piece.tokens.size());
    s.pending = window ? static_cast<int>(piece.tokens.size()) : 0;
    const auto first = all_rows ? row_begin[row_begin.size() - 2] : row_begin.back() - 1;
    for (int32_t r = first; r < row_begin.back(); ++r) logit_row.push_back(r);
  }
  batch.rows = static_cast<int>(token.size());
  for (int i = 0; i < padding; ++i) {
    token.push_back(-1);
    position.push_back(0);
    row_seq.push_back(0);
  }
  const auto rows = static_cast<int64_t>(token.size()), seqs = int64_t{batch.seqs};
  batch.token = ints(0, {rows}, token);
  batch.position = ints(1, {rows}, position);
  batch.row_seq = ints(2, {rows}, row_seq);
  batch.row_begin = ints(3, {seqs + 1}, row_begin);
  batch.slot = ints(4, {seqs}, slot);
  batch.committed = ints(5, {seqs}, committed);
  batch.replay = ints(6, {seqs}, replay);
  batch.block_table = ints(7, {seqs, blocks_each_}, table);
  batch.logit_row = ints(8, {static_cast<int64_t>(logit_row.size())}, logit_row);
  batch.logit_rows = static_cast<int>(logit_row.size());
  const std::vector<int32_t> none(static_cast<size_t>(2 * seqs), -1);
  batch.export_pos = ints(9, {seqs, 2}, none);
  batch.export_snap = ints(10, {seqs, 2}, none);
  batch_ = batch;
  out_ = model_->forward(batch, owned_.caches);
  return fetch(ops_, out_.logits);
}

std::vector<BlockId> Runner::table(int sequence) const {
  std::vector<BlockId> table;
  for (int b = 0; b < blocks_each_; ++b) table.push_back(BlockId{1 + sequence * blocks_each_ + b});
  return table;
}

Values Runner::prefill(int sequence, std::span<const int32_t> tokens, int piece) {
  Values all;
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(piece)) {
    const auto part = tokens.subspan(at, std::min(static_cast<size_t>(piece), tokens.size() - at));
    const Values logits = step({{sequence, {part.begin(), part.end()}, Regime::chunk}});
    if (logits.data.empty()) continue;
    all.data.insert(all.data.end(), logits.data.begin(), logits.data.end());
    all.shape = {static_cast<int64_t>(at + part.size()), logits.shape[1]};
  }
  return all;
}

std::vector<int32_t> Runner::greedy(int sequence, const Values& last, int count, Values* rows) {
  std::vector<int32_t> out;
  Values logits = last;
  for (int i = 0; i < count; ++i) {
    if (i > 0) logits = step({{sequence, {out.back()}, Regime::window}});
    const auto row = logits.row(logits.rows() - 1);
    out.push_back(static_cast<int32_t>(argmax(row)));
    if (rows == nullptr) continue;
    rows->data.insert(rows->data.end(), row.begin(), row.end());
    rows->shape = {i + 1, static_cast<int64_t>(row.size())};
  }
  return out;
}

void Runner::take_back(int sequence, int rows) {
  Sequence& s = sequences_.at(static_cast<size_t>(sequence));
  s.position -= rows;
  s.pending -= rows;
}

void Runner::flush(int sequence) {
  Sequence& s = sequences_.at(static_cast<size_t>(sequence));
  const SlotId slot{sequence};
  model_->flush({&slot, 1}, {&s.pending, 1}, owned_.caches);
  s.pending = 0;
}

void Runner::watch() {
  model_->set_probe([this](const std::string& name, Tensor value) { seen_[name] = fetch(ops_, value); });
}

const Values& Runner::seen(const std::string& name) const {
  const auto at = seen_.find(name);
  if (at == seen_.end()) throw Error(Code::internal, cat("nothing was seen of ", name));
  return at->second;
}

}  // namespace glm53::golden
