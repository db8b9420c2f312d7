// What a step costs on two GB10 (a rank each), from bytes and operations. Figures of one rank; sources: measured by
// named projects on GB10 or derived from the model's sizes (docs/performance.md, "The cost model of two GB10").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "common/error.h"
#include "common/strings.h"

namespace glm53 {

struct Gb10Cost {
  double bandwidth = 235e9;             ///< attainable, bytes a second
  double efficiency = 0.88;             ///< of it, that kernels reach
  double dense_bytes = 2.37e9;          ///< read in each pass: 4-bit
  double router_bytes = 0.17e9;         ///< and mHC, kept exact
  double expert_bytes = 42 * 6.29e6;    ///< of one expert in all layers
  double state_bytes = 0.143e9;         ///< KDA state, read and written, a sequence
  double latent_bytes = 23e6;           ///< of the selected tokens, a sequence
  double pooled_bytes = 700;            ///< index keys, a token of context
  double prompt_tokens_per_s = 2030;    ///< of large pieces at 24.5k tokens of context
  double index_us = 0.12e-3;            ///< a prompt row and token of context
  double launch_ms = 0.9;               ///< a pass, or a part of one
  double fixed_ms = 90 * 0.0115 + 0.9;  ///< exchanges, launches
  bool independent = false;             ///< rows of one prompt share experts by chance only
  std::string dense = "int4";

  struct Step {
    int32_t window_rows = 0, chunk_rows = 0, seqs = 0;
    double context = 0;        ///< of all window rows
    double chunk_context = 0;  ///< of all prompt rows
    void add(bool window, int32_t rows, int32_t end) {
      (window ? window_rows : chunk_rows) += rows;
      (window ? context : chunk_context) += static_cast<double>(rows) * end;
      ++seqs;
    }
  };

  void set_dense(const std::string& format) {
    dense = format;
    if (format == "bf16")
      dense_bytes = 8.41e9;
    else if (format == "fp8")
      dense_bytes = 4.20e9;
    else if (format == "int4")
      dense_bytes = 2.37e9;
    else
      throw Error(Code::usage, cat("dense format '", format, "'"), "bf16, fp8 or int4");
  }
  void set_experts(const std::string& which) {
    if (which != "alike" && which != "independent")
      throw Error(Code::usage, cat("experts '", which, "'"), "alike or independent");
    independent = which == "independent";
  }
  std::string text() const {
    return cat(dense, " dense, ", bandwidth * efficiency / 1e9, " GB/s, prompts at ", prompt_tokens_per_s,
               " tokens/s, rows of a prompt ", independent ? "independent" : "alike");
  }

  /// Distinct experts a layer, of 288 with 8 a row. Rows of different sequences: 40.5 at 8 and 65 at 16 measured. Rows
  /// of one text: 35 at 8 and 103 at 41 measured.
  double window_experts(int32_t rows) const {
    if (rows == 0) return 0;
    return std::min(rows <= 8 ? 8 * std::pow(rows, 0.78) : 40.5 * std::pow(rows / 8.0, 0.68), 288.0);
  }
  double chunk_experts(int32_t rows) const {
    if (rows == 0) return 0;
    if (independent) return 288 * (1 - std::pow(1 - 8.0 / 288, rows));
    return std::min(8 * std::pow(rows, 0.69), 288.0);
  }

  double ms(const Step& s) const {
    if (s.window_rows + s.chunk_rows == 0) return 0;
    const double missed = (1 - window_experts(s.window_rows) / 288) * (1 - chunk_experts(s.chunk_rows) / 288);
    const double bytes = dense_bytes + router_bytes + expert_bytes * 288 * (1 - missed) + s.seqs * state_bytes +
                         s.window_rows * latent_bytes + s.context * pooled_bytes;
    const double memory_ms = bytes / (bandwidth * efficiency) * 1e3;
    const double math_ms = s.chunk_rows / prompt_tokens_per_s * 1e3 + s.chunk_context * index_us * 1e-3;
    return fixed_ms + std::max(memory_ms, math_ms);
  }
  /// Of rows that pass `layers` of `all` by themselves.
  double part_ms(const Step& s, int layers, int all) const { return launch_ms + (ms(s) - launch_ms) * layers / all; }
};

}  // namespace glm53
