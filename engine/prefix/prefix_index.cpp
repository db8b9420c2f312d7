// Lookup, leases and insertion. A node is one block of one path, and holds it. Nodes of a path carry the refs of the
// leases that read them; as a node is evicted only as a leaf, ancestors stay for as long as anything below does.
//
// Who may write to a block: only the sequence that brought it. Others read the rows that were registered, and copy a
// block in the middle of which they go on. So a block can be registered while its owner still appends to it.
//
// Generated rows come out of other kernels than a prompt's, with other rounding. They are registered for everybody only
// when share_output says so; else for nobody but the request itself (origin), which may find them after a preemption.
// Which origin a block has follows from positions alone: in a preempted sequence the blocks behind the last one that is
// full of prompt are its own, those before are everybody's. So a path never branches between the two.
#include "engine/prefix/prefix_index.h"

#include <algorithm>
#include <unordered_set>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::prefix {
namespace {

/// A slice and the storage of its media.
struct BlockSlice {
  std::vector<MediaPart> media;
  std::span<const int32_t> tokens;
  uint64_t origin = 0;
  Slice view() const { return {origin, tokens, media}; }
};

BlockSlice slice_of(const Prefix& prefix, int32_t begin, int32_t count, uint64_t origin) {
  return {media_of_block(prefix.media, begin, count),
          prefix.tokens.subspan(static_cast<size_t>(begin), static_cast<size_t>(count)), origin};
}

/// Most rows that `slice` has in common with a child of its origin: one of its neighbours in their order has them.
int longest(const Node& parent, const Slice& slice) {
  int best = 0;
  const auto behind = parent.children.lower_bound(slice);
  if (behind != parent.children.end() && (*behind)->origin == slice.origin)
    best = compare((*behind)->slice(), slice).common;
  if (behind != parent.children.begin() && (*std::prev(behind))->origin == slice.origin)
    best = std::max(best, compare((*std::prev(behind))->slice(), slice).common);
  return best;
}

/// A child that begins with all of `slice`.
Node* covering(const Node& parent, const Slice& slice) {
  const auto at = parent.children.lower_bound(slice);
  if (at == parent.children.end() || (*at)->origin != slice.origin) return nullptr;
  return compare((*at)->slice(), slice).common == slice.size() ? *at : nullptr;
}

bool has_interval(const Node& node) {
  return std::any_of(node.snaps.begin(), node.snaps.end(),
                     [](const Snapshot& s) { return s.cls == SnapClass::interval; });
}

}  // namespace

Index::Index(const Options& options) : options_(options) {
  if (options.half_life.count() <= 0 || options.interval < 0)
    throw Error(Code::internal, "prefix index: the half-life must be positive, the interval not negative");
}

// ---- leases ----

const Index::Lease& Index::lease_of(LeaseId id) const {
  const auto at = leases_.find(id);
  if (at == leases_.end() || at->second.released)
    throw Error(Code::internal, cat("prefix index: no lease ", static_cast<uint64_t>(id)));
  return at->second;
}
Index::Lease& Index::lease_of(LeaseId id) {
  std::as_const(*this).lease_of(id);  // throws
  return leases_.at(id);
}

Root& Index::root_of(std::string_view salt) {
  const auto at = roots_.find(salt);
  if (at != roots_.end()) return *at->second;
  auto root = std::make_unique<Root>();
  root->salt = salt;
  root->top.root = root.get();
  root->top.size = kBlockTokens;
  return *roots_.emplace(root->salt, std::move(root)).first->second;
}

Index::Lease& Index::open(std::string_view salt, LeaseId& id) {
  id = LeaseId{next_lease_++};
  Lease& lease = leases_[id];
  lease.root = &root_of(salt);
  ++lease.root->leases;
  return lease;
}

LeaseId Index::open(std::string_view salt) {
  LeaseId id{};
  open(salt, id);
  return id;
}

Freed Index::settle(LeaseId id) {
  const auto at = leases_.find(id);
  if (at == leases_.end()) throw Error(Code::internal, cat("prefix index: no lease ", static_cast<uint64_t>(id)));
  Lease& lease = at->second;
  Freed freed;
  if (lease.settled()) return freed;
  Node* const touched = std::exchange(lease.restored, nullptr);
  Snapshot& snapshot = *touched->snapshot_at(lease.position - touched->begin());
  if (--snapshot.pins == 0 && lease.root->retired) {
    freed.snaps.push_back(snapshot.id);
    erase_snapshot(*touched, snapshot.id);
  }
  unref(*touched);
  if (lease.copied != nullptr) unref(*std::exchange(lease.copied, nullptr));
  if (lease.released) {
    const std::vector<BlockId> owned = std::move(lease.owned);
    Root& root = *lease.root;
    // Before the lease, with which the root may go.
    if (root.retired && std::find(lease.held.begin(), lease.held.end(), touched) == lease.held.end())
      prune(touched, freed);
    close(id, owned, freed);
  } else if (lease.root->retired) {
    prune(touched, freed);
  }
  return freed;
}

