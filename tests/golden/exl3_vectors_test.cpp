// EXL3: codebooks, bit order, inner and dense matrices, and products against tests/golden/data/exl3-vectors (see its
// README).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "kernels/cpu/hot.h"
#include "kernels/exl3.h"
#include "kernels/half.h"
#include "kernels/ops.h"

namespace glm53 {
namespace {

const std::string kFolder = [] {
  const char* elsewhere = std::getenv("GLM53_TEST_ROOT");  // where the sources are not what they were built from
  return std::string(elsewhere != nullptr ? elsewhere : GLM53_SOURCE_DIR) + "/tests/golden/data/exl3-vectors/";
}();
constexpr Codebook kCodebooks[] = {Codebook::three_inst, Codebook::mcg, Codebook::mul1};
constexpr const char* kNames[] = {"3inst", "mcg", "mul1"};

std::string slurp(const std::string& file) {
  std::ifstream in(kFolder + file, std::ios::binary);
  REQUIRE_MESSAGE(in.good(), file);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

nlohmann::json json(const std::string& file) {
  return nlohmann::json::parse(slurp(file));
}

template <class T>
std::string_view bytes_of(const std::vector<T>& v) {
  return {reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T)};
}

std::string hex16(uint16_t v) {
  char text[8];
  std::snprintf(text, sizeof text, "%04x", v);
  return text;
}

/// What one codebook makes of a file's tensors.
struct Expected {
  Codebook codebook{};
  std::vector<float> y, dense;
  std::vector<uint16_t> inner;
};

struct Vectors {
  uint32_t version = 0, in = 0, out = 0, bits = 0, m = 0;
  std::vector<uint16_t> trellis, suh, svh, x;
  std::vector<Expected> expected;

  Weight weight(Codebook codebook) {
    Weight w;
    w.format = WeightFormat::exl3;
    w.in = in;
    w.out = out;
    w.bits = static_cast<int>(bits);
    w.codebook = codebook;
    w.codes = Tensor::of(trellis.data(), Dtype::i16, {in / 16, out / 16, 16 * bits});
    w.suh = Tensor::of(suh.data(), Dtype::f16, {in});
    w.svh = Tensor::of(svh.data(), Dtype::f16, {out});
    return w;
  }
};

class Reader {
 public:
  explicit Reader(std::string bytes) : bytes_(std::move(bytes)) {}
  template <class T>
  std::vector<T> take(size_t n) {
    std::vector<T> v(n);
    REQUIRE(at_ + n * sizeof(T) <= bytes_.size());
    std::memcpy(v.data(), bytes_.data() + at_, n * sizeof(T));
    at_ += n * sizeof(T);
    return v;
  }
  bool finished() const { return at_ == bytes_.size(); }

