// Headers of safetensors files, right and wrong.
#include "engine/loader/safetensors.h"

#include <doctest/doctest.h>

#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Caught;
using testing::raw_file;
using testing::TempDir;
using testing::write_text;

Caught open_bytes(const std::string& content) {
  const TempDir dir;
  write_text(dir / "x.safetensors", content);
  return caught([&] { const SafetensorsFile file(dir / "x.safetensors"); });
}

/// A file of one tensor "t" whose header entry is `entry`, with 8 bytes of data.
Caught open_entry(const std::string& entry) {
  return open_bytes(raw_file("{\"t\":" + entry + "}", "12345678"));
}

TEST_CASE("a right file") {
  const TempDir dir;
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[1,2],"data_offsets":[4,12]},)"
      R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"none":{"dtype":"I64","shape":[3,0],"data_offsets":[4,4]},)"
      R"("scalar":{"dtype":"I32","shape":[],"data_offsets":[12,16]}})";
  write_text(dir / "x.safetensors", raw_file(header + std::string((8 - header.size() % 8) % 8, ' '),
                                             std::string("abcd\0\0\x80\x3f\0\0\0\x40wxyz", 16)));
  SafetensorsFile file(dir / "x.safetensors");
  CHECK(file.tensors().size() == 4);
  CHECK(file.tensors().find("a")->second.file == "x.safetensors");
  CHECK(file.has("scalar"));
  CHECK_FALSE(file.has("__metadata__"));
  const auto a = file.bytes(file.tensors().find("a")->second);
  CHECK(std::string(reinterpret_cast<const char*>(a.data()), a.size()) == "abcd");
  SafetensorsFile moved = std::move(file);
  CHECK(moved.view("scalar").rank == 0);
  CHECK(moved.view("none").elements() == 0);
  const Tensor b = moved.view("b");
  CHECK(b.shape[1] == 2);
  CHECK(b.as<const float>()[0] == 1.0f);
  CHECK(b.as<const float>()[1] == 2.0f);
  CHECK(caught([&] { moved.view("c"); }).says("no tensor c"));
}

TEST_CASE("views that cannot be are refused") {
  const TempDir dir;
  // The header length is odd, so the data of an f32 tensor is misaligned.
  std::string header = R"({"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
  while (header.size() % 2 == 0) header += ' ';
  write_text(dir / "odd.safetensors", raw_file(header, "abcd"));
  const SafetensorsFile odd(dir / "odd.safetensors");
  CHECK(odd.bytes(odd.tensors().find("t")->second).size() == 4);
  CHECK(caught([&] { odd.view("t"); }).says("not aligned"));
  write_text(dir / "deep.safetensors",
             raw_file(R"({"t":{"dtype":"U8","shape":[1,1,1,1,4],"data_offsets":[0,4]}})", "abcd"));
  const SafetensorsFile deep(dir / "deep.safetensors");
  CHECK(caught([&] { deep.view("t"); }).says("5 dimensions"));
}

