// Argument checks of operators: a wrong shape is a bug of the caller, named precisely.
#pragma once

#include <initializer_list>
#include <string_view>

#include "kernels/tensor.h"
#include "kernels/weight.h"

namespace glm53::cpu {

/// Throws Error(internal) naming operator, argument, found and expected unless t has this dtype and shape (−1 = any
/// size), lives in memory the host can read, and is not empty (unless it has no elements).
void expect(std::string_view op, std::string_view argument, const Tensor& t, Dtype dtype,
            std::initializer_list<int64_t> shape);
/// A weight of plain values (f32 or bf16) with this size; throws Error(unavailable) for other formats.
void expect_plain(std::string_view op, std::string_view argument, const Weight& w, int64_t out, int64_t in);
/// A quantised weight (kernels/quantise.h) whose codes and scales have the shapes that its size asks for.
void expect_quantised(std::string_view op, const Weight& w);
/// Throws Error(internal) with "op: text" unless ok.
void expect_that(bool ok, std::string_view op, std::string_view text);

/// Element i of a plain weight, row-major.
float value_at(const Weight& w, int64_t i);

}  // namespace glm53::cpu
