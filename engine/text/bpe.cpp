#include "engine/text/bpe.h"

#include <queue>
#include <utility>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::text {

namespace {

uint64_t pair_key(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

}  // namespace

Bpe::Bpe(TokenMap vocab) : vocab_(std::move(vocab)) {
  for (size_t b = 0; b < byte_id_.size(); ++b) {
    const char byte = static_cast<char>(static_cast<unsigned char>(b));
    const auto found = vocab_.find(std::string_view(&byte, 1));
    if (found == vocab_.end()) throw Error(Code::weights, cat("tokenizer: byte ", b, " is no token of model.vocab"));
    byte_id_[b] = found->second;
  }
}

int32_t Bpe::id_of(std::string_view bytes) const {
  const auto found = vocab_.find(bytes);
  return found == vocab_.end() ? -1 : found->second;
}

void Bpe::add_merge(std::string_view left, std::string_view right, uint32_t rank) {
  const int32_t l = id_of(left), r = id_of(right), whole = id_of(cat(left, right));
  if (l < 0 || r < 0 || whole < 0) {
    throw Error(Code::weights, cat("tokenizer: model.merges[", rank, "] names a token that is not in model.vocab"));
  }
  merges_.try_emplace(pair_key(l, r), Merge{rank, whole});
}

const Bpe::Merge* Bpe::find(int32_t left, int32_t right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.empty()) return;
  if (const int32_t id = id_of(piece); id >= 0) {
    out.push_back(id);
    return;
  }
  if (piece.size() > kCachedBytes) {
    merge(piece, out);
    return;
  }
  CacheShard& shard = cache_[TextHash{}(piece) % cache_.size()];
  {
    const std::scoped_lock lock(shard.mutex);
    if (const auto hit = shard.pieces.find(piece); hit != shard.pieces.end()) {
      out.insert(out.end(), hit->second.begin(), hit->second.end());
      return;
    }
  }
  std::vector<int32_t> ids;
  merge(piece, ids);
  out.insert(out.end(), ids.begin(), ids.end());
  const std::scoped_lock lock(shard.mutex);
  if (shard.pieces.size() >= kShardPieces) shard.pieces.clear();
  shard.pieces.try_emplace(std::string(piece), std::move(ids));
}

// A linked list of symbols and a heap of candidate merges; a candidate is stale when one of its symbols has changed
// since.
void Bpe::merge(std::string_view piece, std::vector<int32_t>& out) const {
  struct Symbol {
    int32_t id;
    int64_t previous, next;
  };
  struct Candidate {
    uint32_t rank;
    int64_t left;
    int32_t left_id, right_id, merged;
    bool operator>(const Candidate& o) const { return std::pair(rank, left) > std::pair(o.rank, o.left); }
  };
  const auto n = static_cast<int64_t>(piece.size());
  std::vector<Symbol> symbols(piece.size());
  for (int64_t i = 0; i < n; ++i) {
    symbols[static_cast<size_t>(i)] = {byte_id_[static_cast<unsigned char>(piece[static_cast<size_t>(i)])], i - 1,
                                       i + 1 < n ? i + 1 : -1};
  }
  const auto symbol = [&symbols](int64_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
  const auto offer = [&](int64_t left) {
    if (left < 0 || symbol(left).next < 0) return;
    const int32_t a = symbol(left).id, b = symbol(symbol(left).next).id;
    if (const Merge* m = find(a, b)) heap.push({m->rank, left, a, b, m->id});
  };
  for (int64_t i = 0; i + 1 < n; ++i) offer(i);
  while (!heap.empty()) {
    const Candidate c = heap.top();
    heap.pop();
    Symbol& left = symbol(c.left);
    if (left.id != c.left_id || left.next < 0 || symbol(left.next).id != c.right_id) continue;
    Symbol& right = symbol(left.next);
    left.id = c.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) symbol(left.next).previous = c.left;
    offer(left.previous);
    offer(c.left);
  }
  for (int64_t i = 0; i >= 0; i = symbol(i).next) out.push_back(symbol(i).id);
}

}  // namespace glm53::text
