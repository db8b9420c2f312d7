#include "engine/draft/target_head.h"

namespace glm53 {

TargetHead::TargetHead(const SharedWeights& target, Ops& ops, Communicator& comm, int64_t rows, int k)
    : target_(target), ops_(ops), comm_(comm), k_(k) {
  const int64_t ranks = target.shard.size;
  logits_ = store_.take(Dtype::f32, {rows, target.shard.vocab});
  value_ = store_.take(Dtype::f32, {rows, k});
  id_ = store_.take(Dtype::i32, {rows, k});
  if (ranks == 1) return;
  all_value_ = store_.take(Dtype::f32, {rows, ranks * k});
  all_id_ = store_.take(Dtype::i32, {rows, ranks * k});
  best_value_ = store_.take(Dtype::f32, {rows, k});
  best_id_ = store_.take(Dtype::i32, {rows, k});
}

TargetHead::Best TargetHead::best(const Tensor& z) {
  const int64_t rows = z.dim(0);
  const Tensor logits = logits_.rows(0, rows), value = value_.rows(0, rows), id = id_.rows(0, rows);
  ops_.linear({.x = z, .w = target_.head, .y = logits, .beta = 0, .window_rows = static_cast<int>(rows)});
  ops_.top_logits({.logits = logits,
                   .id = {},
                   .first = static_cast<int32_t>(target_.shard.rank * target_.shard.vocab),
                   .value = value,
                   .index = id});
  if (target_.shard.size == 1) return {value, id};
  const Tensor all_value = all_value_.rows(0, rows), all_id = all_id_.rows(0, rows);
  comm_.all_gather(value, all_value);
  comm_.all_gather(id, all_id);
  const Best best{best_value_.rows(0, rows), best_id_.rows(0, rows)};
  ops_.top_logits({.logits = all_value, .id = all_id, .first = 0, .value = best.value, .index = best.id});
  return best;
}

}  // namespace glm53
