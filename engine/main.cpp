// glm53-engine: sub-commands and wiring only.
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "common/version.h"
#include "engine/api/api.h"
#include "engine/loader/config.h"
#include "engine/loader/safetensors.h"
#include "engine/runtime/rank.h"
#include "kernels/ops.h"

namespace glm53 {
namespace {

/// Validates configuration, headers and inventory of a checkpoint; a line for each problem.
int check_checkpoint(const std::string& dir) {
  const ModelConfig config = load_model_config(dir);
  const Checkpoint checkpoint(dir);
  check_inventory(checkpoint, config);
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
  out["weight_formats"] = {"f32", "bf16", "exl3"};
  out["kv_formats"] = {"f32", "bf16", "fp8_c528", "int8_c528"};
  std::cout << dump(out) << '\n';
  return 0;
}

int run(int argc, char** argv) {
  CLI::App app("glm53-engine: runs GLM-5.3-Flash. Started by glm53-agent; check and describe are for people.",
               "glm53-engine");
  app.set_version_flag("--version", cat("glm53-engine ", version()));
  app.require_subcommand(1);
  int config_fd = -1;
  std::string model;
  CLI::App* rank = app.add_subcommand("rank", "Run one rank (docs/rank-contract.md)");
  CLI::App* api = app.add_subcommand("api", "Run the API process (docs/rank-contract.md)");
  for (CLI::App* process : {rank, api})
    process->add_option("--config-fd", config_fd, "Open descriptor to read the JSON configuration from")
        ->required()
        ->check(CLI::Range(0, 1 << 20));
  CLI::App* check = app.add_subcommand("check", "Check a checkpoint folder: configuration, headers, inventory");
  check->add_option("--model", model, "Folder of the checkpoint")->required();
  const CLI::App* show = app.add_subcommand("describe", "Print version, backends and formats as JSON");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : rank_exit(Code::usage);
  }
  if (rank->parsed()) return run_rank(config_fd);
  if (api->parsed()) return run_api(config_fd);
  if (check->parsed()) return check_checkpoint(model);
  return show->parsed() ? describe() : rank_exit(Code::usage);
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  try {
    return glm53::run(argc, argv);
  } catch (const glm53::Error& e) {
    std::cerr << "glm53-engine: " << e.line() << '\n';
    return glm53::rank_exit(e.code());
  } catch (const std::exception& e) {
    std::cerr << "glm53-engine: " << e.what() << '\n';
    return glm53::rank_exit(glm53::Code::internal);
  }
}