 private:
  std::string bytes_;
  size_t at_ = 0;
};

Vectors load(const std::string& file) {
  Reader reader(slurp(file));
  const auto header = reader.take<uint32_t>(16);
  REQUIRE(header[0] == 0x33585845u);
  Vectors v;
  v.version = header[1];
  v.in = header[2];
  v.out = header[3];
  v.bits = header[4];
  v.m = header[6];
  v.trellis = reader.take<uint16_t>(size_t{v.in} * v.out / 16 * v.bits);
  v.suh = reader.take<uint16_t>(v.in);
  v.svh = reader.take<uint16_t>(v.out);
  v.x = reader.take<uint16_t>(size_t{v.m} * v.in);
  for (const Codebook codebook : kCodebooks) {
    if (header[5] != 3 && header[5] != static_cast<uint32_t>(codebook)) continue;
    Expected e;
    e.codebook = codebook;
    e.y = reader.take<float>(size_t{v.m} * v.out);
    e.inner = reader.take<uint16_t>(size_t{header[7]} * v.out);
    e.dense = reader.take<float>(size_t{header[8]} * v.out);
    v.expected.push_back(std::move(e));
  }
  REQUIRE(reader.finished());
  return v;
}

std::vector<std::string> files() {
  std::vector<std::string> names;
  for (int k = 1; k <= 8; ++k) names.push_back("k" + std::to_string(k) + ".bin");
  names.push_back("k4_mcg_256x384.bin");
  return names;
}

std::string key_of(const std::string& file, Codebook codebook) {
  const std::string stem = file.substr(0, file.size() - 4);
  return stem.find("mcg") != std::string::npos ? stem : stem + "_" + kNames[static_cast<size_t>(codebook)];
}

double relative_norm(std::span<const float> got, std::span<const float> want) {
  double error = 0, scale = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
    scale += static_cast<double>(want[i]) * want[i];
  }
  return std::sqrt(error / scale);
}

TEST_CASE("files are those of the manifest") {
  const auto manifest = json("MANIFEST.json");
  int checked = 0;
  for (const auto& [file, entry] : manifest["files"].items()) {
    CHECK_MESSAGE(sha256_hex(slurp(file)) == entry["sha256"].get<std::string>(), file);
    ++checked;
  }
  CHECK(checked == 10);
}

TEST_CASE("codebooks: worked states and whole tables") {
  const auto samples = json("codebook_samples.json");
  for (const Codebook codebook : kCodebooks) {
    const auto& of_book = samples[kNames[static_cast<size_t>(codebook)]];
    CHECK(of_book["samples"].size() >= 16);
    for (const auto& s : of_book["samples"]) {
      const auto state = s["state"].get<uint16_t>();
      CHECK(hex16(exl3::code_bits(codebook, state)) == s["half"].get<std::string>());
      CHECK(exl3::code_table(codebook)[state] == s["value"].get<float>());
    }
    std::vector<uint16_t> table(65536);
    for (uint32_t s = 0; s < table.size(); ++s) table[s] = exl3::code_bits(codebook, static_cast<uint16_t>(s));
    CHECK(sha256_hex(bytes_of(table)) == of_book["table_sha256_fp16_le"].get<std::string>());
  }
}

TEST_CASE("states of the first tile, wrapped windows included") {
  const std::vector<std::vector<uint16_t>> first = {{0x192f, 0x325e, 0x64bd, 0xc97b}, {0x8f4e, 0x3d3b, 0xf4ee, 0xd3bb},
                                                    {0xc035, 0x01a9, 0x0d4c, 0x6a66}, {0xafb0, 0xfb08, 0xb082, 0x082f},
                                                    {0x00a9, 0x1538, 0xa704, 0xe083}, {0xaa8e, 0xa3b0, 0xec17, 0x05fd},
                                                    {0x61eb, 0xf5b9, 0xdccd, 0x66c8}, {0x5606, 0x0680, 0x803c, 0x3ce2}};
  for (int bits = 1; bits <= 8; ++bits) {
    const Vectors v = load("k" + std::to_string(bits) + ".bin");
    const std::span<const uint16_t> tile(v.trellis.data(), static_cast<size_t>(16 * bits));
    for (int i = 0; i < 4; ++i) {
      CHECK(exl3::state_at(tile, bits, i) == first[static_cast<size_t>(bits - 1)][static_cast<size_t>(i)]);
    }
    // The recurrence of spec exl3 §1.5, all around the tile.
    for (int i = 0; i < 256; ++i) {
      const uint32_t before = exl3::state_at(tile, bits, (i + 255) % 256), now = exl3::state_at(tile, bits, i);
      CHECK(((before << bits) & 0xffffu) == (now & 0xffffu & ~((1u << bits) - 1)));
    }
  }
  const Vectors v = load("k4.bin");
  CHECK(exl3::state_at({v.trellis.data(), 64}, 4, 255) == 0x2afb);
  CHECK(exl3::position_of(8).k == 2);
  CHECK(exl3::position_of(255).k == 15);
  CHECK(exl3::position_of(255).n == 15);
}

TEST_CASE("inner matrices bit for bit, dense matrices to 2e-6") {
  const auto hashes = json("MANIFEST.json")["full_inner_sha256"];
  size_t matrices = 0;
  for (const std::string& file : files()) {
    Vectors v = load(file);
    for (const Expected& e : v.expected) {
      const Weight w = v.weight(e.codebook);
      const std::vector<uint16_t> inner = exl3::inner_matrix(w);
      CHECK(std::memcmp(inner.data(), e.inner.data(), e.inner.size() * 2) == 0);
      CHECK(sha256_hex(bytes_of(inner)) == hashes[key_of(file, e.codebook)].get<std::string>());
      ++matrices;
      const std::vector<float> dense = exl3::dense_matrix(w);  // [out][in]
      const uint32_t rows[] = {0, 1, 37, v.in - 1};
      std::vector<float> got;
      for (const uint32_t k : rows) {
        for (uint32_t n = 0; n < v.out; ++n) got.push_back(dense[size_t{n} * v.in + k]);
      }
      CHECK(relative_norm(got, e.dense) < 2e-6);
    }
  }
  CHECK(matrices == hashes.size());
}

TEST_CASE("the complete matrices of k4 with MCG") {
  Vectors v = load("k4.bin");
  Reader full(slurp("k4_mcg_full.bin"));
  REQUIRE(full.take<uint32_t>(16)[1] == 3);
  const auto inner = full.take<uint16_t>(128 * 128);
  const auto dense = full.take<float>(128 * 128);
  CHECK(full.finished());
  const Weight w = v.weight(Codebook::mcg);
  CHECK(exl3::inner_matrix(w) == inner);
  std::vector<float> transposed(dense.size());
  for (size_t k = 0; k < 128; ++k) {
    for (size_t n = 0; n < 128; ++n) transposed[n * 128 + k] = dense[k * 128 + n];
  }
  CHECK(relative_norm(exl3::dense_matrix(w), transposed) < 2e-6);
}

TEST_CASE("fast tile decoders equal the plain one bit for bit") {
  for (const cpu::HotKernels* hot : cpu::hot_variants()) {
    MESSAGE("variant ", std::string(hot->name));
    for (const std::string& file : files()) {
      Vectors v = load(file);
      for (const Codebook codebook : kCodebooks) {
        const std::vector<uint16_t> inner = exl3::inner_matrix(v.weight(codebook));
        const size_t tiles = v.out / 16, words = 16 * v.bits;
        int wrong = 0;
        for (size_t tile = 0; tile < v.in / 16 * tiles; ++tile) {
          std::vector<float> out(16 * 20, NAN);
          hot->decode_tile(v.trellis.data() + tile * words, static_cast<int>(v.bits), static_cast<uint32_t>(codebook),
                           out.data(), 20);
          for (size_t k = 0; k < 16; ++k) {
            for (size_t n = 0; n < 16; ++n) {
              const uint16_t want = inner[(tile / tiles * 16 + k) * v.out + tile % tiles * 16 + n];
              const float value = f16_to_f32(want);
              wrong += std::memcmp(&out[k * 20 + n], &value, sizeof value) != 0;
            }
          }
        }
        CHECK(wrong == 0);
      }
    }
    // Every state of every codebook: with K = 8 the states of a tile are its neighbouring bytes.
    for (const Codebook codebook : kCodebooks) {
      std::vector<bool> seen(65536);
      int wrong = 0;
      for (uint32_t pass = 0; pass < 512; ++pass) {
        std::vector<uint16_t> tile(128);
        for (uint32_t i = 0; i < 128; ++i) tile[i] = static_cast<uint16_t>(((pass / 2) << 8) | (pass % 2 * 128 + i));
        std::vector<float> out(256);
        hot->decode_tile(tile.data(), 8, static_cast<uint32_t>(codebook), out.data(), 16);
        for (int i = 0; i < 256; ++i) {
          const auto [k, n] = exl3::position_of(i);
          const uint16_t state = exl3::state_at(tile, 8, i);
          const float want = exl3::code_table(codebook)[state];
          seen[state] = true;
          wrong += std::memcmp(&out[static_cast<size_t>(k * 16 + n)], &want, sizeof want) != 0;
        }
      }
      CHECK(wrong == 0);
      CHECK(std::count(seen.begin(), seen.end(), true) == 65536);
    }
  }
}

/// Copies a host tensor to where the backend computes.
Tensor upload(Ops& ops, Tensor host, Dtype dtype, std::vector<Buffer>& keep) {
  const std::span<const int64_t> shape(host.shape.data(), host.rank);
  keep.push_back(ops.allocate(static_cast<size_t>(host.elements()) * size_of(dtype), Place::device));
  const Tensor there = keep.back().view(dtype, shape);
  ops.copy(there, host);
  return there;
}

TEST_CASE("products of every file, 1 to 64 rows") {
  for (const auto& ops : test_backends()) {
    MESSAGE("backend ", std::string(ops->backend()));
    const bool exact = ops->activation() == Dtype::f32;
    for (const std::string& file : files()) {
      Vectors v = load(file);
      for (const Expected& e : v.expected) {
        std::vector<Buffer> keep;
        Weight w = v.weight(e.codebook);
        for (Tensor* t : {&w.codes, &w.suh, &w.svh}) *t = upload(*ops, *t, t->dtype, keep);
        for (const uint32_t rows : {1u, 2u, 8u, 16u, 17u, 64u}) {
          std::vector<float> x(size_t{rows} * v.in), y(size_t{rows} * v.out, NAN);
          for (size_t i = 0; i < x.size(); ++i) x[i] = f16_to_f32(v.x[i % v.x.size()]);
          const Tensor there = upload(*ops, Tensor::of(x.data(), Dtype::f32, {rows, v.in}), ops->activation(), keep);
          const Tensor result = upload(*ops, Tensor::of(y.data(), Dtype::f32, {rows, v.out}), Dtype::f32, keep);
          ops->linear({.x = there, .w = &w, .y = result});
          ops->copy(Tensor::of(y.data(), Dtype::f32, {rows, v.out}), result);
          ops->synchronize();
          for (uint32_t r = 0; r < rows; ++r) {
            const auto want = std::span(e.y).subspan(size_t{r % v.m} * v.out, v.out);
            CHECK(relative_norm(std::span(y).subspan(size_t{r} * v.out, v.out), want) < (exact ? 2e-6 : 8e-3));
          }
        }
      }
    }
  }
}

TEST_CASE("column and row shards are slices") {
  Vectors v = load("k4_mcg_256x384.bin");
  const Weight whole = v.weight(Codebook::mcg);
  const std::vector<float> dense = exl3::dense_matrix(whole);
  for (int64_t part = 0; part < 3; ++part) {  // outputs
    Weight w = whole;
    w.out = 128;
    std::vector<uint16_t> codes;
    for (int64_t tk = 0; tk < 16; ++tk) {
      const auto* from = v.trellis.data() + (tk * 24 + part * 8) * 64;
      codes.insert(codes.end(), from, from + 8 * 64);
    }
    w.codes = Tensor::of(codes.data(), Dtype::i16, {16, 8, 64});
    w.svh = whole.svh.columns(part * 128, part * 128 + 128);
    const std::vector<float> got = exl3::dense_matrix(w);
    CHECK(std::memcmp(got.data(), dense.data() + part * 128 * 256, got.size() * 4) == 0);
  }
  for (int64_t part = 0; part < 2; ++part) {  // inputs
    Weight w = whole;
    w.in = 128;
    w.codes = whole.codes.rows(part * 8, part * 8 + 8);
    w.suh = whole.suh.columns(part * 128, part * 128 + 128);
    const std::vector<float> got = exl3::dense_matrix(w);
    for (int64_t n = 0; n < 384; ++n) {
      CHECK(std::memcmp(got.data() + n * 128, dense.data() + n * 256 + part * 128, 128 * 4) == 0);
    }
  }
}

}  // namespace
}  // namespace glm53
