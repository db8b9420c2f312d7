// Tokenizer and chat template against recorded vectors.
#include <cstdlib>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/json.h"
#include "engine/text/chat_template.h"
#include "engine/text/self_check.h"
#include "engine/text/tokenizer.h"

using namespace glm53;
using namespace glm53::text;
using Json = nlohmann::ordered_json;

namespace {

const std::string kData = std::string(GLM53_SOURCE_DIR) + "/tests/golden/data/";

Json load(const std::string& path) {
  return parse_json(read_file(path), {.keep_big_integers = true});
}

const Tokenizer& tiny() {
  static const Tokenizer tokenizer =
      Tokenizer::load(std::string(GLM53_SOURCE_DIR) + "/models/glm53-tiny/tokenizer.json");
  return tokenizer;
}

Json member(const Json& object, const char* key) {
  return object.contains(key) ? object[key] : Json();
}

}  // namespace

TEST_CASE("the tiny tokenizer gives the recorded ids") {
  const Json cases = load(kData + "glm53-tiny/tokenizer_vectors.json");
  REQUIRE(cases.size() == 79);
  for (const Json& c : cases) {
    const auto text = c["text"].get<std::string>();
    CAPTURE(text);
    const auto ids = tiny().encode(text);
    CHECK(ids == c["ids"].get<std::vector<int32_t>>());
    CHECK(tiny().decode(ids) == text);
  }
}

// The ids of these vectors need the release's vocabulary of 154,856 entries. Without it the texts still exercise the
// mechanism: nothing is lost, and pieces are never joined across added tokens.
TEST_CASE("the texts of the release vectors survive a round trip") {
  const Json cases = load(kData + "text/tokenizer_vectors.json")["cases"];
  REQUIRE(cases.size() == 59);
  for (const Json& c : cases) {
    const auto text = c["text"].get<std::string>();
    CAPTURE(text);
    CHECK(tiny().decode(tiny().encode(text)) == text);
  }
}

TEST_CASE("the release tokenizer gives the recorded ids, where it is at hand") {
  const char* path = std::getenv("GLM53_RELEASE_TOKENIZER");
  if (path == nullptr) {
    MESSAGE("GLM53_RELEASE_TOKENIZER is not set: release ids not compared");
    return;
  }
  const Tokenizer release = Tokenizer::load(path);
  for (const Json& c : load(kData + "text/tokenizer_vectors.json")["cases"]) {
    CHECK(release.encode(c["text"].get<std::string>()) == c["ids"].get<std::vector<int32_t>>());
  }
  const std::vector<int32_t> eos = {154820, 154827, 154829};
  CHECK_NOTHROW(self_check(release, 154880, eos));
}

TEST_CASE("the chat template renders the recorded prompts") {
  const Json cases = load(kData + "text/chat_examples.json");
  REQUIRE(cases.size() == 28);
  for (const Json& c : cases) {
    const auto name = c["name"].get<std::string>();
    CAPTURE(name);
    const Json& kwargs = c["kwargs"];
    ChatOptions options = parse_options(kwargs, Json(), Json(), false);
    options.add_generation_prompt = kwargs.value("add_generation_prompt", true);
    const auto pieces = render_chat(parse_messages(c["messages"]), parse_tools(member(c, "tools")), options);
    const auto prompt = c["prompt"].get<std::string>();
    CHECK(flatten(pieces) == prompt);
    CHECK(tiny().encode(pieces, Escape::media) == tiny().encode(prompt));
  }
}

TEST_CASE("the sample prompts of the tiny model are the template's") {
  for (const Json& sample : load(kData + "glm53-tiny/samples.json")) {
    if (!sample.contains("prompt_ids")) continue;
    const auto ids = sample["prompt_ids"].get<std::vector<int32_t>>();
    CHECK(tiny().encode(tiny().decode(ids)) == ids);
  }
}
