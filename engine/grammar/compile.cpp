#include "engine/grammar/compile.h"

#include <array>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/grammar/ebnf.h"
#include "engine/grammar/json_schema.h"
#include "engine/grammar/regex.h"

namespace glm53::grammar {
namespace {

using Json = nlohmann::ordered_json;
using Id = Builder::Id;

enum Markup : size_t { kCall, kCallEnd, kKey, kKeyEnd, kValue, kValueEnd, kMarkup };

class Demand {
 public:
  Demand(Builder& builder, const Json& demand) : b_(builder), json_(b_), demand_(demand) {}

  uint32_t start() {
    std::vector<Id> parts;
    if (demand_.contains("content")) parts.push_back(content(demand_["content"]));
    if (demand_.contains("calls")) {
      const Id call = calls();
      parts.push_back(demand_["calls"] == "one" ? call : b_.repeat(call, 1, Builder::kUnbounded));
    }
    if (parts.empty()) throw Error(Code::usage, "neither content nor calls are asked for");
    return b_.add_rule("output", b_.alt(std::move(parts)));
  }

 private:
  static const std::string& text(const Json& value, const std::string& path) {
    if (!value.is_string()) JsonSchema::refuse(path, "must be a string");
    return value.get_ref<const std::string&>();
  }

  Id content(const Json& content) {
    const std::string path = demand_.value("path", std::string("content"));
    const auto within = [&](const auto& make) {
      try {
        return make();
      } catch (const Error& e) {
        if (std::string_view(e.what()).starts_with(path)) throw;
        throw Error(e.code(), cat(path, ": ", e.what()), e.remedy());
      }
    };
    return within([&]() -> Id {
      if (content.contains("json")) return JsonSchema(json_, content["json"], path).root_value(false);
      if (content.contains("json_object")) return json_.object();
      if (content.contains("regex")) return regex(b_, text(content["regex"], path), Writing::plain, Anchoring::whole);
      if (content.contains("ebnf")) return b_.call(ebnf(b_, text(content["ebnf"], path)));
      if (!content.contains("choice") || !content["choice"].is_array())
        JsonSchema::refuse(path, "nothing known is asked for");
      std::vector<std::string> texts;
      for (const Json& one : content["choice"]) texts.push_back(text(one, path));
      return b_.literals(std::move(texts));
    });
  }

  Id tag(Markup markup) { return b_.symbol(demand_["markup"].at(markup).get<int32_t>()); }
  Id free_text() { return b_.repeat(characters(b_, CodeSet::all(), Writing::plain), 0, Builder::kUnbounded); }

  Id calls() {
    if (!demand_.contains("markup") || demand_["markup"].size() != kMarkup)
      throw Error(Code::usage, "calls without their markup");
    std::vector<Id> parts;
    const Json tools = demand_.value("tools", Json::array());
    for (size_t i = 0; i < tools.size(); ++i) {
      const std::string name = tools[i].at("name").get<std::string>();
      parts.push_back(b_.seq({b_.text(name), arguments(tools_.emplace_back(tools[i]), name)}));
    }
    const uint32_t call = b_.add_rule("call", b_.seq({tag(kCall), b_.alt(std::move(parts)), tag(kCallEnd)}));
    return b_.call(call);
  }

  Id arguments(const Json& tool, const std::string& name) {
    if (!tool.contains("parameters") || tool["parameters"].is_null()) return any_arguments();
    try {
      return typed_arguments(tool["parameters"], cat("tools: parameters of \"", name, "\""));
    } catch (const Error&) {
      if (tool.value("strict", false)) throw;
      return any_arguments();
    }
  }

  Id any_arguments() {
    return b_.repeat(b_.seq({tag(kKey), free_text(), tag(kKeyEnd), tag(kValue), free_text(), tag(kValueEnd)}), 0,
                     Builder::kUnbounded);
  }

  Id typed_arguments(const Json& parameters, const std::string& path) {
    JsonSchema compiler(json_, parameters, path);
    const Json& schema = flat_.emplace_back(compiler.flat(parameters, path));
    if (!schema.is_object()) JsonSchema::refuse(path, "must be a schema of an object");
    for (const auto& [key, value] : schema.items()) {
      static constexpr std::array<std::string_view, 9> known = {
          "type",        "properties", "required", "additionalProperties", "title",
          "description", "$schema",    "$defs",    "definitions"};
      if (std::find(known.begin(), known.end(), key) == known.end())
        JsonSchema::refuse(path, cat("\"", key, "\" of the arguments as a whole cannot be enforced"));
    }
    if (schema.value("type", Json("object")) != "object") JsonSchema::refuse(path, "must be a schema of an object");
    std::vector<Id> parts;
    for (const JsonSchema::Property& p : compiler.properties(schema, path)) {
      const Id value = b_.call(b_.add_rule(p.name, compiler.value(*p.schema, path + "/properties/" + p.name, true)));
      const Id argument = b_.seq({tag(kKey), b_.text(p.name), tag(kKeyEnd), tag(kValue), value, tag(kValueEnd)});
      parts.push_back(p.required ? argument : b_.optional(argument));
    }
    return b_.seq(std::move(parts));
  }

  Builder& b_;
  JsonText json_;
  const Json& demand_;
  std::list<Json> tools_, flat_;
};

}  // namespace

Grammar compile(std::string_view demand, Budget& budget) {
  if (demand.size() > budget.limits().text)
    throw Error(Code::usage, cat("a schema or grammar of ", demand.size(), " bytes, at most ", budget.limits().text,
                                 " can be enforced"));
  const Json json = parse_json(demand);
  if (!json.is_object()) throw Error(Code::usage, "a demand must be an object");
  Builder builder(budget);
  try {
    const uint32_t start = Demand(builder, json).start();
    try {
      return builder.finish(start);
    } catch (const Error& e) {
      throw Error(e.code(), cat(json.value("path", std::string("tools")), ": ", e.what()), e.remedy());
    }
  } catch (const Json::exception& e) {
    throw Error(Code::usage, cat("a demand that is none: ", e.what()));
  }
}

Grammar compile(std::string_view demand) {
  Budget budget;
  return compile(demand, budget);
}

std::shared_ptr<const Vocabulary> vocabulary_of(const text::Tokenizer& tokenizer) {
  std::vector<std::string_view> texts(static_cast<size_t>(tokenizer.size()));
  for (int32_t id = 0; id < tokenizer.size(); ++id)
    if (!tokenizer.is_added(id)) texts[static_cast<size_t>(id)] = tokenizer.bytes(id);
  return std::make_shared<const Vocabulary>(texts);
}

Cache::Cache(std::shared_ptr<const Vocabulary> vocabulary, size_t most)
    : vocabulary_(std::move(vocabulary)), most_(most) {}

std::shared_ptr<Engine> Cache::get(const std::string& demand) {
  const std::scoped_lock lock(mutex_);
  const auto found = entries_.find(demand);
  if (found != entries_.end()) {
    uses_.splice(uses_.begin(), uses_, found->second.use);
    if (found->second.engine->full()) found->second.engine = found->second.engine->fresh();
    return found->second.engine;
  }
  auto engine = std::make_shared<Engine>(std::make_shared<const Grammar>(compile(demand)), vocabulary_);
  if (entries_.size() >= most_) {
    entries_.erase(uses_.back());
    uses_.pop_back();
  }
  uses_.push_front(demand);
  entries_[demand] = {engine, uses_.begin()};
  return engine;
}

}  // namespace glm53::grammar
