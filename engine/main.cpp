// glm53-engine: sub-commands and wiring only.
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>

#include "common/error.h"
#include "common/strings.h"
#include "common/version.h"
#include "engine/api/api.h"
#include "engine/commands.h"
#include "engine/runtime/rank.h"

namespace glm53 {
namespace {

CLI::App* add_prepare(CLI::App& app, PrepareOptions& options) {
  CLI::App* prepare = app.add_subcommand(
      "prepare", "Write each rank's weights in their final formats, so that a start only reads them (docs/weights.md)");
  prepare->add_option("--model", options.model, "Folder of the checkpoint")->required();
  prepare->add_option("--ranks", options.ranks, "Number of ranks")->required()->check(CLI::Range(1, 64));
  prepare->add_option("--out", options.out, "Folder to write to; model.prepared names it")->required();
  prepare->add_option("--rank", options.rank, "Only this rank; without it all of them")->check(CLI::Range(0, 63));
  prepare->add_option("--dense", options.dense, "As engine.dense: stored, fp8 or int4");
  prepare->add_option("--head", options.head, "As engine.head");
  prepare->add_option("--format", options.formats, "GROUP=FORMAT, as engine.formats.GROUP; may be repeated");
  prepare->add_flag("--check-weights", options.check_weights, "Refuse NaN and infinite values by name");
  return prepare;
}

int run(int argc, char** argv) {
  CLI::App app("glm53-engine: runs GLM-5.3-Flash. Started by glm53-agent; check, prepare and describe are for people.",
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
  bool values = false;
  check->add_flag("--check-weights", values, "Also read every tensor: name those with NaN or infinite values");
  PrepareOptions preparing;
  CLI::App* prepare_app = add_prepare(app, preparing);
  const CLI::App* show = app.add_subcommand("describe", "Print version, backends and formats as JSON");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : rank_exit(Code::usage);
  }
  if (rank->parsed()) return run_rank(config_fd);
  if (api->parsed()) return run_api(config_fd);
  if (check->parsed()) return check_checkpoint(model, values);
  if (prepare_app->parsed()) return prepare(preparing);
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
