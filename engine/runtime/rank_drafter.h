// Which drafter a rank uses ([draft] of the configuration), and making it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/config.h"
#include "engine/draft/drafter.h"

namespace glm53 {

/// Found out before the target is loaded, which has to give the drafter what it reads.
struct DrafterChoice {
  std::string kind = "none";  ///< "none", "mtp", "dflash2"
  std::string dir;            ///< of its checkpoint
  std::vector<int> taps;      ///< for ModelLimits
  int max_drafts = 0;
  std::string fallback;  ///< why there is none although one was wanted; empty where all is as wanted
};

/// Whether something is so on every rank; each of them asks.
using Everywhere = std::function<bool(bool mine)>;

/// What draft.kind, draft.path and the target's checkpoint in `dir` ask for, on this backend. Every rank calls it; all
/// come to the same choice. Throws Error(config), on every rank, when the drafter does not fit the target or one rank
/// cannot have it; with draft.fallback there is none then.
DrafterChoice choose_drafter(const Config& config, const std::string& dir, const ModelConfig& target,
                             std::string_view backend, const Everywhere& everywhere);
/// Loads it; null for "none". With draft.fallback a failure on any rank makes it null on all, and says why in `choice`.
std::unique_ptr<Drafter> make_drafter(DrafterChoice& choice, const Config& config, const FormatPolicy& policy,
                                      Model& target, Ops& ops, Communicator& comm, const Everywhere& everywhere);

}  // namespace glm53
