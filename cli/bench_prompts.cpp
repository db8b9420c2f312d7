#include "cli/bench_prompts.h"

#include <algorithm>
#include <array>
#include <functional>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

using Json = nlohmann::ordered_json;

/// Prompts of a class, so that 16 streams ask different things.
constexpr int kOfEach = 16;

DecodePrompt user(std::string text) {
  DecodePrompt prompt;
  prompt.messages.push_back({"user", std::move(text)});
  return prompt;
}

std::vector<DecodePrompt> make(const std::function<DecodePrompt(int)>& one) {
  std::vector<DecodePrompt> prompts;
  for (int i = 0; i < kOfEach; ++i) prompts.push_back(one(i));
  return prompts;
}

std::string numbers(int64_t from, int64_t to) {
  std::string text;
  for (int64_t n = from; n <= to; ++n) text += cat(n == from ? "" : ", ", n);
  return text + ".";
}

constexpr std::array<std::string_view, kOfEach> kAnimals = {"fox",   "dog",  "cat",  "bird",    "bear", "mouse",
                                                            "horse", "frog", "duck", "sheep",   "goat", "rabbit",
                                                            "owl",   "pig",  "cow",  "squirrel"};
constexpr std::array<std::string_view, kOfEach> kNames = {"Anna", "Ben", "Chloe", "Daisy", "Emma",  "Felix",
                                                          "Nora", "Leo", "Mia",   "Nelly", "Oscar", "Paul",
                                                          "Rosa", "Sam", "Tom",   "Zoe"};
constexpr std::array<std::string_view, 4> kCities = {"Paris", "Rome", "London", "Berlin"};

DecodePrompt counting(int64_t from, int64_t to) {
  DecodePrompt prompt = user(cat("Count from ", from, " to ", to, "."));
  prompt.count = DecodePrompt::Range{from, to};
  return prompt;
}

/// What models/glm53-tiny was trained on: counting, stories, JSON objects. Its edits are counts that it has before it,
/// begun and ended elsewhere.
PromptSet tiny_prompts() {
  PromptSet set;
  set["structured"] = make([](int i) { return counting(1 + i, 100 + i); });
  set["prose"] =
      make([](int i) { return user(cat("Tell me a story about a ", kAnimals.at(static_cast<size_t>(i)), ".")); });
  set["code"] = make([](int i) {
    const auto n = static_cast<size_t>(i);
    DecodePrompt prompt = user(cat("Make a JSON object for a person named ", kNames.at(n), " who is ", 30 + i,
                                   " years old and lives in ", kCities.at(n % kCities.size()), "."));
    prompt.json = true;
    prompt.contains = kNames.at(n);
    return prompt;
  });
  set["edit"] = make([](int i) {
    DecodePrompt prompt = user(cat("Count from ", 1 + i, " to ", 60 + i, "."));
    prompt.messages.push_back({"assistant", numbers(1 + i, 60 + i)});
    prompt.messages.push_back({"user", cat("Count from ", 2 + i, " to ", 63 + i, ".")});
    prompt.count = DecodePrompt::Range{2 + i, 63 + i};
    return prompt;
  });
  return set;
}

constexpr std::string_view kText =
    "The harbour wakes before the town. At four the first boats come in, low in the water, and the gulls know it "
    "before anybody else does. Crates are set on the wet stones, ice is shovelled over silver, and the auctioneer, who "
    "has not slept, reads out numbers in a voice without commas. By six it is over. The vans have left for the inland "
    "markets, the stones are hosed down, and the fishermen sit in the only café that is open and speak about the wind. "
    "A visitor who comes at nine sees a quiet place with pretty boats and wonders how anyone can make a living here. "
    "The old pilot, who has watched visitors for fifty years, tells them the same thing each time: the harbour does "
    "its work while you dream, and it dreams while you look at it.";

PromptSet large_prompts() {
  static constexpr std::array<std::string_view, kOfEach> kTopics = {"a lighthouse keeper who finds a letter",
                                                                    "the history of the bicycle",
                                                                    "a storm that never ends",
                                                                    "why cities grow along rivers",
                                                                    "a clockmaker's last apprentice",
                                                                    "how bread changed the world",
                                                                    "two rivals who must share a boat",
                                                                    "the first winter in a new country",
                                                                    "what makes a good teacher",
                                                                    "a library at the bottom of the sea",
                                                                    "the invention of the printing press",
                                                                    "a train that is always late",
                                                                    "the life of a street musician",
                                                                    "how bees find their way",
                                                                    "a village that lost its name",
                                                                    "the day the mountains moved"};
  static constexpr std::array<std::string_view, kOfEach> kTasks = {"an LRU cache",
                                                                   "a thread pool",
                                                                   "a binary search tree with deletion",
                                                                   "a JSON tokenizer",
                                                                   "Dijkstra's algorithm",
                                                                   "a ring buffer for one producer and one consumer",
                                                                   "an HTTP request parser",
                                                                   "a rate limiter",
                                                                   "a trie with prefix search",
                                                                   "matrix multiplication",
                                                                   "a command line parser",
                                                                   "a priority queue",
                                                                   "an expression evaluator",
                                                                   "a Bloom filter",
                                                                   "a text diff (longest common subsequence)",
                                                                   "a scheduler for timers"};
  PromptSet set;
  set["structured"] = make([](int i) {
    DecodePrompt prompt = counting(1 + i, 200 + i);
    prompt.messages.back().text += " Write only the numbers, separated by commas.";
    return prompt;
  });
  set["prose"] = make(
      [](int i) { return user(cat("Write a text of about 400 words: ", kTopics.at(static_cast<size_t>(i)), ".")); });
  set["code"] = make([](int i) {
    return user(cat("Write ", kTasks.at(static_cast<size_t>(i)), " in C++, with comments. Only the code."));
  });
  set["edit"] = make([](int i) {
    const std::string_view name = kNames.at(static_cast<size_t>(i));
    DecodePrompt prompt = user(cat("Repeat the following text word for word, but call the old pilot ", name,
                                   ". Write nothing else.\n\n", kText));
    prompt.like = kText;
    prompt.contains = name;
    return prompt;
  });
  return set;
}

