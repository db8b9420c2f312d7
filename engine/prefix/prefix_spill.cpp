// What the index tells of things that it evicts, so that they can be kept elsewhere and found again.
#include <algorithm>

#include "common/error.h"
#include "engine/prefix/prefix_index.h"

namespace glm53::prefix {

/// Everybody's rows in a whole block, under a name that a later process finds too.
bool Index::nameable(const Node& node) const {
  return options_.identity && node.origin == 0 && node.size == kBlockTokens && !node.root->retired;
}

const ChainHash& Index::chain_of(Node& node) const {
  std::vector<Node*> unnamed;
  for (Node* n = &node; !n->chain; n = n->parent) {
    unnamed.push_back(n);
    if (n->parent == nullptr) break;
  }
  for (auto at = unnamed.rbegin(); at != unnamed.rend(); ++at) {
    Node& n = **at;
    n.chain =
        n.parent == nullptr ? chain_root(*options_.identity, n.root->salt) : chain_next(*n.parent->chain, n.slice());
  }
  return *node.chain;
}

void Index::name_snapshot(Node& node, const Snapshot& snapshot, Freed& freed) const {
  if (!nameable(node) || snapshot.offset != kBlockTokens) return;
  freed.evicted.push_back({.block = BlockId::null,
                           .snap = snapshot.id,
                           .cls = snapshot.cls,
                           .position = node.begin() + kBlockTokens,
                           .name = chain_of(node),
                           .tokens = node.tokens});
  // From here up, blocks are worth keeping: there is a state to go on from.
  for (Node* n = &node; n->parent != nullptr && !n->spilled; n = n->parent) n->spilled = true;
}

void Index::name_block(Node& node, Freed& freed) const {
  if (!node.spilled || !nameable(node)) return;
  freed.evicted.push_back({.block = node.block,
                           .snap = SnapId::none,
                           .cls = SnapClass::interval,
                           .position = node.begin() + kBlockTokens,
                           .name = chain_of(node),
                           .tokens = node.tokens});
}

Hit Index::hold_path(std::string_view salt, const Prefix& prefix) {
  Hit hit;
  Lease& lease = open(salt, hit.lease);
  const auto size = static_cast<int32_t>(prefix.tokens.size());
  hit.position = match(*lease.root, prefix, size - 1).position;
  ++tick_;
  Node* at = &lease.root->top;
  const int32_t end = std::clamp(prefix.prompt, 0, size);
  for (int32_t begin = 0; begin + kBlockTokens <= end; begin += kBlockTokens) {
    const auto media = media_of_block(prefix.media, begin, kBlockTokens);
    const Slice slice{0, prefix.tokens.subspan(static_cast<size_t>(begin), kBlockTokens), media};
    const auto next = at->children.find(slice);
    if (next == at->children.end()) break;
    at = *next;
    touch(*at);
    hold(lease, *at);
    hit.shared.push_back(at->block);
  }
  hit.matched = static_cast<int32_t>(hit.shared.size()) * kBlockTokens;
  return hit;
}

}  // namespace glm53::prefix
