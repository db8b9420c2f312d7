// The checkpoint's own MTP layer as a drafter (spec speculative §2, model §7): one more layer behind the target's last,
// which from a position's hidden state and the token behind it predicts the token after that; chained for more drafts.
#pragma once

#include <memory>
#include <string>

#include "engine/draft/drafter.h"

namespace glm53 {

struct MtpOptions {
  int max_drafts = 4;  ///< longest chain; at most max_window − 1 of the target
  /// The layer reads hidden states behind the target's final norm (else in front of it).
  bool post_norm = true;
  /// The embedding of the token behind position 0 counts as zero (one public engine does this).
  bool zero_first = false;
};

/// Loads the MTP layer of the target's checkpoint in `dir`, divided as the target. Throws Error(config) when it has
/// none. Target, `ops` and `comm` outlive the drafter.
std::unique_ptr<Drafter> make_mtp_drafter(const std::string& dir, const FormatPolicy& policy, const MtpOptions& options,
                                          Model& target, Ops& ops, Communicator& comm);

}  // namespace glm53
