#include <span>
#include <string>

#include "common/error.h"
#include "kernels/cuda/views.h"

namespace glm53::cuda {
namespace {

std::string text(const Tensor& t) {
  std::string s(name(t.dtype));
  s += " [";
  for (size_t i = 0; i < t.rank; ++i) s += (i == 0 ? "" : ", ") + std::to_string(t.shape[i]);
  s += "]";
  if (t.data == nullptr) s += " without data";
  if (t.place == Place::host) s += " in host memory";
  return s;
}

bool fits(const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.rank != shape.size() || t.place == Place::host) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape.begin()[i] >= 0 && t.shape[i] != shape.begin()[i]) return false;
  }
  if (t.data == nullptr && t.elements() != 0) return false;
  return t.rank == 0 || t.shape[t.rank - 1u] <= 1 || t.stride[t.rank - 1u] == 1;
}

[[noreturn]] void refuse(std::string_view op, std::string_view argument, const Tensor& t, std::string_view dtype,
                         std::initializer_list<int64_t> shape) {
  std::string want(dtype);
  want += " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    want += (i == 0 ? "" : ", ") + (shape.begin()[i] < 0 ? std::string("*") : std::to_string(shape.begin()[i]));
  }
  throw Error(Code::internal, std::string(op) + ": " + std::string(argument) + " is " + text(t),
              want + "] in device or pinned memory");
}

}  // namespace

Matrix matrix(std::string_view op, std::string_view argument, const Tensor& t, std::initializer_list<int64_t> shape) {
  if ((t.dtype != Dtype::f32 && t.dtype != Dtype::bf16) || !fits(t, shape))
    refuse(op, argument, t, "f32 or bf16", shape);
  int64_t columns = 1;
  for (size_t i = 1; i < t.rank; ++i) columns *= t.shape[i];
  for (size_t i = 1; i + 1 < t.rank; ++i) {
    expect_that(t.shape[i] <= 1 || t.stride[i] == t.stride[i + 1] * t.shape[i + 1], op,
                std::string(argument) + " is not contiguous within a row");
  }
  return {t.data, t.rank == 0 ? 0 : t.stride[0], t.rank == 0 ? 1 : t.shape[0], columns, t.dtype == Dtype::bf16};
}

void expect(std::string_view op, std::string_view argument, const Tensor& t, Dtype dtype,
            std::initializer_list<int64_t> shape) {
  if (t.dtype != dtype || !fits(t, shape)) refuse(op, argument, t, name(dtype), shape);
}

void expect_that(bool ok, std::string_view op, std::string_view what) {
  if (!ok) throw Error(Code::internal, std::string(op) + ": " + std::string(what));
}

Plain plain(std::string_view op, std::string_view argument, const Weight& w, int64_t out, int64_t in) {
  if (w.format != WeightFormat::f32 && w.format != WeightFormat::bf16) {
    throw Error(Code::unavailable,
                std::string(op) + ": the CUDA backend has no kernel for the format of " + std::string(argument),
                "f32 or bf16");
  }
  const Dtype dtype = w.format == WeightFormat::f32 ? Dtype::f32 : Dtype::bf16;
  const bool ok = w.out == out && w.in == in && w.codes.dtype == dtype && w.codes.elements() == out * in &&
                  w.codes.contiguous() && w.codes.place != Place::host && (w.codes.data != nullptr || out * in == 0);
  if (!ok) {
    throw Error(Code::internal,
                std::string(op) + ": weight " + std::string(argument) + " is [" + std::to_string(w.out) + ", " +
                    std::to_string(w.in) + "] with codes " + text(w.codes),
                "[" + std::to_string(out) + ", " + std::to_string(in) + "], contiguous, in device memory");
  }
  return {w.codes.data, dtype == Dtype::bf16};
}

