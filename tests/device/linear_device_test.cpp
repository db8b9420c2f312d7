// Dense products on a GPU against f64, for the shapes and rows that the kernels cut differently.
#include <cstring>

#include "tests/device/device.h"

namespace glm53::test {
namespace {

struct Case {
  int64_t out, in;
};
constexpr Case kCases[] = {{16, 32}, {17, 64}, {128, 128}, {288, 4096}, {1000, 96}, {513, 2080}, {96, 40}, {7, 36}};

Floats product_of(Device& device, const Weight& w, const Tensor& x, Dtype y_type, int window, float beta,
                  const Floats& y0) {
  const int64_t rows = x.dim(0);
  Floats start = y0;
  const Tensor y = beta == 0              ? device.poisoned(y_type, {rows, w.out})
                   : y_type == Dtype::f32 ? device.floats(start, {rows, w.out})
                                          : device.halves(start, {rows, w.out});
  device.ops().linear({.x = x, .w = &w, .y = y, .beta = beta, .window_rows = window});
  return device.fetch(y);
}

TEST_CASE("linear, bf16: f64, every row of a window as if alone, accumulation") {
  Random random(1);
  Device device;
  for (const auto& [out, in] : kCases) {
    const TestWeight weight(WeightFormat::bf16, out, in, random);
    const Weight w = device.put(weight.w);
    for (const int64_t rows : {1, 2, 3, 8, 9, 16, 31, 32, 33, 70}) {
      CAPTURE(out);
      CAPTURE(in);
      CAPTURE(rows);
      Floats x = random.normals(rows * in), y0 = random.normals(rows * out);
      const Tensor xs = device.halves(x, {rows, in});
      const Doubles want = product(weight, widen(x), rows);
      const Floats got = product_of(device, w, xs, Dtype::f32, static_cast<int>(rows), 0, {});
      CHECK(relative_error(got, want) < 2e-6);
      for (const int64_t r : {int64_t{0}, rows / 2, rows - 1}) {
        const Floats alone = product_of(device, w, xs.rows(r, r + 1), Dtype::f32, 1, 0, {});
        CHECK(same_bits(alone, std::span(got).subspan(at(r * out), at(out))));
      }
      Doubles sum = want;
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += 0.5 * static_cast<double>(y0[i]);
      CHECK(relative_error(product_of(device, w, xs, Dtype::f32, static_cast<int>(rows), 0.5F, y0), sum) < 2e-6);
      CHECK(relative_error(product_of(device, w, xs, Dtype::bf16, static_cast<int>(rows), 0, {}), want) < 5e-3);
      // A prompt's rows do not depend on how it is cut.
      const Floats chunk = product_of(device, w, xs, Dtype::f32, 0, 0, {});
      CHECK(relative_error(chunk, want) < 2e-5);  // one long chain of sums that the tensor cores cut off
      if (rows > 3) {
        const Floats tail = product_of(device, w, xs.rows(3, rows), Dtype::f32, 0, 0, {});
        CHECK(same_bits(tail, std::span(chunk).subspan(at(3 * out))));
      }
    }
  }
}

TEST_CASE("linear, bf16: column views, rows far apart in size") {
  Random random(2);
  Device device;
  const TestWeight weight(WeightFormat::bf16, 200, 256, random);
  const Weight w = device.put(weight.w);
  const int64_t rows = 12;
  Floats wide = random.normals(rows * 512), x;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < 512; ++i) wide[at(r * 512 + i)] *= r % 2 == 0 ? 1e-20F : 1e15F;
  }
  const Tensor whole = device.halves(wide, {rows, 512});
  for (int64_t r = 0; r < rows; ++r) x.insert(x.end(), wide.begin() + r * 512 + 64, wide.begin() + r * 512 + 320);
  const Floats got = product_of(device, w, whole.columns(64, 320), Dtype::f32, 12, 0, {});
  const Doubles want = product(weight, widen(x), rows);
  for (int64_t r = 0; r < rows; ++r) {
    const auto of_row = [&](const auto& v) { return std::span(v).subspan(at(r * 200), 200); };
    CHECK(relative_error(of_row(got), of_row(want)) < 2e-6);
  }
}

