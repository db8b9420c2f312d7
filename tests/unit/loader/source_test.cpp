// Weights cut for ranks: the parts of all ranks put together are the whole.
#include "engine/loader/source.h"

#include <cstring>

#include <doctest/doctest.h>

#include "engine/loader/config.h"
#include "kernels/exl3.h"
#include "kernels/quantise.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using testing::caught;
using testing::Filler;
using testing::NewTensors;
using testing::TempDir;

struct Folder {
  TempDir dir;
  std::unique_ptr<Ops> ops = make_cpu_ops(1);
  std::vector<std::unique_ptr<WeightSource>> sources;

  explicit Folder(const NewTensors& tensors) {
    testing::write_text(dir / "model.safetensors", testing::file_of(tensors));
  }
  WeightSource& rank(int r, int size) {
    sources.push_back(open_checkpoint(dir.path(), FormatPolicy::as_stored(), {r, size}, *ops));
    return *sources.back();
  }
};

std::vector<float> values(const Weight& w) {
  std::vector<float> out;
  for (int64_t i = 0; i < w.codes.elements(); ++i)
    out.push_back(w.format == WeightFormat::f32 ? w.codes.as<const float>()[i]
                                                : bf16_to_f32(w.codes.as<const uint16_t>()[i]));
  return out;
}

NewTensors plain() {
  Filler fill;
  return {{"a.weight", fill.bf16({8, 12}, 1)},
          {"b.weight", fill.bf16({4, 12}, 1)},
          {"conv.weight", fill.bf16({8, 1, 4}, 1)},
          {"v", fill.f32({6}, 1)},
          {"scalar", fill.f32({}, 1)},
          {"big.weight", fill.bf16({1024, 1024}, 1)},
          {"codes", fill.f16({4})}};
}

TEST_CASE("plain tensors: whole, rows, columns") {
  Folder f(plain());
  const Weight whole = f.rank(0, 1).take("a.weight", WeightGroup::mla, Split::rows);
  CHECK(whole.format == WeightFormat::bf16);
  CHECK(whole.out == 8);
  CHECK(whole.in == 12);
  const std::vector<float> all = values(whole);
  for (int r = 0; r < 4; ++r) {
    WeightSource& source = f.rank(r, 4);
    const Weight rows = source.take("a", WeightGroup::mla, Split::rows),
                 columns = source.take("a.weight", WeightGroup::mla, Split::columns);
    CHECK(rows.out == 2);
    CHECK(values(rows) == std::vector<float>(all.begin() + r * 24, all.begin() + (r + 1) * 24));
    CHECK(columns.in == 3);
    std::vector<float> expected;
    for (int row = 0; row < 8; ++row)
      for (int c = 0; c < 3; ++c) expected.push_back(all[static_cast<size_t>(row * 12 + r * 3 + c)]);
    CHECK(values(columns) == expected);
    CHECK(values(source.take("a.weight", WeightGroup::mla, Split::none)) == all);
    CHECK(source.bytes_taken() == 48 + 48 + 192);
    CHECK(reinterpret_cast<uintptr_t>(columns.codes.data) % 256 == 0);
  }
  WeightSource& one = f.rank(0, 1);
  const Weight conv = one.take("conv.weight", WeightGroup::exact, Split::rows),
               v = one.take("v", WeightGroup::exact, Split::none);
  CHECK(conv.out == 8);
  CHECK(conv.in == 4);
  CHECK(v.format == WeightFormat::f32);
  CHECK(v.out == 6);
  CHECK(v.in == 1);
  CHECK(one.take("scalar", WeightGroup::exact, Split::none).out == 1);
  const Weight big = one.take("big.weight", WeightGroup::head, Split::none);
  CHECK(bf16_to_f32(big.codes.as<const uint16_t>()[1024 * 1024 - 1]) != 0);
  CHECK(one.has("a"));
  CHECK(one.has("v"));
  CHECK_FALSE(one.has("w"));
}