Freed Index::release(LeaseId id, std::span<const BlockId> blocks) {
  Lease& lease = lease_of(id);
  require_held(lease, blocks);
  Freed freed;
  if (lease.settled()) {
    close(id, blocks, freed);
  } else {
    lease.released = true;
    lease.owned.assign(blocks.begin(), blocks.end());
  }
  return freed;
}

void Index::close(LeaseId id, std::span<const BlockId> blocks, Freed& freed) {
  Lease& lease = leases_.at(id);
  std::vector<Node*> held = std::move(lease.held);
  // Before the nodes go: a block of the index may only come back through it.
  for (const BlockId b : blocks)
    if (!by_block_.contains(b)) freed.blocks.push_back(b);
  Root& root = *lease.root;
  leases_.erase(id);
  std::sort(held.begin(), held.end(), [](const Node* a, const Node* b) { return a->depth > b->depth; });
  std::vector<uint64_t> ids;
  for (Node* n : held) {
    unref(*n);
    ids.push_back(n->id);
  }
  if (root.retired)
    for (const uint64_t node : ids)
      if (const auto at = nodes_.find(node); at != nodes_.end()) prune(&at->second, freed);
  --root.leases;  // last: it keeps the root until here
  drop_if_unused(root);
}

void Index::require_held(const Lease& lease, std::span<const BlockId> blocks) const {
  const std::unordered_set<const Node*> held(lease.held.begin(), lease.held.end());
  std::unordered_set<BlockId> seen;
  for (const BlockId b : blocks) {
    const auto id = static_cast<int32_t>(b);
    if (id <= 0) throw Error(Code::internal, cat("prefix index: ", id, " is no block"));
    if (!seen.insert(b).second) throw Error(Code::internal, cat("prefix index: block ", id, " twice in a table"));
    const auto at = by_block_.find(b);
    if (at != by_block_.end() && !held.contains(at->second))
      throw Error(Code::internal, cat("prefix index: block ", id, " is in a table whose lease does not hold it"));
  }
}

// ---- lookup ----

int32_t Index::visible(const Prefix& prefix) const {
  const auto size = static_cast<int32_t>(prefix.tokens.size());
  return options_.share_output || prefix.request != 0 ? size : std::clamp(prefix.prompt, 0, size);
}

uint64_t Index::origin_of(const Prefix& prefix, int32_t begin) const {
  return options_.share_output || begin + kBlockTokens <= prefix.prompt ? 0 : prefix.request;
}

void Index::consider(Node& node, int32_t common, int32_t max_hit, Match& best) {
  best.matched = std::max(best.matched, node.begin() + common);
  for (const Snapshot& s : node.snaps) {
    const int32_t position = node.begin() + s.offset;
    if (s.offset <= common && position <= max_hit && position > best.position) {
      best.position = position;
      best.node = &node;
    }
  }
}

Index::Match Index::match(Root& root, const Prefix& prefix, int32_t max_hit) const {
  Match best;
  const int32_t end = visible(prefix);
  Node* at = &root.top;
  for (int32_t begin = 0; at != nullptr && begin < end; begin += kBlockTokens) {
    const int32_t count = std::min<int32_t>(kBlockTokens, end - begin);
    const BlockSlice block = slice_of(prefix, begin, count, origin_of(prefix, begin));
    const Slice slice = block.view();
    // Rows of the prompt, in a block that has generated ones too, may also be found where everybody's are.
    const int32_t common_rows = slice.origin == 0 ? count : std::clamp(prefix.prompt - begin, 0, count);
    const BlockSlice open = slice_of(prefix, begin, common_rows, 0);
    for (Node* child : at->loose) {
      if (child->origin == slice.origin)
        consider(*child, compare(child->slice(), slice).common, max_hit, best);
      else if (child->origin == 0)
        consider(*child, compare(child->slice(), open.view()).common, max_hit, best);
    }
    Node* next = count == kBlockTokens ? covering(*at, slice) : nullptr;
    if (next != nullptr) {
      consider(*next, kBlockTokens, max_hit, best);
    } else {
      int common = longest(*at, slice);
      if (slice.origin != 0 && common_rows > 0) common = std::max(common, longest(*at, open.view()));
      if (common > 0) best.matched = std::max(best.matched, begin + common);
    }
    at = next;
  }
  return best;
}

