// Text that comes from outside, damaged at random. The same rounds are the same inputs. GLM53_FUZZ_ROUNDS sets how many
// (default 3000 a target); GLM53_FUZZ_SECONDS (default 0) is shared out among the targets that have a share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace glm53::test {

/// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  size_t below(size_t limit);

 private:
  uint64_t state_;
};

/// One to four changes: bytes, pieces that parsers stumble over, copies, cuts.
std::string damage(std::string text, Random& random);

/// How long a target goes on.
struct Effort {
  double share = 0;   ///< of GLM53_FUZZ_SECONDS
  size_t rounds = 0;  ///< at least; 0: GLM53_FUZZ_ROUNDS
};

/// Calls the target with damaged seeds: it takes them, or refuses them with an Error, and nothing else. What it does
/// otherwise fails the test and is written to the build folder's fuzz/, to be kept as corpus/NAME.WORD. Every seed must
/// be taken as it is, or the damage would only ever meet the first check; what the corpus holds is tried as it is and
/// damaged.
void fuzz(const std::string& name, const std::vector<std::string>& seeds,
          const std::function<void(const std::string&)>& target, Effort effort = {});

}  // namespace glm53::test