TEST_CASE("stacked rows, each cut on its own") {
  Folder f(plain());
  const StackPart parts[] = {{"a.weight", Split::rows}, {"b.weight", Split::none}, {"a.weight", Split::rows}};
  const std::vector<float> a = values(f.rank(1, 2).take("a.weight", WeightGroup::kda_in, Split::rows)),
                           b = values(f.rank(1, 2).take("b.weight", WeightGroup::kda_in, Split::none));
  const Weight stacked = f.rank(1, 2).take_stacked(parts, WeightGroup::kda_in);
  CHECK(stacked.out == 12);
  std::vector<float> expected = a;
  expected.insert(expected.end(), b.begin(), b.end());
  expected.insert(expected.end(), a.begin(), a.end());
  CHECK(values(stacked) == expected);
  const StackPart uneven[] = {{"a.weight", Split::none}, {"big.weight", Split::none}},
                  mixed[] = {{"conv.weight", Split::none}, {"v", Split::none}},
                  across[] = {{"a.weight", Split::columns}};
  CHECK(caught([&] { f.rank(0, 1).take_stacked(uneven, WeightGroup::kda_in); }).says("cannot be stacked"));
  CHECK(caught([&] { f.rank(0, 1).take_stacked(mixed, WeightGroup::kda_in); }).says("cannot be stacked"));
  CHECK(caught([&] { f.rank(0, 1).take_stacked(across, WeightGroup::kda_in); }).code == Code::internal);
  CHECK(caught([&] { f.rank(0, 1).take_stacked({}, WeightGroup::kda_in); }).code == Code::internal);
}

NewTensors packed(int64_t out, int64_t in, uint32_t mcg = 0xCBAC1FEDu) {
  Filler fill;
  return {{"p.trellis", fill.i16({in / 16, out / 16, 64})},
          {"p.suh", fill.f16({in})},
          {"p.svh", fill.f16({out})},
          {"p.mcg", Filler::marker(mcg, {1})}};
}

TEST_CASE("EXL3: the dense matrix of a part is the part of the dense matrix") {
  constexpr int64_t kOut = 256, kIn = 384;
  Folder f(packed(kOut, kIn));
  const Weight whole = f.rank(0, 1).take("p", WeightGroup::routed_expert, Split::none);
  CHECK(whole.format == WeightFormat::exl3);
  CHECK(whole.bits == 4);
  CHECK(whole.codebook == Codebook::mcg);
  CHECK(whole.out == kOut);
  CHECK(whole.in == kIn);
  const std::vector<float> dense = exl3::dense_matrix(whole);
  const auto at = [&](int64_t o, int64_t i) { return dense[static_cast<size_t>(o * kIn + i)]; };
  for (int r = 0; r < 2; ++r) {
    const Weight rows = f.rank(r, 2).take("p.weight", WeightGroup::routed_expert, Split::rows);
    const std::vector<float> part = exl3::dense_matrix(rows);
    REQUIRE(part.size() == static_cast<size_t>(128 * kIn));
    for (int64_t o = 0; o < 128; o += 7)
      for (int64_t i = 0; i < kIn; i += 5) REQUIRE(part[static_cast<size_t>(o * kIn + i)] == at(o + r * 128, i));
  }
  for (int r = 0; r < 3; ++r) {
    const Weight columns = f.rank(r, 3).take("p.trellis", WeightGroup::routed_expert, Split::columns);
    const std::vector<float> part = exl3::dense_matrix(columns);
    REQUIRE(part.size() == static_cast<size_t>(kOut * 128));
    for (int64_t o = 0; o < kOut; o += 7)
      for (int64_t i = 0; i < 128; i += 5) REQUIRE(part[static_cast<size_t>(o * 128 + i)] == at(o, i + r * 128));
  }
  CHECK(caught([&] {
          f.rank(0, 4).take("p", WeightGroup::routed_expert, Split::rows);
        }).says("cannot be cut into 4 parts of a multiple of 128"));
  CHECK(
      caught([&] { f.rank(0, 5).take("p", WeightGroup::routed_expert, Split::columns); }).says("cannot be cut into 5"));
}

