// The DFlash2 drafter (spec speculative §1): a small transformer that fills a block of masked positions at once, from
// the target's hidden states of the positions before.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/draft/drafter.h"

namespace glm53 {

/// config.json of a DFlash2 drafter (§1.2).
struct DflashConfig {
  int64_t vocab = 0, hidden = 0, intermediate = 0;
  int layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  int target_layers = 0;
  int block = 0;                ///< rows of the draft block: the anchor and block − 1 drafts
  int window = 0;               ///< a row sees positions less than this behind it
  int32_t mask_token = 0;       ///< row of the target's embedding that stands for "to be filled"
  std::vector<int> tap_layers;  ///< the target's layers whose outputs are read, in the order of fc's columns
  int conv_kernel = 0, conv_group = 0;
  int selector_rank = 0, selector_top_k = 0;
  float rms_eps = 0;
  double rope_theta = 0;
  std::string digest;  ///< sha256 of the file's bytes
};

/// Throws Error(config) naming the field, what it holds and what is supported. The target is loaded with
/// ModelLimits::taps = tap_layers.
DflashConfig load_dflash_config(const std::string& dir);
DflashConfig parse_dflash_config(const std::string& json_text, const std::string& where);
/// Throws Error(config) with every reason why this drafter cannot draft for that target, and what would be right.
void check_dflash_fits(const DflashConfig& config, const ModelConfig& target);

/// Checks the drafter's config against the target's and every tensor of `dir`, then loads this rank's part: heads and
/// MLP columns are divided as the target's, everything else is whole on each rank. `target` was loaded with
/// ModelLimits::taps = tap_layers. Throws Error(config) or Error(weights) with all findings. Target, `ops` and `comm`
/// outlive the drafter.
std::unique_ptr<Drafter> make_dflash_drafter(const std::string& dir, const FormatPolicy& policy, Model& target,
                                             Ops& ops, Communicator& comm);

}  // namespace glm53
