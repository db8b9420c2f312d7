#include "engine/text/self_check.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/strings.h"
#include "engine/text/chat_template.h"

namespace glm53::text {

namespace {

constexpr int32_t kReleaseSize = 154856;

/// Tokens the format needs, with their ids in the release vocabulary.
constexpr std::array<std::pair<std::string_view, int32_t>, 23> kNeeded = {{
    {"<|endoftext|>", 154820},
    {"[gMASK]", 154822},
    {"<sop>", 154824},
    {"<|system|>", 154826},
    {"<|user|>", 154827},
    {"<|assistant|>", 154828},
    {"<|observation|>", 154829},
    {"<|begin_of_image|>", 154830},
    {"<|end_of_image|>", 154831},
    {"<|begin_of_video|>", 154832},
    {"<|end_of_video|>", 154833},
    {"<think>", 154841},
    {"</think>", 154842},
    {"<tool_call>", 154843},
    {"</tool_call>", 154844},
    {"<tool_response>", 154845},
    {"</tool_response>", 154846},
    {"<arg_key>", 154847},
    {"</arg_key>", 154848},
    {"<arg_value>", 154849},
    {"</arg_value>", 154850},
    {"<|image|>", 154854},
    {"<|video|>", 154855},
}};

constexpr std::array<std::string_view, 8> kTexts = {
    "Hello, world!",
    "don't  can't  it's  we've  they'll  I'd  he's",
    "   \n   leading blank line",
    "1 12 123 1234 3.14159 -42",
    "\xE4\xBD\xA0\xE5\xA5\xBD\xEF\xBC\x8C\xE4\xB8\x96\xE7\x95\x8C",
    "\xF0\x9F\x98\x80 emoji \xF0\x9F\x9A\x80 caf\xC3\xA9 e\xCC\x81",
    "if (x != y) {\r\n\treturn \"z\";\r\n}\n\n",
    "<<|user|>> a<think>b</think>c [gMASK]<sop>",
};

[[noreturn]] void fail(const std::string& what) {
  throw Error(Code::weights, cat("tokenizer self-check: ", what),
              "use the tokenizer.json that belongs to the checkpoint");
}

void check_ids(const Tokenizer& tokenizer, int32_t model_rows, std::span<const int32_t> eos) {
  for (const auto& [token, id] : kNeeded) {
    const int32_t found = tokenizer.require(token);
    if (tokenizer.size() == kReleaseSize && found != id) fail(cat(token, " has id ", found, ", expected ", id));
  }
  if (model_rows < tokenizer.size()) {
    fail(cat("the tokenizer has ", tokenizer.size(), " ids, the model only ", model_rows, " rows"));
  }
  if (eos.empty()) fail("generation_config.json names no eos_token_id");
  for (const int32_t id : eos) {
    if (!tokenizer.is_added(id)) fail(cat("end token ", id, " is no added token"));
  }
}

void check_added_positions(const Tokenizer& tokenizer) {
  const int32_t user = tokenizer.chat().user;
  const auto before = tokenizer.encode("<"), after = tokenizer.encode(">");
  std::vector<int32_t> expected = before;
  expected.push_back(user);
  expected.insert(expected.end(), after.begin(), after.end());
  if (tokenizer.encode("<<|user|>>") != expected) fail("<|user|> within a text is not recognised");
}

void check_release(const Tokenizer& tokenizer) {
  const auto expect = [&tokenizer](std::string_view text, const std::vector<int32_t>& ids) {
    if (tokenizer.encode(text) != ids) fail(cat("\"", text, "\" has other ids than the reference"));
  };
  expect("Hello, world!", {9703, 11, 1879, 0});
  expect("  .", {220, 659});
  expect("1234", {108714, 19});
  expect("   \n   leading blank line", {5872, 256, 6388, 10108, 1555});
  expect("<<|user|>>", {27, 154827, 29});
}

void check_template() {
  Message hello;
  hello.content.parts.push_back({PartKind::text, "Hello!"});
  const std::string prompt = flatten(render_chat({hello}, {}, {}));
  if (prompt != "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>Hello!<|assistant|><think>") {
    fail("the chat template renders " + prompt);
  }
}

}  // namespace

void self_check(const Tokenizer& tokenizer, int32_t model_rows, std::span<const int32_t> eos) {
  check_ids(tokenizer, model_rows, eos);
  for (const std::string_view text : kTexts) {
    if (tokenizer.decode(tokenizer.encode(text)) != text) fail(cat("\"", text, "\" does not survive a round trip"));
  }
  check_added_positions(tokenizer);
  if (tokenizer.size() == kReleaseSize) check_release(tokenizer);
  check_template();
}

}  // namespace glm53::text
