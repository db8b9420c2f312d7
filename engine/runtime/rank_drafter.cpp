#include "engine/runtime/rank_drafter.h"

#include <algorithm>
#include <optional>

#include "common/error.h"
#include "common/log.h"
#include "common/strings.h"
#include "engine/draft/dflash.h"
#include "engine/draft/mtp.h"

namespace glm53 {
namespace {

/// True where no rank has an error; with draft.fallback false, and why in `reason`, where one has. Throws the error
/// otherwise, or one that says that another rank has it.
bool agree(const std::optional<Error>& mine, bool fallback, const Everywhere& everywhere, std::string& reason) {
  if (everywhere(!mine)) return true;
  if (!fallback && mine) throw *mine;
  if (!fallback)
    throw Error(Code::config, "the drafter cannot be used on another rank",
                "look at its log, or set draft.fallback to serve without drafter");
  reason = mine ? mine->what() : "it cannot be used on another rank";
  log::warn(cat("serving without drafter (draft.fallback): ", reason));
  return false;
}

DrafterChoice wanted(const Config& config, const std::string& dir, const ModelConfig& target,
                     std::string_view backend) {
  DrafterChoice choice;
  choice.max_drafts = static_cast<int>(config.integer("draft.max_drafts"));
  const std::string path = config.text("draft.path").empty() ? "" : config.path("draft.path");
  choice.kind = config.text("draft.kind");
  if (choice.kind == "auto") choice.kind = !path.empty() ? "dflash2" : target.mtp_layers > 0 ? "mtp" : "none";
  if (choice.max_drafts == 0) choice.kind = "none";
  // The drafters' own operators exist on the CPU only.
  if (backend != "cpu" && choice.kind != "none") {
    if (config.text("draft.kind") != "auto")
      throw Error(Code::config, cat("draft.kind is ", choice.kind, ", and backend ", backend, " runs no drafter"),
                  "use draft.kind = \"none\"; copied drafts (draft.lookup) need none");
    log::warn(cat("backend ", backend, " runs no drafter: drafts are copied from the text only"));
    choice.kind = "none";
  }
  if (choice.kind == "dflash2") {
    if (path.empty())
      throw Error(Code::config, "draft.kind is dflash2, and draft.path is not set",
                  "set draft.path or draft.repo to the drafter's checkpoint");
    const DflashConfig drafter = load_dflash_config(path);
    check_dflash_fits(drafter, target);
    choice.dir = path;
    choice.taps = drafter.tap_layers;
    choice.max_drafts = std::min(choice.max_drafts, drafter.block - 1);
  } else if (choice.kind == "mtp") {
    if (target.mtp_layers == 0)
      throw Error(Code::config, "draft.kind is mtp, and the checkpoint has no MTP layer", "use dflash2 or none");
    choice.dir = dir;
  }
  return choice;
}

}  // namespace

DrafterChoice choose_drafter(const Config& config, const std::string& dir, const ModelConfig& target,
                             std::string_view backend, const Everywhere& everywhere) {
  DrafterChoice choice;
  std::optional<Error> error;
  try {
    choice = wanted(config, dir, target, backend);
  } catch (const Error& e) {
    error = e;
  }
  std::string reason;
  if (agree(error, config.boolean("draft.fallback"), everywhere, reason)) return choice;
  DrafterChoice none;
  none.fallback = std::move(reason);
  return none;
}

std::unique_ptr<Drafter> make_drafter(DrafterChoice& choice, const Config& config, const FormatPolicy& policy,
                                      Model& target, Ops& ops, Communicator& comm, const Everywhere& everywhere) {
  std::unique_ptr<Drafter> drafter;
  std::optional<Error> error;
  try {
    if (choice.kind == "dflash2") drafter = make_dflash_drafter(choice.dir, policy, target, ops, comm);
    if (choice.kind == "mtp")
      drafter = make_mtp_drafter(choice.dir, policy, {.max_drafts = choice.max_drafts}, target, ops, comm);
  } catch (const Error& e) {
    error = e;
  }
  if (choice.kind == "none" || agree(error, config.boolean("draft.fallback"), everywhere, choice.fallback))
    return drafter;
  choice.kind = "none";
  return nullptr;
}

}  // namespace glm53
