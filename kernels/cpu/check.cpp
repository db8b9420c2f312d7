#include "kernels/cpu/check.h"

#include <string>
#include <utility>

#include "common/error.h"
#include "kernels/half.h"
#include "kernels/quantise.h"

namespace glm53::cpu {

namespace {

std::string text(Dtype dtype, std::span<const int64_t> shape) {
  std::string s(name(dtype));
  s += " [";
  for (size_t i = 0; i < shape.size(); ++i) s += (i == 0 ? "" : ", ") + (shape[i] < 0 ? "*" : std::to_string(shape[i]));
  return s + "]";
}

}  // namespace

void expect(std::string_view op, std::string_view argument, const Tensor& t, Dtype dtype,
            std::initializer_list<int64_t> shape) {
  bool ok = t.dtype == dtype && t.rank == shape.size() && t.place != Place::device;
  for (size_t i = 0; ok && i < shape.size(); ++i) {
    const int64_t want = shape.begin()[i];
    ok = want < 0 || t.shape[i] == want;
  }
  if (ok && t.data == nullptr) ok = t.elements() == 0;
  if (ok && t.rank > 0) ok = t.shape[t.rank - 1u] <= 1 || t.stride[t.rank - 1u] == 1;
  if (ok) return;
  std::string found = text(t.dtype, std::span(t.shape).first(t.rank));
  if (t.data == nullptr) found += " without data";
  if (t.place == Place::device) found += " in device memory";
  throw Error(Code::internal, std::string(op) + ": " + std::string(argument) + " is " + found,
              text(dtype, std::span(shape.begin(), shape.size())));
}

void expect_plain(std::string_view op, std::string_view argument, const Weight& w, int64_t out, int64_t in) {
  if (w.format != WeightFormat::f32 && w.format != WeightFormat::bf16) {
    throw Error(Code::unavailable,
                std::string(op) + ": the CPU backend has no kernel for the format of " + std::string(argument),
                "f32 or bf16");
  }
  const Dtype dtype = w.format == WeightFormat::f32 ? Dtype::f32 : Dtype::bf16;
  if (w.out != out || w.in != in || w.codes.dtype != dtype || w.codes.elements() != out * in || !w.codes.contiguous() ||
      w.codes.place == Place::device || (w.codes.data == nullptr && out * in != 0)) {
    throw Error(Code::internal,
                std::string(op) + ": weight " + std::string(argument) + " is [" + std::to_string(w.out) + ", " +
                    std::to_string(w.in) + "] with codes " +
                    text(w.codes.dtype, std::span(w.codes.shape).first(w.codes.rank)),
                "[" + std::to_string(out) + ", " + std::to_string(in) + "] in contiguous host memory");
  }
}

void expect_quantised(std::string_view op, const Weight& w) {
  const Weight want = quantised_weight(w.format, w.out, w.in, nullptr, nullptr, Place::host);
  for (const auto& [found, shape] : {std::pair(&w.codes, &want.codes), std::pair(&w.scales, &want.scales)}) {
    if (found->dtype == shape->dtype && found->elements() == shape->elements() && found->contiguous() &&
        found->place != Place::device && (found->data != nullptr || found->elements() == 0)) {
      continue;
    }
    throw Error(Code::internal,
                std::string(op) + ": a quantised weight has codes or scales " +
                    text(found->dtype, std::span(found->shape).first(found->rank)),
                text(shape->dtype, std::span(shape->shape).first(shape->rank)) + " in contiguous host memory");
  }
}

void expect_that(bool ok, std::string_view op, std::string_view text) {
  if (!ok) throw Error(Code::internal, std::string(op) + ": " + std::string(text));
}

float value_at(const Weight& w, int64_t i) {
  return w.format == WeightFormat::f32 ? w.codes.as<const float>()[i] : bf16_to_f32(w.codes.as<const uint16_t>()[i]);
}

}  // namespace glm53::cpu