TEST_CASE("EXL3: codebook markers and damaged packs") {
  NewTensors mul1 = packed(128, 128);
  mul1.erase("p.mcg");
  CHECK(Folder(mul1).rank(0, 1).take("p", WeightGroup::routed_expert, Split::none).codebook == Codebook::three_inst);
  mul1["p.mul1"] = Filler::marker(0x83DCD12Du);
  CHECK(Folder(mul1).rank(0, 1).take("p", WeightGroup::routed_expert, Split::none).codebook == Codebook::mul1);
  const auto take = [](const NewTensors& tensors) {
    Folder f(tensors);
    return caught([&] { f.rank(0, 1).take("p", WeightGroup::routed_expert, Split::none); });
  };
  CHECK(take(packed(128, 128, 5)).says("the marker of this codebook"));
  NewTensors both = packed(128, 128), legacy = both, narrow = packed(64, 128), lost = both, scale = both;
  both["p.mul1"] = Filler::marker(0x83DCD12Du);
  CHECK(take(both).says("at most one codebook"));
  legacy["p.su"] = Filler().i16({8});
  CHECK(take(legacy).says("p.su"));
  CHECK(take(narrow).says("multiples of 128"));
  lost.erase("p.svh");
  CHECK(take(lost).says("no tensor p.svh"));
  scale["p.suh"] = Filler().f16({127});
  CHECK(take(scale).says("p.suh: not f16 [128]"));
}

TEST_CASE("what is refused") {
  Folder f(plain());
  CHECK(caught([&] { f.rank(0, 1).take("nothing", WeightGroup::mla, Split::none); }).code == Code::weights);
  CHECK(caught([&] {
          f.rank(0, 3).take("a.weight", WeightGroup::mla, Split::rows);
        }).says("8 rows cannot be cut into 3"));
  CHECK(caught([&] { f.rank(0, 1).take("codes", WeightGroup::mla, Split::none); }).says("stored as f16"));
  FormatPolicy policy = FormatPolicy::as_stored();
  for (const auto& [group, format] : {std::pair{WeightGroup::routed_expert, WeightFormat::fp8_row},
                                      {WeightGroup::exact, WeightFormat::int4_g32},
                                      {WeightGroup::kda_out, WeightFormat::fp8_g128}}) {
    FormatPolicy refused = policy;
    refused.of_group[static_cast<size_t>(group)] = format;
    const auto error = caught([&] { (void)open_checkpoint(f.dir.path(), refused, {0, 1}, *f.ops); });
    CHECK(error.code == Code::unavailable);
    CHECK(error.says(std::string(name(group))));
  }
  policy.of_group[static_cast<size_t>(WeightGroup::mla)] = WeightFormat::int4_g32;
  const auto source = open_checkpoint(f.dir.path(), policy, {0, 1}, *f.ops);
  CHECK(caught([&] { source->take("a.weight", WeightGroup::mla, Split::none); }).says("a multiple of 32"));
}

TEST_CASE("dense weights are quantised while they are loaded, each rank its part") {
  Filler fill;
  Folder f(NewTensors{
      {"a.weight", fill.bf16({8, 128}, 1)}, {"b.weight", fill.bf16({4, 128}, 1)}, {"c.weight", fill.f32({4, 64}, 1)}});
  for (const WeightFormat format : {WeightFormat::fp8_row, WeightFormat::int4_g32}) {
    FormatPolicy policy = FormatPolicy::as_stored();
    policy.of_group[static_cast<size_t>(WeightGroup::mla)] = format;
    const auto check = [&](const Weight& got, const Weight& stored) {
      REQUIRE(got.format == format);
      REQUIRE(got.out == stored.out);
      REQUIRE(got.in == stored.in);
      const std::vector<float> wide = values(stored);
      std::vector<std::byte> codes(static_cast<size_t>(code_bytes(format, got.out, got.in))),
          scales(static_cast<size_t>(scale_bytes(format, got.out, got.in)));
      quantise_rows(format, wide.data(), got.out, got.in, codes.data(), scales.data());
      CHECK(std::memcmp(codes.data(), got.codes.data, codes.size()) == 0);
      CHECK(std::memcmp(scales.data(), got.scales.data, scales.size()) == 0);
    };
    for (const int rank : {0, 1}) {
      const auto plain = open_checkpoint(f.dir.path(), FormatPolicy::as_stored(), {rank, 2}, *f.ops);
      const auto source = open_checkpoint(f.dir.path(), policy, {rank, 2}, *f.ops);
      using enum WeightGroup;
      check(source->take("a.weight", mla, Split::rows), plain->take("a.weight", mla, Split::rows));
      check(source->take("a.weight", mla, Split::columns), plain->take("a.weight", mla, Split::columns));
      check(source->take("c.weight", mla, Split::columns), plain->take("c.weight", mla, Split::columns));
      const StackPart parts[] = {{"a.weight", Split::rows}, {"b.weight", Split::none}};
      check(source->take_stacked(parts, mla), plain->take_stacked(parts, mla));
      CHECK(source->take("a.weight", kda_in, Split::rows).format == WeightFormat::bf16);
      CHECK(source->digest() != plain->digest());
    }
  }
}