Hit Index::lookup(std::string_view salt, const Prefix& prefix, Time now, int32_t max_hit) {
  Hit hit;
  Lease& lease = open(salt, hit.lease);
  const auto size = static_cast<int32_t>(prefix.tokens.size());
  const Match found = match(*lease.root, prefix, std::min(max_hit, size - 1));
  ++counters_.lookups;
  counters_.query_tokens += static_cast<uint64_t>(size);
  hit.matched = found.matched;
  if (found.node == nullptr) return hit;

  ++tick_;
  ++counters_.hits;
  counters_.hit_tokens += static_cast<uint64_t>(found.position);
  hit.position = found.position;
  Node& node = *found.node;
  Snapshot& snapshot = *node.snapshot_at(found.position - node.begin());
  snapshot.uses = uses_at(snapshot, now) + 1;
  snapshot.last_use = now;
  snapshot.hit = true;
  snapshot.passed = false;
  ++snapshot.pins;
  hit.restore = snapshot.id;
  lease.position = found.position;
  lease.restored = &node;
  lease.hit_node = node.id;
  lease.hit_snap = snapshot.id;
  hit.base = snapshot.cls == SnapClass::turn ? shallower(node, snapshot.offset, false) : found.position;
  ref(node);
  Node* last = &node;
  if (snapshot.offset < kBlockTokens) {
    hit.copy = node.block;
    lease.copied = &node;
    ref(node);
    touch(node);
    last = node.parent;
  }
  for (Node* n = last; n->parent != nullptr; n = n->parent) {
    touch(*n);
    hold(lease, *n);
  }
  std::reverse(lease.held.begin(), lease.held.end());
  for (const Node* n : lease.held) {
    hit.shared.push_back(n->block);
    lease.path.push_back(n->id);
    if (has_interval(*n)) lease.thin.push_back(n->id);
  }
  return hit;
}

void Index::pass(LeaseId id, bool passed) {
  const Lease& lease = lease_of(id);
  const auto node = nodes_.find(lease.hit_node);
  if (node == nodes_.end()) return;
  Snapshot* snapshot = node->second.snapshot_at(lease.position - node->second.begin());
  if (snapshot != nullptr && snapshot->id == lease.hit_snap && snapshot->cls == SnapClass::turn)
    snapshot->passed = passed;
}

// ---- insertion ----

bool Index::holds(const Lease& lease, const Node& node) {
  const auto at = std::lower_bound(lease.held.begin(), lease.held.end(), node.depth,
                                   [](const Node* n, int32_t depth) { return n->depth < depth; });
  return at != lease.held.end() && *at == &node;
}

/// Leading blocks that need no look: their nodes are known, and nothing is to be done to them.
size_t Index::known_blocks(Lease& lease, const Insertion& in, int32_t end) {
  while (!lease.path.empty() && !nodes_.contains(lease.path.back())) lease.path.pop_back();
  size_t known = std::min(lease.path.size(), static_cast<size_t>(end / kBlockTokens));
  for (const NewSnapshot& s : in.snaps)
    known = std::min(known, static_cast<size_t>(std::max(s.position - 1, 0) / kBlockTokens));
  // Rows that are registered for everybody now may have been registered for the request alone before.
  const auto foreign = [&](size_t block) {
    return nodes_.at(lease.path[block]).origin != origin_of(in.prefix, static_cast<int32_t>(block) * kBlockTokens);
  };
  while (known > 0 && foreign(known - 1)) --known;
  return known;
}

void Index::require_valid(const Lease& lease, const Insertion& in, size_t first_block) const {
  const auto size = static_cast<int32_t>(in.prefix.tokens.size());
  const size_t blocks = (in.prefix.tokens.size() + kBlockTokens - 1) / kBlockTokens;
  if (in.blocks.size() < blocks)
    throw Error(Code::internal, cat("prefix index: ", in.blocks.size(), " blocks for ", size, " tokens"));
  std::unordered_set<BlockId> blocks_seen;
  for (size_t i = first_block; i < blocks; ++i) {
    const BlockId b = in.blocks[i];
    const auto id = static_cast<int32_t>(b);
    if (id <= 0) throw Error(Code::internal, cat("prefix index: ", id, " is no block"));
    if (!blocks_seen.insert(b).second)
      throw Error(Code::internal, cat("prefix index: block ", id, " twice in a table"));
    const auto at = by_block_.find(b);
    if (at == by_block_.end()) continue;
    if (!holds(lease, *at->second))
      throw Error(Code::internal, cat("prefix index: block ", id, " is in a table whose lease does not hold it"));
    if (at->second->depth != static_cast<int32_t>(i))
      throw Error(Code::internal, cat("prefix index: block ", id, " is at ", at->second->depth, ", not at ", i));
  }
  std::unordered_set<SnapId> seen;
  for (const NewSnapshot& s : in.snaps) {
    const auto id = static_cast<int32_t>(s.id);
    if (id < 0 || snaps_.contains(s.id) || !seen.insert(s.id).second)
      throw Error(Code::internal, cat("prefix index: snapshot ", id, " is none, or here already"));
    if (s.position < 1 || s.position > size)
      throw Error(Code::internal, cat("prefix index: snapshot at ", s.position, " of ", size, " finished positions"));
  }
}

