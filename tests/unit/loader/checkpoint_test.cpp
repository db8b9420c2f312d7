// Folders: an index with shards, or one file.
#include <doctest/doctest.h>

#include "engine/loader/safetensors.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Caught;
using testing::file_of;
using testing::NewTensors;
using testing::TempDir;
using testing::write_text;

const NewTensors kOne = {{"a", {"U8", {2}, "aa"}}, {"b", {"U8", {1}, "b"}}};
const NewTensors kTwo = {{"c", {"U8", {3}, "ccc"}}};

void write_index(const TempDir& dir, const std::string& weight_map) {
  write_text(dir / "model.safetensors.index.json", "{\"metadata\":{},\"weight_map\":" + weight_map + "}");
}

struct Shards {
  TempDir dir;
  explicit Shards(
      const std::string& weight_map = R"({"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors"})") {
    write_text(dir / "s1.safetensors", file_of(kOne));
    write_text(dir / "s2.safetensors", file_of(kTwo));
    write_index(dir, weight_map);
  }
  Caught open() const {
    return caught([&] { const Checkpoint checkpoint(dir.path()); });
  }
};

TEST_CASE("shards with an index, or one file") {
  const Shards shards;
  const Checkpoint checkpoint(shards.dir.path());
  CHECK(checkpoint.tensors().size() == 3);
  CHECK(checkpoint.info("c").file == "s2.safetensors");
  CHECK(checkpoint.view("c").as<const uint8_t>()[2] == 'c');
  CHECK(checkpoint.bytes("b").size() == 1);
  CHECK(checkpoint.has("a"));
  CHECK_FALSE(checkpoint.has("d"));
  CHECK(caught([&] { checkpoint.view("d"); }).says("no tensor d"));

  const TempDir single;
  write_text(single / "model.safetensors", file_of(kOne));
  CHECK(Checkpoint(single.path()).tensors().size() == 2);
  const TempDir empty;
  CHECK(caught([&] { const Checkpoint c(empty.path()); }).says("neither"));
}

TEST_CASE("the digest follows headers and index, not data") {
  const TempDir a, b, c;
  write_text(a / "model.safetensors", file_of({{"a", {"U8", {2}, "aa"}}}));
  write_text(b / "model.safetensors", file_of({{"a", {"U8", {2}, "bb"}}}));
  write_text(c / "model.safetensors", file_of({{"a", {"I8", {2}, "aa"}}}));
  CHECK(Checkpoint(a.path()).digest() == Checkpoint(b.path()).digest());
  CHECK(Checkpoint(a.path()).digest() != Checkpoint(c.path()).digest());
}

TEST_CASE("an index that does not fit its shards is refused") {
  const auto wrong = [](const Caught& c, const std::string& part) {
    CAPTURE(c.text);
    CHECK(c.code == Code::weights);
    CHECK(c.says(part));
  };
  wrong(Shards(R"({"a":"s1.safetensors","b":"s1.safetensors","c":"s3.safetensors","d":"s4.safetensors"})").open(),
        "2 of 3 shards are missing: s3.safetensors, s4.safetensors");
  wrong(Shards(R"({"a":"s1.safetensors","b":"s2.safetensors","c":"s2.safetensors"})").open(),
        "tensor b is not in s2.safetensors but in s1.safetensors");
  wrong(Shards(R"({"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors","d":"s2.safetensors"})").open(),
        "tensor d is not in s2.safetensors");
  wrong(Shards(R"({"a":"s1.safetensors","c":"s2.safetensors"})").open(), "does not name tensor b of s1.safetensors");
  wrong(Shards("{}").open(), "weight_map");
  wrong(Shards("[]").open(), "weight_map");
  wrong(Shards(R"({"a":7})").open(), "plain file name");
  wrong(Shards(R"({"a":"../s1.safetensors"})").open(), "plain file name");
  const Shards twice;
  write_text(twice.dir / "s2.safetensors", file_of({{"a", {"U8", {1}, "x"}}, {"c", {"U8", {3}, "ccc"}}}));
  wrong(twice.open(), "tensor a is in s1.safetensors and in s2.safetensors");
  const Shards damaged;
  write_text(damaged.dir / "s2.safetensors", "short");
  wrong(damaged.open(), "s2.safetensors");
  const Shards text;
  write_text(text.dir / "model.safetensors.index.json", "{");
  wrong(text.open(), "invalid JSON");
}

}  // namespace
}  // namespace glm53