[[noreturn]] void refuse(const std::string& where, std::string_view what) {
  throw Error(Code::usage, cat("the file of prompts: ", where, " ", what), "docs/performance.md shows the form");
}

std::string text_at(const Json& object, const char* member, const std::string& where) {
  const auto at = object.find(member);
  if (at == object.end()) return "";
  if (!at->is_string() || at->get_ref<const std::string&>().empty()) refuse(cat(where, ".", member), "is no text");
  return at->get<std::string>();
}

std::vector<DecodePrompt::Message> messages_at(const Json& object, const std::string& where) {
  std::vector<DecodePrompt::Message> messages;
  if (const std::string text = text_at(object, "prompt", where); !text.empty()) messages.push_back({"user", text});
  if (const auto list = object.find("messages"); list != object.end()) {
    if (!list->is_array()) refuse(where + ".messages", "is no array");
    for (const Json& one : *list) {
      if (!one.is_object()) refuse(where + ".messages", "has something that is no object");
      messages.push_back({text_at(one, "role", where), text_at(one, "content", where)});
      if (messages.back().role.empty() || messages.back().text.empty())
        refuse(where + ".messages", "has a message without role or content");
    }
  }
  if (messages.empty()) refuse(where, "has neither prompt nor messages");
  return messages;
}

DecodePrompt prompt_of(const Json& json, const std::string& where) {
  if (json.is_string() && !json.get_ref<const std::string&>().empty()) return user(json.get<std::string>());
  if (!json.is_object()) refuse(where, "is neither text nor object");
  for (const auto& [name, value] : json.items()) {
    if (name != "prompt" && name != "messages" && name != "count" && name != "json" && name != "contains" &&
        name != "like")
      refuse(cat(where, ".", name), "is none of prompt, messages, count, json, contains, like");
  }
  DecodePrompt prompt;
  prompt.messages = messages_at(json, where);
  if (const auto count = json.find("count"); count != json.end()) {
    if (!count->is_array() || count->size() != 2 || !count->at(0).is_number_integer() ||
        !count->at(1).is_number_integer() || count->at(0) > count->at(1))
      refuse(where + ".count", "is no [FROM, TO]");
    prompt.count = DecodePrompt::Range{count->at(0).get<int64_t>(), count->at(1).get<int64_t>()};
  }
  if (const auto flag = json.find("json"); flag != json.end()) {
    if (!flag->is_boolean()) refuse(where + ".json", "is neither true nor false");
    prompt.json = flag->get<bool>();
  }
  prompt.contains = text_at(json, "contains", where);
  prompt.like = text_at(json, "like", where);
  return prompt;
}

}  // namespace

PromptSet builtin_prompts(std::string_view model) {
  return model.find("tiny") != std::string_view::npos ? tiny_prompts() : large_prompts();
}

PromptSet prompts_of(const Json& file) {
  if (!file.is_object() || file.empty()) refuse("it", "is no object of classes");
  PromptSet set;
  for (const auto& [phase, list] : file.items()) {
    if (!list.is_array() || list.empty()) refuse(phase, "is no array of prompts");
    std::vector<DecodePrompt>& prompts = set[phase];
    for (size_t i = 0; i < list.size(); ++i) prompts.push_back(prompt_of(list[i], cat(phase, "[", i, "]")));
  }
  return set;
}

std::vector<DecodePrompt> prompts_of_phase(const PromptSet& set, std::string_view phase) {
  if (const auto found = set.find(phase); found != set.end()) return found->second;
  std::vector<DecodePrompt> prompts;
  if (phase == kMixed) {
    size_t longest = 0;
    for (const auto& [name, list] : set) longest = std::max(longest, list.size());
    for (size_t i = 0; i < longest; ++i) {
      for (const auto& [name, list] : set) prompts.push_back(list[i % list.size()]);
    }
    return prompts;
  }
  std::string names;
  for (const auto& [name, list] : set) names += name + ", ";
  throw Error(Code::usage, cat("there are no prompts of class '", phase, "'"), cat("--phase ", names, kMixed));
}

}  // namespace glm53::cli