Linear linear_view(std::string_view op, std::string_view argument, const Weight& w, int64_t out, int64_t in) {
  if (w.format != WeightFormat::exl3) {
    const Plain p = plain(op, argument, w, out, in);
    return {p.data, nullptr, nullptr, 0, 0, p.bf16 ? 1 : 0};
  }
  const bool ok = w.out == out && w.in == in && w.bits >= 1 && w.bits <= 8 && in % 128 == 0 && out % 128 == 0 &&
                  w.codes.dtype == Dtype::i16 && w.codes.contiguous() &&
                  w.codes.elements() == in / 16 * (out / 16) * 16 * w.bits && w.suh.dtype == Dtype::f16 &&
                  w.suh.elements() == in && w.svh.dtype == Dtype::f16 && w.svh.elements() == out &&
                  w.codes.place != Place::host && w.suh.place != Place::host && w.svh.place != Place::host &&
                  static_cast<uint32_t>(w.codebook) <= 2;
  if (!ok) {
    throw Error(Code::internal,
                std::string(op) + ": " + std::string(argument) + " is no EXL3 weight of this size: [" +
                    std::to_string(w.out) + ", " + std::to_string(w.in) + "], " + std::to_string(w.bits) +
                    " bits, codes " + text(w.codes),
                "[" + std::to_string(out) + ", " + std::to_string(in) + "], multiples of 128, in device memory");
  }
  return {w.codes.data, w.suh.data, w.svh.data, w.bits, static_cast<int32_t>(w.codebook), 0};
}

Rows rows_of(std::string_view op, const Batch& b, int64_t capacity) {
  expect_that(0 <= b.window_rows && b.window_rows <= b.rows && b.rows <= capacity, op,
              "batch.rows exceeds the rows of the tensors, or window_rows exceeds rows");
  expect_that(0 <= b.window_seqs && b.window_seqs <= b.seqs, op, "batch.window_seqs exceeds seqs");
  const auto list = [&](std::string_view argument, const Tensor& t, int64_t least) {
    expect(op, argument, t, Dtype::i32, {-1});
    expect_that(t.dim(0) >= least, op, std::string(argument) + " is too short");
    return static_cast<const int32_t*>(t.data);
  };
  Rows r{};
  r.position = list("batch.position", b.position, b.rows);
  r.row_seq = list("batch.row_seq", b.row_seq, b.rows);
  r.row_begin = list("batch.row_begin", b.row_begin, b.seqs + 1);
  r.slot = list("batch.slot", b.slot, b.seqs);
  r.replay = list("batch.replay", b.replay, b.seqs);
  if (!b.block_table.empty()) {
    expect(op, "batch.block_table", b.block_table, Dtype::i32, {-1, -1});
    r.table = static_cast<const int32_t*>(b.block_table.data);
    r.table_stride = b.block_table.stride[0];
    r.max_blocks = static_cast<int32_t>(b.block_table.dim(1));
  }
  if (!b.export_pos.empty()) {
    expect(op, "batch.export_pos", b.export_pos, Dtype::i32, {-1, 2});
    expect(op, "batch.export_snap", b.export_snap, Dtype::i32, {-1, 2});
    expect_that(b.export_pos.contiguous() && b.export_snap.contiguous() && b.export_pos.dim(0) >= b.seqs &&
                    b.export_snap.dim(0) >= b.seqs,
                op, "batch.export_pos or export_snap is shorter than seqs");
    r.export_pos = static_cast<const int32_t*>(b.export_pos.data);
    r.export_snap = static_cast<const int32_t*>(b.export_snap.data);
  }
  r.rows = b.rows;
  r.seqs = b.seqs;
  r.window_rows = b.window_rows;
  r.window_seqs = b.window_seqs;
  r.capacity = static_cast<int32_t>(capacity);
  return r;
}

LatentView latent_view(std::string_view op, const Caches& c, int layer) {
  expect_that(layer >= 0 && layer < c.geometry.mla_layers, op, "layer is not one of the geometry's mla_layers");
  const bool ok = c.blocks.rank == 2 && size_of(c.blocks.dtype) == 1 && c.blocks.contiguous() &&
                  c.blocks.place != Place::host && c.blocks.dim(1) == static_cast<int64_t>(c.layout.block_bytes);
  expect_that(ok, op, "caches.blocks is not u8 [blocks][block_bytes] in device memory");
  LatentView v{};
  v.base = static_cast<uint8_t*>(c.blocks.data) + static_cast<size_t>(layer) * c.layout.layer_bytes;
  v.block_bytes = static_cast<int64_t>(c.layout.block_bytes);
  v.codes = static_cast<int64_t>(c.layout.codes);
  v.scales = static_cast<int64_t>(c.layout.scales);
  v.pool_keys = static_cast<int64_t>(c.layout.pool_keys);
  v.pool_scales = static_cast<int64_t>(c.layout.pool_scales);
  v.blocks = c.blocks.dim(0);
  v.latent = c.geometry.latent;
  v.index_dim = c.geometry.index_dim;
  v.kpool = c.geometry.kpool;
  v.format = static_cast<int32_t>(c.geometry.format);
  return v;
}

}  // namespace glm53::cuda