TEST_CASE("every wrong header is refused by name") {
  const auto wrong = [](const Caught& c, const std::string& part) {
    CAPTURE(c.text);
    CHECK(c.code == Code::weights);
    CHECK(c.says("x.safetensors"));
    CHECK(c.says(part));
  };
  wrong(open_bytes(""), "too few");
  wrong(open_bytes("1234567"), "too few");
  wrong(open_bytes(raw_file("{}", "").substr(0, 9)), "truncated");
  wrong(open_bytes(std::string("\xff\xff\xff\xff\xff\xff\xff\xff{}", 10)), "at most 100000000");
  wrong(open_bytes(raw_file("{\"t\":", "")), "invalid JSON");
  wrong(open_bytes(raw_file("[1]", "")), "expected an object");
  wrong(open_bytes(raw_file("{\"t\xff\":{}}", "")), "invalid JSON");
  wrong(open_bytes(raw_file(std::string(5000, '[') + std::string(5000, ']'), "")), "nested deeper");
  wrong(open_bytes(raw_file("{\"\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", "")), "name has 0 bytes");
  wrong(open_entry("1"), "not an object");
  wrong(open_entry(R"({"shape":[8],"data_offsets":[0,8]})"), "\"dtype\" is missing");
  wrong(open_entry(R"({"dtype":"U8","data_offsets":[0,8]})"), "\"shape\" is missing");
  wrong(open_entry(R"({"dtype":"U8","shape":[8]})"), "\"data_offsets\" is missing");
  wrong(open_entry(R"({"dtype":"F4","shape":[8],"data_offsets":[0,8]})"), "F4");
  wrong(open_entry(R"({"dtype":7,"shape":[8],"data_offsets":[0,8]})"), "\"dtype\" is 7");
  wrong(open_entry(R"({"dtype":"U8","shape":8,"data_offsets":[0,8]})"), "not a list");
  wrong(open_entry(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,8]})"), "9 dimensions");
  wrong(open_entry(R"({"dtype":"U8","shape":[-8],"data_offsets":[0,8]})"), "holds -8");
  wrong(open_entry(R"({"dtype":"U8","shape":[8.0],"data_offsets":[0,8]})"), "holds 8.0");
  wrong(open_entry(R"({"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,8]})"),
        "holds 18446744073709551615");
  wrong(open_entry(R"({"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]})"), "overflows");
  wrong(open_entry(R"({"dtype":"U8","shape":[8],"data_offsets":[0]})"), "not a pair");
  wrong(open_entry(R"({"dtype":"U8","shape":[8],"data_offsets":[-8,0]})"), "not a pair");
  wrong(open_entry(R"({"dtype":"U8","shape":[8],"data_offsets":[8,0]})"), "outside");
  wrong(open_entry(R"({"dtype":"U8","shape":[9],"data_offsets":[0,9]})"), "outside the file's 8 bytes");
  wrong(open_entry(R"({"dtype":"U8","shape":[4],"data_offsets":[0,8]})"), "holds 8 bytes, its shape and dtype need 4");
  wrong(open_entry(R"({"dtype":"U8","shape":[7],"data_offsets":[1,8]})"), "bytes 0 to 1");
  wrong(open_entry(R"({"dtype":"U8","shape":[7],"data_offsets":[0,7]})"), "bytes 7 to 8");
  const std::string pair = R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":{"dtype":"U8","shape":[)";
  wrong(open_entry(pair + R"(5],"data_offsets":[3,8]})"), "overlaps");
  wrong(open_entry(pair + R"(3],"data_offsets":[5,8]})"), "bytes 4 to 5");
}

TEST_CASE("damaged files never do worse than an error") {
  const std::string good = testing::file_of(
      {{"alpha", {"F32", {2, 3}, std::string(24, 'a')}}, {"beta", {"BF16", {5}, std::string(10, 'b')}}});
  const TempDir dir;
  const std::string path = dir / "x.safetensors";
  std::mt19937 random(11);
  int opened = 0, refused = 0;
  uint64_t touched = 0;
  const auto attempt = [&](const std::string& content) {
    write_text(path, content);
    try {
      const SafetensorsFile file(path);
      for (const auto& [name, info] : file.tensors()) {
        for (const std::byte b : file.bytes(info)) touched += std::to_integer<uint64_t>(b);  // every byte can be read
        ++opened;
      }
    } catch (const Error& e) {
      CHECK(e.code() == Code::weights);
      ++refused;
    }
  };
  for (size_t n = 0; n < good.size(); n += 3) attempt(good.substr(0, n));
  for (int i = 0; i < 2000; ++i) {
    std::string bad = good;
    const size_t edits = 1 + random() % 3;
    for (size_t e = 0; e < edits; ++e) bad[random() % bad.size()] = static_cast<char>(random());
    attempt(bad);
  }
  CHECK(opened > 0);
  CHECK(touched > 0);
  CHECK(refused > 1000);
}

}  // namespace
}  // namespace glm53
