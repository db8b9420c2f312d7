#include "tests/unit/fuzz/fuzz.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include <doctest/doctest.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

/// Pieces that parsers stumble over.
const std::vector<std::string>& pieces() {
  static const std::vector<std::string> kPieces{"\"",
                                                "{",
                                                "}",
                                                "[",
                                                "]",
                                                ",",
                                                ":",
                                                "null",
                                                "-1",
                                                "1e999",
                                                "18446744073709551616",
                                                "9223372036854775807",
                                                "\\u0000",
                                                "\\ud800",
                                                "../",
                                                "/",
                                                "\n",
                                                "\r",
                                                "=",
                                                "'",
                                                "\"\"\"",
                                                "#",
                                                "true",
                                                "\xff\xfe",
                                                "\xc0\xaf",
                                                "$(x)",
                                                "-----BEGIN ",
                                                std::string(1, '\0'),
                                                std::string(300, '['),
                                                std::string(300, 'a'),
                                                "{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":1}}}}}}"};
  return kPieces;
}

size_t number_of(const char* variable, size_t otherwise) {
  const auto given = environment(variable);
  const auto number = given ? parse_int(*given) : std::nullopt;
  return number && *number > 0 ? static_cast<size_t>(*number) : otherwise;
}

/// Inputs that once were trouble, in the order of their names.
std::vector<std::string> corpus(const std::string& name) {
  std::vector<std::string> files, texts;
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(cat(GLM53_SOURCE_DIR, "/tests/unit/fuzz/corpus"), none)) {
    if (entry.path().filename().string().starts_with(name + ".")) files.push_back(entry.path().string());
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) texts.push_back(read_file(file));
  return texts;
}

/// True: refused.
bool refuses(const std::string& name, const std::function<void(const std::string&)>& target, const std::string& input) {
  try {
    target(input);
  } catch (const Error&) {
    return true;
  } catch (const std::exception& e) {
    const std::string file = cat(GLM53_BINARY_DIR, "/fuzz/", name, ".", sha256_hex(input).substr(0, 12));
    make_dirs(cat(GLM53_BINARY_DIR, "/fuzz"));
    write_file(file, input);
    FAIL_CHECK(file << ": " << e.what());
  }
  return false;
}

}  // namespace

size_t Random::below(size_t limit) {
  uint64_t z = state_ += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return static_cast<size_t>((z ^ z >> 31) % limit);
}

std::string damage(std::string text, Random& random) {
  const size_t times = 1 + random.below(4);
  for (size_t i = 0; i < times; ++i) {
    const size_t at = random.below(text.size() + 1);
    const size_t length = random.below(std::min<size_t>(text.size() - at, 24) + 1);
    switch (random.below(6)) {
      case 0:
        if (at < text.size()) text[at] = static_cast<char>(random.below(256));
        break;
      case 1:
        text.erase(at, length);
        break;
      case 2:
        text.insert(at, pieces()[random.below(pieces().size())]);
        break;
      case 3:
        text.insert(random.below(text.size() + 1), text.substr(at, length));
        break;
      case 4:
        text.resize(at);
        break;
      default:
        text.replace(at, length, pieces()[random.below(pieces().size())]);
        break;
    }
  }
  return text;
}

void fuzz(const std::string& name, const std::vector<std::string>& seeds,
          const std::function<void(const std::string&)>& target, Effort effort) {
  Random random(53);
  std::vector<std::string> all = seeds;
  for (const std::string& seed : seeds) {
    CAPTURE(seed);
    CHECK_NOTHROW(target(seed));
  }
  for (const std::string& input : corpus(name)) {
    refuses(name, target, input);
    all.push_back(input);
  }
  const size_t rounds = effort.rounds > 0 ? effort.rounds : number_of("GLM53_FUZZ_ROUNDS", 3000);
  const double seconds = effort.share * static_cast<double>(number_of("GLM53_FUZZ_SECONDS", 0));
  const auto until = Clock::now() + std::chrono::duration<double>(seconds);
  size_t refused = 0;
  for (size_t i = 0; i < rounds || Clock::now() < until; ++i) {
    std::string input = damage(all[i % all.size()], random);
    if (random.below(8) == 0) input = damage(std::move(input), random);
    refused += refuses(name, target, input) ? 1 : 0;
  }
  CHECK(refused > 0);
}

}  // namespace glm53::test
