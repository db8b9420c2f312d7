#include "engine/commands.h"

#include <chrono>
#include <iostream>
#include <optional>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "common/version.h"
#include "engine/loader/config.h"
#include "engine/loader/finite.h"
#include "engine/loader/formats.h"
#include "engine/loader/prepared.h"
#include "engine/loader/safetensors.h"
#include "engine/model/load.h"
#include "kernels/ops.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;

/// Tells progress on standard error at most every five seconds.
class Progress {
 public:
  void operator()(uint64_t done, uint64_t total) {
    constexpr std::chrono::seconds kEvery{5};
    if (Clock::now() < told_ + kEvery) return;
    told_ = Clock::now();
    std::cerr << cat(human_bytes(static_cast<int64_t>(done)), " of ", human_bytes(static_cast<int64_t>(total))) << '\n';
  }

 private:
  Clock::time_point told_ = Clock::now();
};

/// "2.1 GiB in 1.2 s"
std::string in_time(uint64_t bytes, Clock::time_point since) {
  const double seconds = std::chrono::duration<double>(Clock::now() - since).count();
  const auto tenths = static_cast<int64_t>(seconds * 10 + 0.5);
  return cat(human_bytes(static_cast<int64_t>(bytes)), " in ", tenths / 10, ".", tenths % 10, " s");
}

/// Number of tensors with values that are not finite; a line for each.
uint64_t report_values(const Checkpoint& checkpoint) {
  const auto since = Clock::now();
  Progress progress;
  const CheckpointValues found =
      check_values(checkpoint, {}, [&](uint64_t done, uint64_t total) { progress(done, total); });
  for (const std::string& line : found.findings) std::cout << line << '\n';
  if (found.bad_tensors > found.findings.size())
    std::cout << cat("… and ", found.bad_tensors - found.findings.size(), " more tensors") << '\n';
  std::cout << cat("read ", found.tensors, " tensors, ", in_time(found.bytes, since), ": ", found.bad_tensors,
                   " with values that are not finite (", found.nan, " NaN, ", found.infinite, " infinite)")
            << '\n';
  return found.bad_tensors;
}

}  // namespace

int check_checkpoint(const std::string& dir, bool values) {
  const ModelConfig config = load_model_config(dir);
  const Checkpoint checkpoint(dir);
  std::optional<Error> inventory;
  try {
    check_inventory(checkpoint, config);
  } catch (const Error& e) {
    if (!values) throw;
    inventory = e;  // told after the values, which may be read all the same
  }
  const uint64_t bad = values ? report_values(checkpoint) : 0;
  if (inventory) throw Error(*inventory);
  if (bad > 0)
    throw Error(Code::weights, cat(dir, ": ", bad, " tensors hold values that are not finite"),
                "download the model again (glm53ctl download checks digests), or quantise it again");
  std::cout << cat(dir, ": ok, ", checkpoint.tensors().size(), " tensors, ", config.layers,
                   " layers, routed experts in ", has_exl3_experts(checkpoint) ? "EXL3" : "plain", " format, digest ",
                   checkpoint.digest())
            << '\n';
  return 0;
}

int describe() {
  nlohmann::ordered_json out{{"version", version()}, {"backends", {"cpu"}}};
  try {
    make_cuda_ops(0);
    out["backends"].push_back("cuda");
  } catch (const Error& e) {
    out["cuda"] = e.what();
  }
  out["weight_formats"] = {"f32", "bf16", "exl3", "fp8", "int4"};
  out["kv_formats"] = {"f32", "bf16", "fp8_c528", "int8_c528"};
  std::cout << dump(out) << '\n';
  return 0;
}

int prepare(const PrepareOptions& options) {
  FormatPolicy policy = FormatPolicy::as_stored();
  set_format(policy, "dense", options.dense);
  set_format(policy, "head", options.head);
  for (const std::string& text : options.formats) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos) throw Error(Code::usage, cat("--format ", text), "GROUP=FORMAT, as mla=fp8");
    set_format(policy, text.substr(0, equals), text.substr(equals + 1));
  }
  if (options.rank >= options.ranks)
    throw Error(Code::usage, cat("--rank ", options.rank, " of ", options.ranks), "ranks count from 0");
  for (int rank = 0; rank < options.ranks; ++rank) {
    if (options.rank >= 0 && rank != options.rank) continue;
    const Shard shard{rank, options.ranks};
    const auto since = Clock::now();
    Progress progress;
    LoadOptions load;
    load.check_values = options.check_weights;
    const uint64_t bytes = prepare_weights(options.model, policy, shard, options.out, load,
                                           [&](uint64_t done, uint64_t total) { progress(done, total); });
    std::cout << cat(options.out, "/", prepared_folder(shard), ": ", in_time(bytes, since), ", ", formats_text(policy))
              << '\n';
  }
  return 0;
}

}  // namespace glm53
