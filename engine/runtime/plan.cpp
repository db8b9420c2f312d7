// Encoding of step plans.
#include "engine/runtime/plan.h"

#include "common/bytes.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr uint16_t kPlanVersion = 4;

template <class A, class B>
void put_pairs(ByteWriter& w, const std::vector<std::pair<A, B>>& pairs) {
  w.put(static_cast<uint32_t>(pairs.size()));
  for (const auto& [a, b] : pairs) {
    w.put(a);
    w.put(b);
  }
}

template <class A, class B>
std::vector<std::pair<A, B>> get_pairs(ByteReader& r) {
  std::vector<std::pair<A, B>> pairs(r.count(sizeof(A) + sizeof(B)));
  for (auto& [a, b] : pairs) {
    a = r.get<A>();
    b = r.get<B>();
  }
  return pairs;
}

void put(ByteWriter& w, const SeqStep& s) {
  w.put(s.request);
  w.put(s.slot);
  w.put(s.regime);
  w.put(s.start);
  w.put(s.drafts);
  w.put(s.propose);
  w.put(s.replay);
  w.put(s.tokens);
  w.put(s.append);
  put_pairs(w, s.copy);
  w.put(s.restore);
  put_pairs(w, s.exports);
  w.put(s.logits);
}

/// Bytes of a SeqStep whose vectors are all empty: the bound on how many a frame can hold.
constexpr size_t kLeastSeqBytes = 8 + 4 + 1 + 4 + 2 + 2 + 2 + 4 + 4 + 4 + 4 + 4 + 2;

SeqStep get_seq(ByteReader& r) {
  SeqStep s;
  s.request = r.get<uint64_t>();
  s.slot = r.get<SlotId>();
  const auto regime = r.get<uint8_t>();
  if (regime > static_cast<uint8_t>(Regime::chunk)) throw Error(Code::corrupt, cat("plan names regime ", int{regime}));
  s.regime = static_cast<Regime>(regime);
  s.start = r.get<int32_t>();
  s.drafts = r.get<int16_t>();
  s.propose = r.get<int16_t>();
  s.replay = r.get<int16_t>();
  s.tokens = r.get_vector<int32_t>();
  s.append = r.get_vector<BlockId>();
  s.copy = get_pairs<BlockId, BlockId>(r);
  s.restore = r.get<SnapId>();
  s.exports = get_pairs<int32_t, SnapId>(r);
  s.logits = r.get<int16_t>();
  return s;
}

}  // namespace

void put(ByteWriter& w, const std::vector<SpillItem>& items) {
  w.put(static_cast<uint32_t>(items.size()));
  for (const SpillItem& item : items) {
    const spill::Meta& m = item.meta;
    w.put(m.name.kind);
    for (const uint8_t b : m.name.hash) w.put(b);
    w.put(m.cls);
    w.put(m.position);
    for (const int32_t t : m.tokens) w.put(t);
    w.put(item.id);
  }
}

std::vector<SpillItem> get_spill_items(ByteReader& r) {
  constexpr size_t kBytes = 1 + 16 + 1 + 4 + 4 * spill::kTokens + 4;
  std::vector<SpillItem> items(r.count(kBytes));
  for (SpillItem& item : items) {
    spill::Meta& m = item.meta;
    const auto kind = r.get<uint8_t>();
    if (kind > static_cast<uint8_t>(spill::Kind::snapshot))
      throw Error(Code::corrupt, cat("plan names a spilled thing of kind ", int{kind}));
    m.name.kind = static_cast<spill::Kind>(kind);
    for (uint8_t& b : m.name.hash) b = r.get<uint8_t>();
    m.cls = r.get<uint8_t>();
    m.position = r.get<int32_t>();
    for (int32_t& t : m.tokens) t = r.get<int32_t>();
    item.id = r.get<int32_t>();
  }
  return items;
}

std::vector<std::byte> encode(const StepPlan& plan) {
  ByteWriter w;
  w.put(kPlanVersion);
  w.put(plan.generation);
  w.put(plan.step);
  w.put(plan.bucket);
  w.put(plan.piece.first);
  w.put(plan.piece.last);
  w.put(static_cast<uint32_t>(plan.seqs.size()));
  for (const SeqStep& s : plan.seqs) put(w, s);
  put_pairs(w, plan.flush);
  put_pairs(w, plan.save);
  w.put(plan.release);
  put(w, plan.spill);
  put_pairs(w, plan.load);
  return w.take();
}

StepPlan decode_plan(std::span<const std::byte> frame) {
  ByteReader r(frame);
  if (const auto version = r.get<uint16_t>(); version != kPlanVersion)
    throw Error(Code::corrupt, cat("plan of version ", version, ", expected ", kPlanVersion),
                "run all ranks from the same build");
  StepPlan plan;
  plan.generation = r.get<uint64_t>();
  plan.step = r.get<uint64_t>();
  plan.bucket = r.get<int32_t>();
  plan.piece.first = r.get<int32_t>();
  plan.piece.last = r.get<int32_t>();
  const uint32_t seqs = r.count(kLeastSeqBytes);
  plan.seqs.reserve(seqs);
  for (uint32_t i = 0; i < seqs; ++i) plan.seqs.push_back(get_seq(r));
  plan.flush = get_pairs<SlotId, int16_t>(r);
  plan.save = get_pairs<SlotId, SnapId>(r);
  plan.release = r.get_vector<SlotId>();
  plan.spill = get_spill_items(r);
  plan.load.resize(r.count(sizeof(uint64_t) + 1));
  for (auto& [restore, wanted] : plan.load) {
    restore = r.get<uint64_t>();
    wanted = r.get<uint8_t>() != 0;
  }
  r.finish();
  return plan;
}

}  // namespace glm53
