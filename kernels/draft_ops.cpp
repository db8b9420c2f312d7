// What a backend says that does not have a drafter's operator.
#include "kernels/draft_ops.h"

#include <string>

#include "common/error.h"

namespace glm53 {
namespace {

[[noreturn]] void missing(std::string_view backend, std::string_view op) {
  throw Error(Code::unavailable, std::string(op) + ": the " + std::string(backend) + " backend has no such operator",
              "run without this drafter");
}

}  // namespace

void Ops::rope(const RopeArgs&) {
  missing(backend(), "rope");
}
void Ops::block_conv(const BlockConvArgs&) {
  missing(backend(), "block_conv");
}
void Ops::draft_write(const DraftWriteArgs&) {
  missing(backend(), "draft_write");
}
void Ops::draft_attention(const DraftAttentionArgs&) {
  missing(backend(), "draft_attention");
}
void Ops::top_logits(const TopLogitsArgs&) {
  missing(backend(), "top_logits");
}
void Ops::selector_walk(const SelectorWalkArgs&) {
  missing(backend(), "selector_walk");
}

}  // namespace glm53
