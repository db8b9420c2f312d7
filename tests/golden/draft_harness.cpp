#include "tests/golden/draft_harness.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "common/error.h"
#include "common/strings.h"
#include "kernels/draft_ops.h"

namespace glm53::golden {

void for_each_drafting_backend(const std::function<void(Ops&)>& body) {
  for_each_backend([&](Ops& ops) {
    try {
      ops.top_logits({});
    } catch (const Error& e) {
      if (e.code() == Code::unavailable) {
        std::printf("not run: %s\n", e.what());
        return;
      }
    }
    if (ops.backend() != "cpu") return body(ops);
    body(*make_cpu_ops(1));  // the work of one row is too small to divide
  });
}

std::vector<BlockId> Feeder::table(int slot) {
  std::vector<BlockId> table;
  for (int b = 0; b < kBlocks; ++b) table.push_back(BlockId{1 + slot * kBlocks + b});
  return table;
}

void Feeder::feed(Drafter& drafter, const std::vector<FedPiece>& pieces, bool taps) {
  std::vector<int32_t> token, position, row_seq, row_begin{0}, slot, replay, table, export_pos, export_snap;
  std::vector<float> values;
  Batch batch;
  for (const FedPiece& piece : pieces) {
    for (size_t i = 0; i < piece.tokens.size(); ++i) {
      token.push_back(piece.tokens[i]);
      position.push_back(piece.position + static_cast<int32_t>(i));
      row_seq.push_back(batch.seqs);
    }
    values.insert(values.end(), piece.values.begin(), piece.values.end());
    row_begin.push_back(static_cast<int32_t>(token.size()));
    slot.push_back(piece.slot);
    replay.push_back(0);
    for (int b = 0; b < kBlocks; ++b) table.push_back(1 + piece.slot * kBlocks + b);
    for (size_t i = 0; i < 2; ++i) {
      export_pos.push_back(i < piece.exports.size() ? piece.exports[i].first : -1);
      export_snap.push_back(i < piece.exports.size() ? piece.exports[i].second : -1);
    }
    ++batch.seqs;
    if (piece.regime == Regime::window) {
      batch.window_seqs = batch.seqs;
      batch.window_rows = static_cast<int>(token.size());
    }
  }
  batch.rows = static_cast<int>(token.size());
  const auto rows = static_cast<int64_t>(token.size()), seqs = int64_t{batch.seqs};
  const auto list = [](std::vector<int32_t>& v, std::initializer_list<int64_t> shape) {
    return Tensor::of(v.data(), Dtype::i32, shape);
  };
  batch.token = list(token, {rows});
  batch.position = list(position, {rows});
  batch.row_seq = list(row_seq, {rows});
  batch.row_begin = list(row_begin, {seqs + 1});
  batch.slot = list(slot, {seqs});
  batch.committed = list(replay, {seqs});
  batch.replay = list(replay, {seqs});
  batch.block_table = list(table, {seqs, kBlocks});
  batch.export_pos = list(export_pos, {seqs, 2});
  batch.export_snap = list(export_snap, {seqs, 2});
  const int64_t width = static_cast<int64_t>(values.size()) / rows;
  const Buffer memory = ops_.allocate(values.size() * sizeof(float), Place::device);
  const Tensor on_device = memory.view(ops_.activation(), {rows, width});
  ops_.copy(on_device, Tensor::of(values.data(), Dtype::f32, {rows, width}));
  ForwardOut out;
  (taps ? out.taps : out.hidden) = on_device;
  if (!taps) out.mean = on_device;
  drafter.observe(batch, out);
  ops_.synchronize();
}

DraftWatch::DraftWatch(Drafter& drafter, Ops& ops) {
  drafter.set_probe([this, &ops](const std::string& name, const Tensor& value) { seen_[name] = fetch(ops, value); });
}

const Values& DraftWatch::operator[](const std::string& name) const {
  const auto at = seen_.find(name);
  if (at == seen_.end()) throw Error(Code::internal, cat("the drafter showed no ", name));
  return at->second;
}

}  // namespace glm53::golden