TEST_CASE("the digest tells shards and policies apart") {
  Folder f(plain());
  FormatPolicy policy = FormatPolicy::as_stored();
  policy.of_group[static_cast<size_t>(WeightGroup::head)] = WeightFormat::f32;
  const std::string a = f.rank(0, 2).digest(), b = f.rank(1, 2).digest();
  CHECK(a != b);
  CHECK(a == f.rank(0, 2).digest());
  CHECK(a != open_checkpoint(f.dir.path(), policy, {0, 2}, *f.ops)->digest());
}

TEST_CASE("what is read ahead is what is read at once, in the planned order and in another") {
  Filler fill;
  NewTensors tensors = plain();
  tensors["wide.weight"] = fill.bf16({5, 90'000}, 1);  // a part of a row is far from that of the next
  const std::vector<Take> takes = {{{{"wide.weight", Split::columns}}, WeightGroup::mla, false},
                                   {{{"a.weight", Split::rows}, {"b.weight", Split::rows}}, WeightGroup::kda_in, true},
                                   {{{"big.weight", Split::columns}}, WeightGroup::mla, false},
                                   {{{"v", Split::rows}}, WeightGroup::exact, false},
                                   {{{"big.weight", Split::rows}}, WeightGroup::mla, false}};
  const TempDir dir;
  testing::write_text(dir / "model.safetensors", testing::file_of(tensors));
  const auto ops = make_cpu_ops(1);
  const auto checkpoint = std::make_shared<const Checkpoint>(dir.path());
  const auto taken = [](WeightSource& source, const Take& t) {
    return t.stacked ? source.take_stacked(t.parts, t.group)
                     : source.take(t.parts.front().name, t.group, t.parts.front().split);
  };
  for (const size_t block : {size_t{5000}, size_t{1} << 20})
    for (const int rank : {0, 1}) {
      CAPTURE(block);
      const auto plainly = make_checkpoint_source(checkpoint, FormatPolicy::as_stored(), {rank, 2}, *ops);
      const SourceOptions options{.takes = takes, .read = {.block = block}};
      const auto ahead = make_checkpoint_source(checkpoint, FormatPolicy::as_stored(), {rank, 2}, *ops, options);
      const auto other = make_checkpoint_source(checkpoint, FormatPolicy::as_stored(), {rank, 2}, *ops, options);
      for (const size_t i : {0u, 1u, 2u, 3u, 4u, 0u}) {
        CAPTURE(i);
        const std::vector<float> expected = values(taken(*plainly, takes[i]));
        CHECK(values(taken(*ahead, takes[i])) == expected);  // once more after the plan has ended
        if (i != 1) CHECK(values(taken(*other, takes[i])) == expected);
      }
      CHECK(ahead->bytes_taken() == plainly->bytes_taken());
    }
  SourceOptions passing{.takes = takes};
  passing.keep = false;
  const auto source = make_checkpoint_source(checkpoint, FormatPolicy::as_stored(), {0, 2}, *ops, passing);
  const auto kept = make_checkpoint_source(checkpoint, FormatPolicy::as_stored(), {0, 2}, *ops);
  for (const Take& t : takes) CHECK(values(taken(*source, t)) == values(taken(*kept, t)));
}

}  // namespace
}  // namespace glm53
