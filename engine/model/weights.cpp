#include "engine/model/weights.h"

#include "common/strings.h"
#include "engine/loader/source.h"

namespace glm53 {

std::vector<std::pair<std::string, size_t>> WeightLedger::lines() const {
  std::vector<std::pair<std::string, size_t>> out;
  for (size_t g = 0; g < bytes.size(); ++g)
    if (bytes[g] != 0) out.emplace_back(name(static_cast<WeightGroup>(g)), bytes[g]);
  return out;
}

WeightReader::WeightReader(WeightSource& source, WeightLedger& ledger, std::string prefix)
    : source_(&source), ledger_(&ledger), prefix_(std::move(prefix)) {}

WeightReader WeightReader::under(std::string_view more) const {
  return {*source_, *ledger_, cat(prefix_, more)};
}

Weight WeightReader::take(std::string_view name, WeightGroup group, Split split) const {
  const uint64_t before = source_->bytes_taken();
  Weight w = source_->take(cat(prefix_, name), group, split);
  ledger_->bytes[static_cast<size_t>(group)] += source_->bytes_taken() - before;
  return w;
}

Weight WeightReader::stacked(std::initializer_list<StackPart> parts, WeightGroup group) const {
  std::vector<StackPart> full;
  for (const StackPart& part : parts) full.push_back({cat(prefix_, part.name), part.split});
  const uint64_t before = source_->bytes_taken();
  Weight w = source_->take_stacked(full, group);
  ledger_->bytes[static_cast<size_t>(group)] += source_->bytes_taken() - before;
  return w;
}

}  // namespace glm53