TEST_CASE(
    "linear, fp8 and 4 bits: f64, rows as if alone, accumulation, a prompt's bits those of the same weights in bf16") {
  Random random(3);
  Device device;
  for (const WeightFormat format : {WeightFormat::fp8_row, WeightFormat::int4_g32}) {
    for (const auto& [out, in] :
         {Case{16, 64}, {17, 128}, {7, 32}, {288, 4096}, {1000, 96}, {513, 2176}, {6000, 128}, {96, 160}}) {
      const TestWeight weight(format, out, in, random);
      const Weight w = device.put(weight.w);
      TestWeight widened(WeightFormat::bf16, out, in, random);
      for (size_t i = 0; i < weight.f32.size(); ++i) widened.words[i] = f32_to_bf16(weight.f32[i]);
      const Weight same = device.put(widened.w);
      for (const int64_t rows : {1, 2, 8, 9, 16, 17, 33, 130}) {
        CAPTURE(static_cast<int>(format));
        CAPTURE(out);
        CAPTURE(in);
        CAPTURE(rows);
        Floats x = random.normals(rows * in), y0 = random.normals(rows * out);
        const Tensor xs = device.halves(x, {rows, in});
        const Doubles want = product(weight, widen(x), rows);
        const Floats got = product_of(device, w, xs, Dtype::f32, static_cast<int>(rows), 0, {});
        CHECK(relative_error(got, want) < 2e-6);
        for (const int64_t r : {int64_t{0}, rows / 2, rows - 1}) {
          const Floats alone = product_of(device, w, xs.rows(r, r + 1), Dtype::f32, 1, 0, {});
          CHECK(same_bits(alone, std::span(got).subspan(at(r * out), at(out))));
        }
        const Floats chunk = product_of(device, w, xs, Dtype::f32, 0, 0, {});
        CHECK(relative_error(chunk, want) < 2e-5);
        if (in % 64 == 0) CHECK(same_bits(chunk, product_of(device, same, xs, Dtype::f32, 0, 0, {})));
        Doubles sum = want;
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += 0.5 * static_cast<double>(y0[i]);
        CHECK(relative_error(product_of(device, w, xs, Dtype::f32, static_cast<int>(rows), 0.5F, y0), sum) < 2e-6);
        CHECK(relative_error(product_of(device, w, xs, Dtype::f32, 0, 0.5F, y0), sum) < 2e-5);
        CHECK(relative_error(product_of(device, w, xs, Dtype::bf16, static_cast<int>(rows), 0, {}), want) < 5e-3);
        if (rows < 10) {  // f32 activations take the plain form
          const Tensor plain_x = device.floats(x, {rows, in});
          CHECK(relative_error(product_of(device, w, plain_x, Dtype::f32, static_cast<int>(rows), 0, {}), want) < 2e-6);
        }
      }
    }
  }
}

TEST_CASE("linear, fp8 and 4 bits: every code is the value that it stands for") {
  Device device;
  for (const WeightFormat format : {WeightFormat::fp8_row, WeightFormat::int4_g32}) {
    const bool fp8 = format == WeightFormat::fp8_row;
    const int64_t out = 16, in = 128;
    std::vector<uint8_t> codes(at(code_bytes(format, out, in)));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(fp8 && (i & 127U) == 127 ? 0 : i);
    std::vector<std::byte> scales(at(scale_bytes(format, out, in)));
    for (size_t i = 0; i < scales.size() / (fp8 ? 4 : 2); ++i) {
      const float scale = std::ldexp(1.0F + 0.0625F * static_cast<float>(i % 16), static_cast<int>(i % 7) - 3);
      const uint16_t half = f32_to_bf16(scale);
      const float exact = fp8 ? std::ldexp(1.0F, static_cast<int>(i) - 8) : 0.0F;
      std::memcpy(scales.data() + i * (fp8 ? 4 : 2), fp8 ? static_cast<const void*>(&exact) : &half, fp8 ? 4 : 2);
    }
    const Weight host = quantised_weight(format, out, in, codes.data(), scales.data(), Place::host);
    const Weight w = device.put(host);
    Floats unit(at(in * in));
    for (int64_t i = 0; i < in; ++i) unit[at(i * in + i)] = 1;
    Floats want(at(out * in));
    for (int64_t o = 0; o < out; ++o) dequantise_row(host, o, want.data() + o * in);
    const Tensor x = device.halves(unit, {in, in});
    for (const int window : {0, static_cast<int>(in)}) {
      const Floats got = product_of(device, w, x, Dtype::f32, window, 0, {});
      for (int64_t o = 0; o < out; ++o) {
        for (int64_t i = 0; i < in; ++i) CHECK(got[at(i * out + o)] == want[at(o * in + i)]);
      }
    }
  }
}

}  // namespace
}  // namespace glm53::test