Freed Index::insert(LeaseId id, const Insertion& in, Time now) {
  Lease& lease = lease_of(id);
  const int32_t end = lease.root->retired ? 0 : visible(in.prefix);
  const size_t known = known_blocks(lease, in, end);
  require_valid(lease, in, known);
  Freed freed;
  std::vector<NewSnapshot> snaps = in.snaps;
  std::sort(snaps.begin(), snaps.end(), [](const auto& a, const auto& b) { return a.position < b.position; });
  auto snap = snaps.begin();
  ++tick_;
  Node* at = known == 0 ? &lease.root->top : &nodes_.at(lease.path[known - 1]);
  for (int32_t begin = static_cast<int32_t>(known) * kBlockTokens; begin < end; begin += kBlockTokens) {
    ++counters_.walked;
    const auto index = static_cast<size_t>(begin / kBlockTokens);
    const int32_t count = std::min<int32_t>(kBlockTokens, end - begin);
    const BlockSlice block = slice_of(in.prefix, begin, count, origin_of(in.prefix, begin));
    const bool wanted = snap != snaps.end() && snap->position <= begin + count;
    Node* node = place(lease, *at, block.view(), in.blocks[index], wanted, freed);
    if (node == nullptr) break;
    touch(*node);
    if (has_interval(*node)) lease.thin.push_back(node->id);
    for (; snap != snaps.end() && snap->position <= begin + count; ++snap)
      add_snapshot(lease, *node, *snap, now, freed);
    if (node->size < kBlockTokens || count < kBlockTokens) break;
    if (index < lease.path.size() && lease.path[index] != node->id) lease.path.resize(index);
    if (index == lease.path.size()) lease.path.push_back(node->id);
    at = node;
  }
  for (; snap != snaps.end(); ++snap) {
    ++counters_.snaps_surplus;
    freed.snaps.push_back(snap->id);
  }
  return freed;
}

void Index::add_snapshot(Lease& lease, Node& node, const NewSnapshot& snap, Time now, Freed& freed) {
  Snapshot fresh;
  fresh.offset = snap.position - node.begin();
  fresh.id = snap.id;
  fresh.cls = snap.cls;
  fresh.last_use = now;
  attach(node, fresh, freed);
  if (snap.cls != SnapClass::interval) return;
  lease.thin.push_back(node.id);
  thin(lease, snap.position, freed);
}

Node* Index::place(Lease& lease, Node& parent, const Slice& slice, BlockId block, bool wanted, Freed& freed) {
  const auto known = by_block_.find(block);
  Node* const mine = known != by_block_.end() ? known->second : nullptr;
  Node* const cover = covering(parent, slice);
  if (cover != nullptr) {
    if (cover == mine) return mine;
    // Ours was registered with fewer tokens; now it says nothing that the other does not.
    if (mine != nullptr && mine == lease.tail && mine->parent == &parent && mine->origin == slice.origin &&
        mine->refs == 1) {
      drop_hold(lease, *mine);
      absorb(*mine, *cover, freed);
      std::erase(freed.blocks, block);  // the sequence uses it on
    }
    return cover;
  }
  if (mine != nullptr) {
    // Registered for everybody up to the prompt's end, it cannot be a second node for the rows behind.
    if (mine != lease.tail || mine->parent != &parent || mine->origin != slice.origin ||
        compare(mine->slice(), slice).common != mine->size)
      return nullptr;
    extend(*mine, slice);
    absorb_prefixes_of(*mine, freed);
    return mine;
  }
  if (slice.size() < kBlockTokens && !wanted) return nullptr;
  Node& node = create(parent, slice, block);
  hold(lease, node);
  lease.tail = &node;
  absorb_prefixes_of(node, freed);
  return &node;
}

