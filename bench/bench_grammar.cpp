// What a token mask costs: documents of common schemas, token by token, with a vocabulary as large as the release's.
// The vocabulary is made up (the same every time) unless --tokenizer names a tokenizer.json. Prints JSON.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <random>
#include <unordered_set>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/grammar/compile.h"

namespace {

using namespace glm53;
using namespace glm53::grammar;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double microseconds(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

/// 150,000 tokens in the proportions of a byte-level BPE: bytes, punctuation in runs, words with and without a space
/// before them, numbers of up to three digits, words in two-byte and three-byte letters, pieces of characters.
std::vector<std::string> synthetic() {
  std::mt19937 random(53);
  std::unordered_set<std::string> seen;
  std::vector<std::string> out;
  const auto add = [&](const std::string& s) {
    if (!s.empty() && seen.insert(s).second) out.push_back(s);
  };
  for (int b = 0; b < 256; ++b) add(std::string(1, static_cast<char>(b)));
  for (int n = 0; n < 1000; ++n) add(std::to_string(n));
  const std::string punctuation = "\"{}[]:,.()<>=/\\'-_#*+;|!? \n\t";
  while (out.size() < 8000) {
    std::string s;
    for (size_t n = 2 + random() % 4; n > 0; --n) s += punctuation[random() % punctuation.size()];
    add(s);
  }
  for (int n = 1; n < 80; ++n) {
    add(std::string(static_cast<size_t>(n), ' '));
    add(std::string(static_cast<size_t>(n), '-'));
  }
  const char* syllables[] = {"a",   "er", "in", "tion", "re", "con", "st", "ment", "al", "o",  "pro",
                             "ing", "e",  "s",  "ch",   "un", "th",  "ly", "com",  "de", "it", "y",
                             "ver", "k",  "ra", "lo",   "mi", "qu",  "x",  "B",    "T",  "C"};
  while (out.size() < 105'000) {
    std::string s = random() % 2 == 0 ? " " : "";
    for (size_t n = 1 + random() % 5; n > 0; --n) s += syllables[random() % std::size(syllables)];
    if (random() % 40 == 0) s += "\":";
    add(s);
  }
  while (out.size() < 150'000) {
    std::string s;
    const bool wide = random() % 4 != 0;
    for (size_t n = 1 + random() % 4; n > 0; --n) {
      if (wide) s += static_cast<char>(0xE4 + random() % 5);
      s += static_cast<char>(wide ? 0x80 + random() % 0x40 : 0xD0 + random() % 2);
      s += static_cast<char>(0x80 + random() % 0x40);
    }
    if (random() % 20 == 0) s.pop_back();
    add(s);
  }
  return out;
}

struct Document {
  const char *name, *schema, *text;
};
const Document kDocuments[] = {
    {"object of scalars",
     R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"},"admin":{"type":"boolean"}},"required":["name","age","admin"],"additionalProperties":false})",
     R"({"name": "Ada Lovelace of London", "age": 36, "admin": false})"},
    {"list of records",
     R"({"type":"array","items":{"type":"object","properties":{"id":{"type":"integer"},"title":{"type":"string","maxLength":80},"state":{"enum":["open","closed","merged"]},"labels":{"type":"array","items":{"type":"string"}}},"required":["id","title","state","labels"]}})",
     R"([{"id": 17, "title": "Pages are lost after a restart", "state": "open", "labels": ["bug", "storage"]}, {"id": 18, "title": "Say which port is taken", "state": "merged", "labels": []}])"},
    {"tree by reference",
     R"({"$defs":{"node":{"type":"object","properties":{"name":{"type":"string"},"children":{"type":"array","items":{"$ref":"#/$defs/node"}}},"required":["name","children"]}},"$ref":"#/$defs/node"})",
     R"({"name": "root", "children": [{"name": "left branch", "children": []}, {"name": "right", "children": [{"name": "leaf", "children": []}]}]})"},
    {"union by a member",
     R"({"anyOf":[{"type":"object","properties":{"kind":{"const":"move"},"x":{"type":"number"},"y":{"type":"number"}},"required":["kind","x","y"]},{"type":"object","properties":{"kind":{"const":"say"},"text":{"type":"string"}},"required":["kind","text"]}]})",
     R"({"kind": "say", "text": "Some words that are said, one after the other."})"},
    {"patterns and formats",
     R"({"type":"object","properties":{"sku":{"type":"string","pattern":"^[A-Z]{3}-[0-9]{4}$"},"at":{"type":"string","format":"date-time"},"price":{"type":"number","minimum":0,"maximum":100000},"mail":{"type":"string","format":"email"}},"required":["sku","at","price","mail"]})",
     R"({"sku": "ABC-1234", "at": "2026-12-01T10:20:30Z", "price": 129.95, "mail": "ada@example.org"})"},
    {"any object", R"({"type":"object"})",
     R"({"a": [1, 2, {"b": null}], "text": "free text with \"quotes\" and \u00e9", "n": -1.5e10, "deep": {"x": {"y": {"z": []}}}})"}};

double at(const std::vector<double>& sorted, double share) {
  return sorted[std::min(sorted.size() - 1, static_cast<size_t>(share * static_cast<double>(sorted.size())))];
}
Json summary(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return {{"tokens", values.size()},
          {"p50_us", at(values, 0.5)},
          {"p90_us", at(values, 0.9)},
          {"p99_us", at(values, 0.99)},
          {"max_us", values.back()}};
}

}  // namespace

int main(int argc, char** argv) {
  try {
    std::shared_ptr<const Vocabulary> vocabulary;
    if (argc == 3 && std::string_view(argv[1]) == "--tokenizer") {
      vocabulary = vocabulary_of(text::Tokenizer::load(argv[2]));
    } else if (argc == 1) {
      const std::vector<std::string> words = synthetic();
      const std::vector<std::string_view> views(words.begin(), words.end());
      vocabulary = std::make_shared<const Vocabulary>(views);
    } else {
      throw Error(Code::usage, "bench_grammar [--tokenizer tokenizer.json]");
    }
    std::vector<uint32_t> bits((static_cast<size_t>(vocabulary->size()) + 31) / 32);
    std::vector<double> first, later;
    Json schemas = Json::array();
    for (const Document& d : kDocuments) {
      const Json demand = {{"content", {{"json", parse_json(d.schema)}}}};
      const auto begin = Clock::now();
      const auto grammar = std::make_shared<const Grammar>(compile(dump(demand)));
      const double compiled = microseconds(Clock::now() - begin);
      Engine engine(grammar, vocabulary);
      std::vector<double> times[2];
      for (int pass = 0; pass < 10; ++pass) {
        Engine::Position position = engine.start();
        for (std::string_view rest = d.text; !rest.empty();) {
          const auto start = Clock::now();
          engine.mask(position, bits);
          times[pass == 0 ? 0 : 1].push_back(microseconds(Clock::now() - start));
          const int32_t token = vocabulary->longest(rest);
          rest.remove_prefix(vocabulary->text(token).size());
          position = engine.after(position, token);
          if (position == Engine::kDead)
            throw Error(Code::internal, cat("the document of \"", d.name, "\" is refused"));
        }
        if (!engine.complete(position))
          throw Error(Code::internal, cat("the document of \"", d.name, "\" is not complete"));
      }
      first.insert(first.end(), times[0].begin(), times[0].end());
      later.insert(later.end(), times[1].begin(), times[1].end());
      schemas.push_back({{"schema", d.name},
                         {"compile_us", compiled},
                         {"first_document", summary(times[0])},
                         {"later_documents", summary(times[1])}});
    }
    const Json out = {{"vocabulary", vocabulary->tokens().size()},
                      {"trie_nodes", vocabulary->nodes().size()},
                      {"schemas", schemas},
                      {"first_documents", summary(first)},
                      {"later_documents", summary(later)}};
    std::cout << out.dump(2) << "\n";
    return 0;
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 1;
  }
}
