// Schemas, regular expressions and EBNF grammars, damaged at random: compiled within the limits, or refused with an
// Error; what is compiled then takes tokens at random. GLM53_FUZZ_ROUNDS sets how many rounds (default 1500 a target).
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "engine/grammar/compile.h"

using namespace glm53;
using namespace glm53::grammar;
using Json = nlohmann::ordered_json;

namespace {

const std::vector<std::string> kPieces{"\"",
                                       "{",
                                       "}",
                                       "[",
                                       "]",
                                       "(",
                                       ")",
                                       "|",
                                       "*",
                                       "+",
                                       "?",
                                       "{1,100000}",
                                       "{3,}",
                                       "^",
                                       "$",
                                       "\\",
                                       "\\u",
                                       "\\d",
                                       "[^",
                                       "::=",
                                       "root",
                                       "#",
                                       "\n",
                                       "anyOf",
                                       "\"$ref\":\"#\"",
                                       "allOf",
                                       "\xff",
                                       "\xc3\xa9",
                                       "-1",
                                       "1e999",
                                       "18446744073709551616",
                                       "(?:",
                                       ".{0,200}",
                                       std::string(300, '('),
                                       std::string(300, '['),
                                       "null",
                                       "true",
                                       "minItems",
                                       "maxLength"};

std::string damage(std::string text, std::mt19937& random) {
  for (size_t n = 1 + random() % 4; n > 0; --n) {
    const size_t at = random() % (text.size() + 1);
    const size_t length = std::min<size_t>(random() % 16, text.size() - at);
    switch (random() % 4) {
      case 0:
        text.erase(at, length);
        break;
      case 1:
        text.insert(at, kPieces[random() % kPieces.size()]);
        break;
      case 2:
        text.insert(random() % (text.size() + 1), text.substr(at, length));
        break;
      default:
        text.replace(at, length, kPieces[random() % kPieces.size()]);
        break;
    }
  }
  return text;
}

size_t rounds() {
  const auto given = environment("GLM53_FUZZ_ROUNDS");
  const auto number = given ? parse_int(*given) : std::nullopt;
  return number && *number > 0 ? static_cast<size_t>(*number) : 1500;
}

const std::vector<std::string>& words() {
  static const std::vector<std::string> list = [] {
    std::vector<std::string> out;
    for (int b = 0; b < 256; ++b) out.emplace_back(1, static_cast<char>(b));
    for (const char* w :
         {"{\"", "\": ", "\", \"", "true", "null", "abc", " x", "12", "[[", "]}", "\xC3\xA9", "\xE2\x82"})
      out.emplace_back(w);
    return out;
  }();
  return list;
}

/// Compiles and lets random tokens pass; the number of demands that compiled.
size_t run(const std::vector<std::string>& seeds, const char* kind, uint32_t seed) {
  std::mt19937 random(seed);
  const std::vector<std::string_view> views(words().begin(), words().end());
  const auto vocabulary = std::make_shared<const Vocabulary>(views);
  size_t compiled = 0;
  for (size_t round = 0; round < rounds(); ++round) {
    const std::string text = damage(seeds[random() % seeds.size()], random);
    Budget budget;
    std::shared_ptr<const Grammar> grammar;
    try {
      Json value = text;
      if (std::string_view(kind) == "json") value = parse_json(text);
      grammar = std::make_shared<const Grammar>(compile(dump({{"content", {{kind, value}}}}), budget));
    } catch (const Error& e) {
      CHECK_MESSAGE(e.code() == Code::usage, e.what(), " for ", text);
    }
    CHECK(budget.used() <= 2 * budget.limits().work);
    if (grammar == nullptr) continue;
    ++compiled;
    Engine engine(grammar, vocabulary);
    std::vector<uint32_t> bits((words().size() + 31) / 32);
    Engine::Position at = engine.start();
    for (int step = 0; step < 12; ++step) {
      engine.mask(at, bits);
      const auto token = static_cast<int32_t>(random() % words().size());
      const bool may = (bits[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
      const Engine::Position next = engine.after(at, token);
      CHECK_MESSAGE(may == (next != Engine::kDead), text);
      if (next != Engine::kDead) at = next;
    }
  }
  return compiled;
}

}  // namespace

TEST_CASE("fuzz: schemas") {
  std::vector<std::string> seeds;
  for (const Json& c : parse_json(read_file(std::string(GLM53_SOURCE_DIR) + "/tests/unit/grammar/schemas.json")))
    seeds.push_back(dump(c["schema"]));
  CHECK(run(seeds, "json", 1) > 0);
}

TEST_CASE("fuzz: regular expressions") {
  CHECK(run({"^(a|b)*c{2,5}[^x-z]\\d+$", "(?:ab?|[\\u00e0-\\u00ff]){1,20}", ".*\\.(png|jpg)", "\\w+@\\w+\\.[a-z]{2,}"},
            "regex", 2) > 0);
}

TEST_CASE("fuzz: EBNF") {
  CHECK(run({"root ::= expr\nexpr ::= term ([-+] term)*\nterm ::= [0-9]+ | \"(\" expr \")\"",
             "root ::= \"a\" root \"b\" | \"\\n\" # x", "root ::= item{1,5}\nitem ::= [^\\]]+ \".\"?"},
            "ebnf", 3) > 0);
}
