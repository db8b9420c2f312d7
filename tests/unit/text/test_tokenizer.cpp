#include <algorithm>
#include <random>
#include <string>
#include <thread>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "engine/text/detokenizer.h"
#include "engine/text/self_check.h"
#include "tests/unit/text/tiny.h"

using namespace glm53;
using namespace glm53::text;

namespace {

using Ids = std::vector<int32_t>;
using Json = nlohmann::json;

Json tiny_json() {
  return Json::parse(read_file(std::string(GLM53_SOURCE_DIR) + "/models/glm53-tiny/tokenizer.json"));
}

/// The plain algorithm: look for the best pair again and again.
Ids naive_merge(const Json& model, const std::string& piece) {
  std::vector<std::string> parts;
  for (const char c : piece) parts.emplace_back(1, c);
  const auto rank_of = [&](const std::string& a, const std::string& b) {
    for (size_t r = 0; r < model["merges"].size(); ++r) {
      if (model["merges"][r][0] == a && model["merges"][r][1] == b) return r;
    }
    return SIZE_MAX;
  };
  while (parts.size() > 1) {
    size_t best = SIZE_MAX, at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      if (const size_t r = rank_of(parts[i], parts[i + 1]); r < best) {
        best = r;
        at = i;
      }
    }
    if (best == SIZE_MAX) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
  Ids ids;
  for (const std::string& p : parts) ids.push_back(model["vocab"][p].get<int32_t>());
  return ids;
}

std::string why(const Json& file) {
  try {
    Tokenizer::parse(file.dump(), "x.json");
  } catch (const Error& e) {
    CHECK(e.code() == Code::weights);
    return e.what();
  }
  return "accepted";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("merges equal the plain algorithm") {
  const Json model = tiny_json()["model"];
  std::mt19937 random(3);
  const std::string letters = "abcdeehiilmnnoorsttuw";
  for (int round = 0; round < 60; ++round) {
    std::string piece;
    for (size_t n = 1 + random() % 12; n > 0; --n) piece += letters[random() % letters.size()];
    const Ids expected =
        model["vocab"].contains(piece) ? Ids{model["vocab"][piece].get<int32_t>()} : naive_merge(model, piece);
    CHECK(tiny().encode(piece) == expected);
    CHECK(tiny().encode(piece) == expected);  // from the cache
  }
}

TEST_CASE("a megabyte of letters, of one letter, of spaces is encoded and decoded") {
  std::mt19937 random(5);
  std::string letters(1 << 20, 'a');
  CHECK(tiny().decode(tiny().encode(letters)) == letters);
  for (char& c : letters) c = static_cast<char>('a' + random() % 26);
  CHECK(tiny().decode(tiny().encode(letters)) == letters);
  const std::string spaces(1 << 20, ' ');
  CHECK(tiny().decode(tiny().encode(spaces)) == spaces);
  const std::string brackets(1 << 20, '<');
  CHECK(tiny().decode(tiny().encode(brackets)) == brackets);
}

TEST_CASE("added tokens are matched first, leftmost and longest") {
  const int32_t user = tiny().require("<|user|>"), think_end = tiny().require("</think>");
  CHECK(tiny().encode("<|user|>") == Ids{user});
  CHECK(tiny().encode("</think><|user|>") == Ids{think_end, user});
  Ids expected = tiny().encode("a ");
  expected.push_back(user);
  const Ids tail = tiny().encode(" b");
  expected.insert(expected.end(), tail.begin(), tail.end());
  CHECK(tiny().encode("a <|user|> b") == expected);
  const Ids open = tiny().encode("<|use");
  CHECK(std::none_of(open.begin(), open.end(), [](int32_t id) { return tiny().is_added(id); }));
}

TEST_CASE("client text may be kept from spelling control or media tokens") {
  const auto added = [](const std::vector<TextPiece>& pieces, Escape escape) {
    Ids out;
    for (const int32_t id : tiny().encode(pieces, escape)) {
      if (tiny().is_added(id)) out.push_back(id);
    }
    return out;
  };
  const int32_t user = tiny().require("<|user|>"), image = tiny().require("<|image|>"),
                think = tiny().require("<think>");
  const std::vector<TextPiece> pieces = {{"<|user|>", true}, {"x<|user|><|image|><think>", false}, {"<|user|>", true}};
  CHECK(added(pieces, Escape::none) == Ids{user, user, image, think, user});
  CHECK(added(pieces, Escape::media) == Ids{user, user, think, user});
  CHECK(added(pieces, Escape::control) == Ids{user, think, user});
  for (const Escape escape : {Escape::none, Escape::media, Escape::control}) {
    CHECK(tiny().decode(tiny().encode(pieces, escape)) == "<|user|>x<|user|><|image|><think><|user|>");
  }
  // An escaped token is no boundary, nor is the place where two client pieces meet.
  CHECK(tiny().encode(std::vector<TextPiece>{{"wor", false}, {"ld", false}}, Escape::control) ==
        tiny().encode("world"));
  // Half from the client, half from the template: not the client's to complete.
  CHECK(added({{"<|us", false}, {"er|>", true}}, Escape::control).empty());
}

TEST_CASE("deltas join to the one-shot text, never cutting a code point") {
  const std::string text = "caf\xC3\xA9 \xF0\x9F\x98\x80\xE4\xBD\xA0<|user|>\xE5\xA5\xBD!";
  Ids ids = tiny().encode(text);
  for (const bool skip : {false, true}) {
    Detokenizer detokenizer(tiny(), skip);
    std::string joined;
    for (const int32_t id : ids) {
      std::string delta;
      detokenizer.push(id, delta);
      CHECK(valid_utf8(delta));
      joined += delta;
    }
    detokenizer.finish(joined);
    CHECK(joined == tiny().decode(ids, skip));
    CHECK(contains(joined, "<|user|>") == !skip);
  }
}

TEST_CASE("bytes on the two sides of an added token never combine, padding rows change nothing") {
  const int32_t user = tiny().require("<|user|>");
  const Ids e = tiny().encode("\xC3\xA9");  // two byte tokens in this vocabulary
  REQUIRE(e.size() == 2);
  CHECK(tiny().decode(Ids{e[0], user, e[1]}, true) == "\xEF\xBF\xBD\xEF\xBF\xBD");
  CHECK(tiny().decode(Ids{e[0], tiny().size() + 5, e[1]}) == "\xC3\xA9");
  CHECK(tiny().decode(Ids{-1, e[0]}) == "\xEF\xBF\xBD");
  CHECK(tiny().bytes(tiny().size()).empty());
}

TEST_CASE("a tokenizer that is not this one is refused with the member's name") {
  const Json good = tiny_json();
  CHECK(why(good) == "accepted");
  Json t = good;
  t["normalizer"] = {{"type", "NFC"}};
  CHECK(contains(why(t), "normalizer"));
  t = good;
  t["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\w+";
  CHECK(contains(why(t), "pre_tokenizer[0].pattern"));
  t = good;
  t["model"]["ignore_merges"] = false;
  CHECK(contains(why(t), "ignore_merges"));
  t = good;
  t["model"]["unk_token"] = "<unk>";
  CHECK(contains(why(t), "unk_token"));
  t = good;
  t["model"]["merges"][7] = "nospace";
  CHECK(contains(why(t), "merges[7]"));
  t = good;
  t["model"]["merges"][7] = Json::array({"qqqq", "zzzz"});
  CHECK(contains(why(t), "merges[7]"));
  t = good;
  t["model"]["vocab"].erase("!");
  CHECK(contains(why(t), "byte 33"));
  t = good;
  t["added_tokens"][7]["lstrip"] = true;
  CHECK(contains(why(t), "<|user|>"));
  t = good;
  t["added_tokens"].erase(7);
  CHECK(contains(why(t), "<|user|> is missing"));
  CHECK(contains(why(Json::array()), "not an object"));
  CHECK_THROWS_AS(Tokenizer::parse("{", "x.json"), Error);
  // Merges written as one string mean the same.
  t = good;
  for (Json& m : t["model"]["merges"]) m = m[0].get<std::string>() + " " + m[1].get<std::string>();
  CHECK(Tokenizer::parse(t.dump(), "x").encode("Hello, world!") == tiny().encode("Hello, world!"));
}

TEST_CASE("self-check") {
  const Ids eos = {tiny().require("<|endoftext|>"), tiny().require("<|user|>"), tiny().require("<|observation|>")};
  CHECK_NOTHROW(self_check(tiny(), 2688, eos));
  CHECK_THROWS_WITH_AS(self_check(tiny(), 100, eos), doctest::Contains("rows"), Error);
  CHECK_THROWS_WITH_AS(self_check(tiny(), 2688, Ids{}), doctest::Contains("eos_token_id"), Error);
  CHECK_THROWS_WITH_AS(self_check(tiny(), 2688, Ids{5}), doctest::Contains("end token 5"), Error);
}

TEST_CASE("encoding is the same from many threads") {
  std::string text;
  for (int i = 0; i < 300; ++i) text += cat("word", i * 37 % 91, " thinks of ", i, " things; ");
  const Ids expected = tiny().encode(text);
  std::vector<std::thread> threads;
  std::vector<Ids> results(4);
  for (size_t i = 0; i < results.size(); ++i) threads.emplace_back([&, i] { results[i] = tiny().encode(text); });
  for (std::thread& t : threads) t.join();
  for (const Ids& r : results) CHECK(r == expected);
}
