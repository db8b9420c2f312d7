#include "engine/draft/mtp_batch.h"

#include <algorithm>
#include <array>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

int32_t blocks_of(int32_t positions) {
  return (positions + kBlockTokens - 1) / kBlockTokens;
}

/// The layer's rows count from `base`, so its blocks begin there too.
void put_table(const MtpRows& s, int32_t max_blocks, std::vector<int32_t>& table) {
  const auto first = static_cast<size_t>(s.base / kBlockTokens);
  const int32_t last = s.position + static_cast<int32_t>(s.next.size());
  if (static_cast<int32_t>(s.table.size()) < blocks_of(last))
    throw Error(Code::internal, cat("mtp: slot ", static_cast<int32_t>(s.slot), " has ", s.table.size(), " blocks for ",
                                    last, " rows"));
  const size_t end = table.size() + static_cast<size_t>(max_blocks);
  for (size_t b = first; b < s.table.size() && table.size() < end; ++b)
    table.push_back(static_cast<int32_t>(s.table[b]));
  table.resize(end, static_cast<int32_t>(BlockId::null));
}

}  // namespace

MtpBatches::MtpBatches(const ModelLimits& limits, int rows, Ops& ops)
    : max_blocks_(blocks_of(limits.max_context)),
      lists_(ops, std::max<int64_t>({rows, int64_t{limits.max_seqs} * max_blocks_, 2 * int64_t{limits.max_seqs},
                                     limits.max_seqs + 1})) {}

const Batch& MtpBatches::fill(std::span<const MtpRows> sequences, bool zero_first) {
  std::array<std::vector<int32_t>, kLists> v;
  batch_ = {};
  v[kRowBegin].push_back(0);
  for (const MtpRows& s : sequences) {
    for (size_t i = 0; i < s.next.size(); ++i) {
      const int32_t position = s.position - s.base + static_cast<int32_t>(i);
      v[kToken].push_back(zero_first && position == 0 ? -1 : s.next[i]);
      v[kPosition].push_back(position);
      v[kRowSeq].push_back(batch_.seqs);
    }
    v[kRowBegin].push_back(static_cast<int32_t>(v[kToken].size()));
    v[kSlot].push_back(static_cast<int32_t>(s.slot));
    v[kZeros].push_back(0);
    put_table(s, max_blocks_, v[kTable]);
    for (size_t e = 0; e < 2; ++e) {
      const bool there = e < s.exports.size();
      v[kExportPos].push_back(there ? s.exports[e].first - s.base : -1);
      v[kExportSnap].push_back(there ? static_cast<int32_t>(s.exports[e].second) : -1);
    }
    ++batch_.seqs;
    if (!s.window) continue;
    batch_.window_seqs = batch_.seqs;
    batch_.window_rows = static_cast<int>(v[kToken].size());
  }
  batch_.rows = static_cast<int>(v[kToken].size());
  const auto seqs = int64_t{batch_.seqs};
  lists_.begin();
  std::array<Tensor, kLists> t;
  for (size_t i = 0; i < kLists; ++i) t[i] = lists_.put(i, v[i]);
  batch_.token = t[kToken];
  batch_.position = t[kPosition];
  batch_.row_seq = t[kRowSeq];
  batch_.row_begin = t[kRowBegin];
  batch_.slot = t[kSlot];
  batch_.committed = batch_.replay = t[kZeros];
  batch_.block_table = t[kTable].reshaped({seqs, max_blocks_});
  batch_.export_pos = t[kExportPos].reshaped({seqs, 2});
  batch_.export_snap = t[kExportSnap].reshaped({seqs, 2});
  return batch_;
}

}  // namespace glm53
