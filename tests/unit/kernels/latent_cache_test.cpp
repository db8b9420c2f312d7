#include "kernels/cpu/latent_cache.h"

#include <cfloat>

#include "cache_world.h"
#include "kernels/half.h"

using namespace glm53;
using namespace glm53::test;

namespace {

CacheGeometry geometry(KvFormat format, int kpool = 4, int latent = 256) {
  CacheGeometry g;
  g.mla_layers = 2;
  g.kpool = kpool;
  g.latent = latent;
  g.index_dim = 128;
  g.format = format;
  return g;
}

constexpr KvFormat kFormats[] = {KvFormat::f32, KvFormat::bf16, KvFormat::fp8_c528, KvFormat::int8_c528};

// One tile of 128 values through a record.
Floats round_trip(KvFormat format, const Floats& x) {
  World world(geometry(format, 4, 128), 1, 0, 2);
  const cpu::LatentCache cache(world.caches, 1, "test");
  Floats y(x.size());
  cache.write_latent(BlockId{1}, 63, x.data());
  cache.read_latent(BlockId{1}, 63, y.data());
  return y;
}

double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

TEST_CASE("block_layout of the spec's record and of its refusals") {
  CacheGeometry g = geometry(KvFormat::fp8_c528, 4, 512);
  g.mla_layers = 11;
  const BlockLayout l = block_layout(g);
  CHECK(l.element == Dtype::e4m3);
  CHECK(l.codes == 0);
  CHECK(l.scales == 32768);
  CHECK(l.pool_keys == 33792);
  CHECK(l.pool_scales == 35840);
  CHECK(l.layer_bytes == 35904);
  CHECK(l.block_bytes == 394944);

  g = geometry(KvFormat::f32, 16, 20);
  g.index_dim = 9;
  const BlockLayout plain_layout = block_layout(g);
  CHECK(plain_layout.element == Dtype::f32);
  CHECK(plain_layout.pool_keys == 64 * 20 * 4);
  CHECK(plain_layout.layer_bytes == 64 * 20 * 4 + 192);  // 4 pools of 9 values, rounded up to 64
  CHECK(plain_layout.block_bytes == 2 * plain_layout.layer_bytes);

  for (const int kpool : {0, 3, 128, -4}) CHECK_THROWS_AS(block_layout(geometry(KvFormat::f32, kpool)), Error);
  CHECK_THROWS_AS(block_layout(geometry(KvFormat::int8_c528, 4, 200)), Error);
  g = geometry(KvFormat::fp8_c528);
  g.index_dim = 64;
  CHECK_THROWS_AS(block_layout(g), Error);
  g.mla_layers = 0;
  CHECK(block_layout(g).block_bytes == 0);
}

TEST_CASE("e4m3 records keep every code") {
  // With 448 in a tile the scale is 1, so each value is its own code.
  for (int half = 0; half < 256; half += 64) {
    Floats x(128, 448.0F);
    for (int i = 0; i < 64; ++i)
      x[at(i)] = ((half + i) & 0x7f) == 0x7f ? 0.0F : static_cast<float>(e4m3_value(half + i));
    CHECK(same_bits(round_trip(KvFormat::fp8_c528, x), x));
  }
}

TEST_CASE("8-bit records: saturation, zeros, NaN and infinity") {
  for (const KvFormat format : {KvFormat::fp8_c528, KvFormat::int8_c528}) {
    CHECK(all_zero(round_trip(format, Floats(128, 0.0F))));
    Floats tiny(128, 1e-44F);  // below the smallest scale
    for (const float y : round_trip(format, tiny)) CHECK(std::fabs(y) <= 1e-37F);
    Floats x(128, 1.0F);
    x[5] = NAN;
    Floats y = round_trip(format, x);
    CHECK(std::isnan(y[5]));
    CHECK(std::isnan(y[6]) == (format == KvFormat::int8_c528));
    x[5] = INFINITY;
    y = round_trip(format, x);
    CHECK(y[5] > 3e38F);
    CHECK(std::isfinite(y[5]));
    CHECK(y[6] == 0.0F);  // far below the largest
    x[5] = -FLT_MAX;
    CHECK(round_trip(format, x)[5] == doctest::Approx(-FLT_MAX).epsilon(0.01));
  }
}

TEST_CASE("records lose no more than their format does") {
  Random random(51);
  const float bound[] = {0.0F, 1.0F / 256, 1.0F / 16, 0.5F / 127};
  for (const KvFormat format : kFormats) {
    World world(geometry(format), 1, 0, 3);
    const cpu::LatentCache cache(world.caches, 1, "test");
    std::vector<Floats> latents, keys;
    for (int token = 0; token < 64; ++token) latents.push_back(random.normals(256, std::exp(random.normal())));
    for (int pool = 0; pool < 16; ++pool) keys.push_back(random.normals(128));
    for (int pool = 0; pool < 16; ++pool) cache.write_pool_key(BlockId{2}, pool, keys[at(pool)].data());
    for (int token = 63; token >= 0; --token) cache.write_latent(BlockId{2}, token, latents[at(token)].data());
    const float relative = bound[static_cast<size_t>(format)];
    for (int token = 0; token < 64; ++token) {
      Floats y(256);
      cache.read_latent(BlockId{2}, token, y.data());
      for (size_t i = 0; i < 256; ++i) {
        const float x = latents[at(token)][i];
        const auto tile = latents[at(token)].begin() + static_cast<int64_t>(i / 128 * 128);
        float amax = 0;
        for (int64_t j = 0; j < 128; ++j) amax = std::max(amax, std::fabs(tile[j]));
        // e4m3 has an absolute step below its smallest normal number, int8 everywhere.
        const float limit = format == KvFormat::int8_c528 ? relative * amax * 1.0001F
                            : format == KvFormat::fp8_c528
                                ? std::max(relative * std::fabs(x) * 1.0001F, amax / 448 / 1024)
                                : relative * std::fabs(x);
        CHECK(std::fabs(y[i] - x) <= limit);
      }
    }
    for (int pool = 0; pool < 16; ++pool) {
      Floats y(128);
      cache.read_pool_key(BlockId{2}, pool, y.data());
      if (cache.rotated()) cpu::hadamard128(y.data(), 128);
      double error = 0, norm = 0;
      for (size_t i = 0; i < 128; ++i) {
        error += std::pow(double(y[i]) - double(keys[at(pool)][i]), 2);
        norm += std::pow(double(keys[at(pool)][i]), 2);
      }
      // The largest of 128 normal values is about 3 of their deviations, and the scale up to twice what it must be.
      CHECK(std::sqrt(error / norm) <= (format == KvFormat::int8_c528 ? 0.03 : double(relative)));
    }
    // Nothing outside block 2, layer 1 was touched.
    for (const int block : {0, 1}) {
      const auto f = world.block_floats(block);
      CHECK(std::all_of(f.begin(), f.end(), [](float v) { return std::isnan(v); }));
    }
    const auto f = world.block_floats(2).first(world.caches.layout.layer_bytes / sizeof(float));
    CHECK(std::all_of(f.begin(), f.end(), [](float v) { return std::isnan(v); }));
  }
}

TEST_CASE("8-bit scales are what the spec says") {
  World world(geometry(KvFormat::fp8_c528), 1, 0, 2);
  const cpu::LatentCache cache(world.caches, 0, "test");
  Floats x(256, 0.5F);
  x[3] = -3.0F;
  x[200] = 7.0F;
  cache.write_latent(BlockId{1}, 2, x.data());
  const auto* block = static_cast<const std::byte*>(world.caches.blocks.data) + world.caches.layout.block_bytes;
  const auto* scales = reinterpret_cast<const float*>(block + world.caches.layout.scales);
  CHECK(scales[4] == 3.0F / 448.0F);
  CHECK(scales[5] == 7.0F / 448.0F);
  CHECK(block[2 * 256 + 3] == std::byte{0xfe});

  // Rotating a constant gives one value at the front: √128·c; the scale is the next power of two of it over 448.
  Floats key(128, 1.0F);
  cache.write_pool_key(BlockId{1}, 1, key.data());
  const auto* pool_scales = reinterpret_cast<const float*>(block + world.caches.layout.pool_scales);
  CHECK(pool_scales[1] == 1.0F / 32.0F);  // 11.3 / 448 = 0.0253
  std::fill(key.begin(), key.end(), 0.0F);
  cache.write_pool_key(BlockId{1}, 1, key.data());
  CHECK(pool_scales[1] == std::ldexp(1.0F, -22));  // 1e-4 / 448
  key[0] = 16.0F;
  key[1] = 3.8125F;  // (16 + 3.8125) / √128 rounds to 1.75 = 448 / 256: a power of two already
  cache.write_pool_key(BlockId{1}, 1, key.data());
  CHECK(pool_scales[1] == 1.0F / 256.0F);
}

TEST_CASE("latent_write: padding, null blocks, the last block, and tables that are wrong") {
  const auto ops = make_cpu_ops(2);
  for (const KvFormat format : kFormats) {
    World world(geometry(format), 2, 0, 4);
    world.reset(*ops);
    Random random(52);
    const auto run = [&](Step& step) {
      Floats latent = random.normals(int64_t{step.rows} * 256);
      ops->latent_write({&step.batch, 0, &world.caches, tensor(latent, {step.rows, 256})});
      return latent;
    };
    // A window at the end of the last block, a window without slot, a chunk over a block's edge; two padding rows.
    Step step(
        {{.slot = 0, .position = 60, .rows = 4, .table = {3}}, {.slot = -1, .position = 0, .rows = 2, .table = {1}}},
        {{.slot = 1, .position = 62, .rows = 4, .table = {0, 2}}}, 2, 1);
    const Floats latent = run(step);
    const cpu::LatentCache cache(world.caches, 0, "test");
    const auto written = [&](int block, int token, int row) {
      Floats y(256);
      cache.read_latent(static_cast<BlockId>(block), token, y.data());
      Doubles want(latent.begin() + row * 256, latent.begin() + (row + 1) * 256);
      return relative_error(y, want) < 0.05;
    };
    for (int i = 0; i < 4; ++i) CHECK(written(3, 60 + i, i));
    CHECK(written(2, 0, 8));
    CHECK(written(2, 1, 9));
    for (const int block : {0, 1}) {
      const auto f = world.block_floats(block);
      CHECK(std::all_of(f.begin(), f.end(), [](float v) { return std::isnan(v); }));
    }
    for (const int32_t block : {4, -1}) {
      Step bad({{.slot = 0, .position = 0, .rows = 1, .table = {block}}}, {});
      CHECK_THROWS_AS(run(bad), Error);
    }
    Step beyond({{.slot = 0, .position = 64, .rows = 1, .table = {1}}}, {});
    CHECK_THROWS_AS(run(beyond), Error);
  }
}
