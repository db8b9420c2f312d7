// Refs, eviction and the check of the prefix index. What can be evicted (a leaf without refs) stands on one of two
// shelves: leaves without a snapshot, which no lookup can use, and leaves with one. Removing a leaf puts its parent on
// a shelf when that was the last child. As a leaf without a snapshot is all there is of its subtree, the first shelf is
// exactly the orphans that can go.
#include <algorithm>
#include <unordered_set>

#include "common/error.h"
#include "common/strings.h"
#include "engine/prefix/prefix_index.h"

namespace glm53::prefix {
namespace {

[[noreturn]] void contradiction(const std::string& what) {
  throw Error(Code::internal, "prefix index: " + what);
}

bool is_loose(const Node& node) {
  return node.size < kBlockTokens ||
         std::any_of(node.snaps.begin(), node.snaps.end(), [](const Snapshot& s) { return s.offset < kBlockTokens; });
}

}  // namespace

// ---- structure ----

void Index::ref(Node& node) {
  if (node.refs++ == 0)
    for (Node* n = &node; n != nullptr && n->busy++ == 0; n = n->parent)
      if (n->parent != nullptr) ++busy_;
  refile(node);
}

void Index::unref(Node& node) {
  if (--node.refs == 0)
    for (Node* n = &node; n != nullptr && --n->busy == 0; n = n->parent)
      if (n->parent != nullptr) --busy_;
  refile(node);
}

void Index::refile(Node& node) {
  if (node.parent == nullptr) return;
  const std::pair key{node.last_use, node.id};
  if (node.shelf != Shelf::none) (node.shelf == Shelf::orphan ? orphans_ : leaves_).erase(key);
  node.shelf = Shelf::none;
  if (!node.children.empty() || node.refs != 0) return;
  node.shelf = node.snaps.empty() ? Shelf::orphan : Shelf::leaf;
  (node.shelf == Shelf::orphan ? orphans_ : leaves_).insert(key);
}

void Index::touch(Node& node) {
  if (node.shelf != Shelf::none) (node.shelf == Shelf::orphan ? orphans_ : leaves_).erase({node.last_use, node.id});
  node.shelf = Shelf::none;
  node.last_use = tick_;
  refile(node);
}

void Index::list_as_loose(Node& node) {
  std::vector<Node*>& list = node.parent->loose;
  const auto at = std::find(list.begin(), list.end(), &node);
  if (is_loose(node) == (at != list.end())) return;
  if (at == list.end())
    list.push_back(&node);
  else
    list.erase(at);
}

void Index::erase_snapshot(Node& node, SnapId id) {
  std::erase_if(node.snaps, [id](const Snapshot& s) { return s.id == id; });
  snaps_.erase(id);
  list_as_loose(node);
  refile(node);
}

void Index::remove(Node& node) {
  Node& parent = *node.parent;
  const std::pair key{node.last_use, node.id};
  if (node.shelf != Shelf::none) (node.shelf == Shelf::orphan ? orphans_ : leaves_).erase(key);
  parent.children.erase(&node);
  std::erase(parent.loose, &node);
  by_block_.erase(node.block);
  if (const auto own = private_.find(node.origin); own != private_.end()) {
    own->second.erase(node.id);
    if (own->second.empty()) private_.erase(own);
  }
  nodes_.erase(node.id);
  refile(parent);
}

void Index::evict(Node& node, Freed& freed) {
  for (const Snapshot& s : node.snaps) {
    name_snapshot(node, s, freed);
    snaps_.erase(s.id);
    freed.snaps.push_back(s.id);
    ++counters_.snaps_evicted;
  }
  name_block(node, freed);
  freed.blocks.push_back(node.block);
  ++counters_.blocks_evicted;
  Root& root = *node.root;
  remove(node);
  drop_if_unused(root);
}

void Index::prune(Node* node, Freed& freed) {
  while (node->shelf != Shelf::none) {
    Node* const parent = node->parent;
    const bool more = parent->parent != nullptr;
    evict(*node, freed);  // with the last node of a root its top may be gone
    if (!more) return;
    node = parent;
  }
}

void Index::drop_if_unused(Root& root) {
  if (root.leases != 0 || !root.top.children.empty()) return;
  if (root.retired)
    std::erase_if(retired_, [&root](const auto& r) { return r.get() == &root; });
  else
    roots_.erase(roots_.find(root.salt));
}

// ---- eviction ----

Freed Index::evict_blocks(size_t want) {
  Freed freed;
  while (freed.blocks.size() < want && (!orphans_.empty() || !leaves_.empty())) {
    const auto [use, id] = *(orphans_.empty() ? leaves_ : orphans_).begin();
    evict(nodes_.at(id), freed);
  }
  return freed;
}

int32_t Index::shallower(const Node& node, int offset, bool passed_too) {
  const auto last = [passed_too](const Node& n, int below) {
    int32_t best = 0;
    for (const Snapshot& s : n.snaps)
      if (s.offset < below && (passed_too || !s.passed)) best = n.begin() + s.offset;
    return best;
  };
  int32_t best = last(node, offset);
  for (const Node* n = node.parent; best == 0 && n->parent != nullptr; n = n->parent) best = last(*n, kBlockTokens + 1);
  return best;
}

std::pair<SnapId, double> Index::victim(Time now) const {
  SnapId worst = SnapId::none;
  double lowest = 0;
  Time oldest{};
  for (const auto& [id, node] : snaps_) {
    const auto at = std::find_if(node->snaps.begin(), node->snaps.end(), [&](const Snapshot& s) { return s.id == id; });
    if (at->pins != 0) continue;
    const int32_t saved = node->begin() + at->offset - shallower(*node, at->offset, at->passed);
    const double v = value(at->cls, at->uses, now - at->last_use, saved, options_.half_life, at->passed);
    if (worst == SnapId::none || v < lowest || (v == lowest && at->last_use < oldest)) {
      worst = id;
      lowest = v;
      oldest = at->last_use;
    }
  }
  return {worst, lowest};
}

std::optional<double> Index::lowest_value(Time now) const {
  const auto [id, lowest] = victim(now);
  return id == SnapId::none ? std::nullopt : std::optional(lowest);
}

Freed Index::evict_snapshots(size_t want, Time now) {
  Freed freed;
  while (freed.snaps.size() < want) {
    const SnapId id = victim(now).first;
    if (id == SnapId::none) break;
    Node& node = *snaps_.at(id);
    for (const Snapshot& s : node.snaps)
      if (s.id == id) name_snapshot(node, s, freed);
    erase_snapshot(node, id);
    freed.snaps.push_back(id);
    ++counters_.snaps_evicted;
  }
  return freed;
}

Freed Index::forget(uint64_t request) {
  Freed freed;
  const auto own = private_.find(request);
  if (own == private_.end()) return freed;
  // Children have higher ids than their parents.
  const std::vector<uint64_t> ids(own->second.rbegin(), own->second.rend());
  for (const uint64_t id : ids)
    if (Node& node = nodes_.at(id); node.shelf != Shelf::none) evict(node, freed);
  return freed;
}

Freed Index::clear() {
  Freed freed = evict_blocks(nodes_.size());
  // What is left is in use. Its snapshots that are not pinned can go now.
  std::vector<SnapId> unpinned;
  for (const auto& [id, node] : snaps_)
    if (std::none_of(node->snaps.begin(), node->snaps.end(),
                     [id = id](const Snapshot& s) { return s.id == id && s.pins != 0; }))
      unpinned.push_back(id);
  for (const SnapId id : unpinned) {
    erase_snapshot(*snaps_.at(id), id);
    freed.snaps.push_back(id);
    ++counters_.snaps_evicted;
  }
  for (auto& [salt, root] : roots_) {
    root->retired = true;
    retired_.push_back(std::move(root));
  }
  roots_.clear();
  freed.evicted.clear();  // it is to be forgotten
  return freed;
}

// ---- state ----

Contents Index::contents() const {
  Contents c;
  c.blocks = nodes_.size();
  c.evictable = nodes_.size() - busy_;
  c.snaps = snaps_.size();
  for (const auto& [id, node] : snaps_)
    for (const Snapshot& s : node->snaps) c.pinned_snaps += s.id == id && s.pins != 0 ? 1 : 0;
  c.roots = roots_.size() + retired_.size();
  c.leases = leases_.size();
  return c;
}

size_t Index::held_by(std::span<const LeaseId> leases) const {
  std::unordered_set<const Node*> held;
  const auto hold_path = [&](const Node* n) {
    for (; n != nullptr && n->parent != nullptr && held.insert(n).second;) n = n->parent;
  };
  for (const LeaseId id : leases) {
    const auto at = leases_.find(id);
    if (at == leases_.end()) throw Error(Code::internal, cat("prefix index: no lease ", static_cast<uint64_t>(id)));
    for (const Node* n : at->second.held) hold_path(n);
    hold_path(at->second.copied);
    hold_path(at->second.restored);
  }
  return held.size();
}

void Index::check_node(const Node& n) const {
  const std::string name = cat("block ", static_cast<int32_t>(n.block), " at ", n.begin(), ": ");
  const Node& parent = *n.parent;
  if (n.size < 1 || n.size > kBlockTokens) contradiction(name + "no size");
  if (parent.size != kBlockTokens) contradiction(name + "below a partial block");
  if (n.depth != parent.depth + 1 || n.root != parent.root) contradiction(name + "does not fit its parent");
  if (parent.origin != 0 && parent.origin != n.origin) contradiction(name + "everybody's rows behind a request's own");
  const auto child = parent.children.find(n.slice());
  if (child == parent.children.end() || *child != &n) contradiction(name + "its parent does not know it");
  const auto block = by_block_.find(n.block);
  if (block == by_block_.end() || block->second != &n || static_cast<int32_t>(n.block) <= 0)
    contradiction(name + "not under its id");
  if ((std::count(parent.loose.begin(), parent.loose.end(), &n) == 1) != is_loose(n))
    contradiction(name + "wrong in the list of loose children");
  if (const auto own = private_.find(n.origin); n.origin != 0 && (own == private_.end() || !own->second.contains(n.id)))
    contradiction(name + "not among its request's");
  int before = 0, busy = n.refs > 0 ? 1 : 0;
  for (const Snapshot& s : n.snaps) {
    const auto at = snaps_.find(s.id);
    if (s.offset <= before || s.offset > n.size || at == snaps_.end() || at->second != &n)
      contradiction(cat(name, "snapshot ", static_cast<int32_t>(s.id)));
    before = s.offset;
  }
  for (const Node* c : n.children) busy += c->busy > 0 ? 1 : 0;
  if (busy != n.busy) contradiction(cat(name, "busy ", n.busy, ", not ", busy));
  const Shelf shelf = !n.children.empty() || n.refs != 0 ? Shelf::none : n.snaps.empty() ? Shelf::orphan : Shelf::leaf;
  const std::pair key{n.last_use, n.id};
  if (shelf != n.shelf || orphans_.contains(key) != (shelf == Shelf::orphan) ||
      leaves_.contains(key) != (shelf == Shelf::leaf))
    contradiction(name + "on the wrong shelf");
}

void Index::check_leases() const {
  std::map<const Node*, int> refs;
  std::map<SnapId, int> pins;
  std::map<const Root*, size_t> leases;
  for (const auto& [id, lease] : leases_) {
    ++leases[lease.root];
    for (const Node* n : lease.held) ++refs[n];
    if (lease.copied != nullptr) ++refs[lease.copied];
    if (lease.restored == nullptr) continue;
    ++refs[lease.restored];
    for (const Snapshot& s : lease.restored->snaps)
      if (lease.restored->begin() + s.offset == lease.position) ++pins[s.id];
  }
  for (const auto& [id, n] : nodes_) {
    if (n.refs != refs[&n]) contradiction(cat("block ", static_cast<int32_t>(n.block), " has ", n.refs, " refs"));
    for (const Snapshot& s : n.snaps)
      if (s.pins != pins[s.id]) contradiction(cat("snapshot ", static_cast<int32_t>(s.id), " has ", s.pins, " pins"));
  }
  const auto check_root = [&](const Root& root) {
    if (root.leases != leases[&root] || (root.leases == 0 && root.top.children.empty()))
      contradiction(cat("a root has ", root.leases, " leases"));
  };
  for (const auto& [salt, root] : roots_) check_root(*root);
  for (const auto& root : retired_) check_root(*root);
}

void Index::check() const {
  size_t snaps = 0, busy = 0, shelved = 0, own = 0;
  for (const auto& [id, node] : nodes_) {
    if (id != node.id || node.parent == nullptr) contradiction("a node is not under its id");
    check_node(node);
    snaps += node.snaps.size();
    busy += node.busy > 0 ? 1 : 0;
    shelved += node.shelf != Shelf::none ? 1 : 0;
    own += node.origin != 0 ? 1 : 0;
  }
  size_t listed = 0;
  for (const auto& [request, ids] : private_) listed += ids.size();
  if (snaps != snaps_.size() || by_block_.size() != nodes_.size() || busy != busy_ || own != listed ||
      shelved != orphans_.size() + leaves_.size())
    contradiction(cat("counts: ", snaps, " snapshots, ", nodes_.size(), " blocks, ", busy, " busy, ", shelved,
                      " evictable leaves, ", own, " of single requests"));
  check_leases();
}

}  // namespace glm53::prefix