Node& Index::create(Node& parent, const Slice& slice, BlockId block) {
  const uint64_t id = next_node_++;
  Node& node = nodes_[id];
  node.id = id;
  node.root = parent.root;
  node.parent = &parent;
  node.depth = parent.depth + 1;
  node.origin = slice.origin;
  node.size = slice.size();
  std::copy(slice.tokens.begin(), slice.tokens.end(), node.tokens.begin());
  node.media.assign(slice.media.begin(), slice.media.end());
  node.block = block;
  node.last_use = tick_;
  parent.children.insert(&node);
  by_block_[block] = &node;
  if (node.origin != 0) private_[node.origin].insert(id);
  list_as_loose(node);
  refile(parent);
  refile(node);
  ++counters_.blocks_inserted;
  return node;
}

void Index::hold(Lease& lease, Node& node) {
  ref(node);
  lease.held.push_back(&node);
}

void Index::drop_hold(Lease& lease, Node& node) {
  if (!lease.held.empty() && lease.held.back() == &node)
    lease.held.pop_back();
  else
    std::erase(lease.held, &node);
  if (lease.tail == &node) lease.tail = nullptr;
  unref(node);
}

void Index::extend(Node& node, const Slice& slice) {
  auto handle = node.parent->children.extract(&node);
  node.size = slice.size();
  std::copy(slice.tokens.begin(), slice.tokens.end(), node.tokens.begin());
  node.media.assign(slice.media.begin(), slice.media.end());
  node.parent->children.insert(std::move(handle));
  list_as_loose(node);
}

double Index::uses_at(const Snapshot& snapshot, Time now) const {
  return decayed(snapshot.uses, now - snapshot.last_use, options_.half_life);
}

void Index::absorb(Node& from, Node& into, Freed& freed) {
  const std::vector<Snapshot> moving = std::move(from.snaps);
  from.snaps.clear();
  for (const Snapshot& s : moving) {
    snaps_.erase(s.id);
    --counters_.snaps_inserted;  // attach counts it again
    attach(into, s, freed);
  }
  freed.blocks.push_back(from.block);
  remove(from);
}

void Index::absorb_prefixes_of(Node& node, Freed& freed) {
  const std::vector<Node*> loose = node.parent->loose;
  for (Node* other : loose)
    if (other != &node && other->origin == node.origin && other->refs == 0 && other->size < node.size &&
        compare(other->slice(), node.slice()).common == other->size)
      absorb(*other, node, freed);
}

void Index::attach(Node& node, const Snapshot& snapshot, Freed& freed) {
  if (Snapshot* known = node.snapshot_at(snapshot.offset)) {
    if (class_weight(snapshot.cls) > class_weight(known->cls)) known->cls = snapshot.cls;
    const Time last_use = std::max(known->last_use, snapshot.last_use);
    known->uses = std::max(uses_at(*known, last_use), uses_at(snapshot, last_use));
    known->last_use = last_use;
    known->hit = known->hit || snapshot.hit;
    known->passed = known->passed && snapshot.passed;
    freed.snaps.push_back(snapshot.id);
    ++counters_.snaps_surplus;
    return;
  }
  const auto behind =
      std::find_if(node.snaps.begin(), node.snaps.end(), [&](const Snapshot& s) { return s.offset > snapshot.offset; });
  node.snaps.insert(behind, snapshot);
  snaps_[snapshot.id] = &node;
  ++counters_.snaps_inserted;
  list_as_loose(node);
  refile(node);
}

/// Interval snapshots of its path, as far as the lease has met them; what others left since then, they thin out.
void Index::thin(Lease& lease, int32_t newest, Freed& freed) {
  std::sort(lease.thin.begin(), lease.thin.end());
  lease.thin.erase(std::unique(lease.thin.begin(), lease.thin.end()), lease.thin.end());
  std::erase_if(lease.thin, [&](uint64_t id) {
    ++counters_.walked;
    const auto at = nodes_.find(id);
    if (at == nodes_.end()) return true;
    Node& n = at->second;
    const std::vector<Snapshot> snaps = n.snaps;
    for (const Snapshot& s : snaps) {
      // One that was hit has shown what it is worth; eviction weighs it.
      if (s.cls != SnapClass::interval || s.hit || s.pins != 0) continue;
      if (keep_interval(n.begin() + s.offset, newest, options_.interval)) continue;
      erase_snapshot(n, s.id);
      freed.snaps.push_back(s.id);
      ++counters_.snaps_thinned;
    }
    return !has_interval(n);
  });
}

}  // namespace glm53::prefix
