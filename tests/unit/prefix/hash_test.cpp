#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "common/digest.h"
#include "common/error.h"
#include "engine/prefix/chain_hash.h"
#include "tests/unit/prefix/world.h"

namespace glm53::prefix {
namespace {

Prefix of(const Tokens& t, std::span<const Media> media = {}) {
  return {t, media, 0, 0};
}

const CacheIdentity kIdentity{"rev", "weights", "fp8_c528", 4, 512};

TEST_CASE("a full block is SHA-256 of the hash before and the tokens") {
  const ChainHash root = chain_root(kIdentity, "");
  const Tokens t = text(3, 64);
  std::string message(root.begin(), root.end());
  for (const int32_t v : t)
    for (int shift = 0; shift < 32; shift += 8) message += static_cast<char>(v >> shift & 255);
  CHECK(to_text(chain_next(root, {0, t, {}})) == sha256_hex(message).substr(0, 32));
  // Computed by another program (Python's hashlib) from the same description.
  CHECK(to_text(root) == "6cdf6756855f34f982c911de54b813de");
}

TEST_CASE("equal prefixes have equal chains, and nothing else has") {
  const ChainHash root = chain_root(kIdentity, "");
  const Tokens a = text(1, 200);
  const auto chain = chain_of(root, of(a));
  REQUIRE(chain.size() == 4);
  const auto longer = chain_of(root, of(a + text(2, 100)));
  for (size_t i = 0; i < 3; ++i) CHECK(chain[i] == longer[i]);
  CHECK(chain[3] != longer[3]);
  Tokens other = a;
  other[0] += 1;
  const auto changed = chain_of(root, of(other));
  for (size_t i = 0; i < 4; ++i) CHECK(chain[i] != changed[i]);
  CHECK(chain_of(root, of({})).empty());
  std::set<ChainHash> lengths;
  for (int32_t n = 1; n <= 64; ++n) lengths.insert(chain_of(root, of(Tokens(static_cast<size_t>(n), 63)))[0]);
  CHECK(lengths.size() == 64);
  CHECK_THROWS_AS(chain_next(root, {0, {}, {}}), Error);
}

TEST_CASE("every field of the identity, and the salt, makes another root") {
  std::set<ChainHash> roots{chain_root(kIdentity, "")};
  for (int field = 0; field < 5; ++field) {
    CacheIdentity i = kIdentity;
    if (field == 0) i.model_revision += "x";
    if (field == 1) i.weights_digest += "x";
    if (field == 2) i.kv_format += "x";
    if (field == 3) ++i.kpool;
    if (field == 4) ++i.topk;
    roots.insert(chain_root(i, ""));
  }
  roots.insert(chain_root(kIdentity, "salt"));
  // The border between two fields counts.
  roots.insert(chain_root({"re", "vweights", "fp8_c528", 4, 512}, ""));
  CHECK(roots.size() == 8);
}

TEST_CASE("media are part of the name") {
  const ChainHash root = chain_root(kIdentity, "");
  const Tokens t(128, 7);
  const std::vector<Media> a{{10, 100, "cat"}}, b{{10, 100, "dog"}}, shifted{{11, 100, "cat"}};
  CHECK(chain_of(root, of(t, a)) == chain_of(root, of(t, a)));
  CHECK(chain_of(root, of(t, a))[0] != chain_of(root, of(t, b))[0]);
  CHECK(chain_of(root, of(t, a))[0] != chain_of(root, of(t, shifted))[0]);
  CHECK(chain_of(root, of(t, a))[0] != chain_of(root, of(t))[0]);
}

}  // namespace
}  // namespace glm53::prefix
