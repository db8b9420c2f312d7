// Members that both kinds of generation requests share.
#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/members.h"
#include "engine/api/request.h"
#include "engine/grammar/compile.h"
#include "engine/text/json_text.h"
#include "engine/text/stop_matcher.h"

namespace glm53::api {

using Json = nlohmann::ordered_json;

namespace {

void parse_stop(const Members& members, GenerationRequest& out) {
  const Json& stop = members.get("stop");
  if (stop.is_null()) return;
  if (stop.is_string()) {
    out.stop.push_back(stop.get<std::string>());
  } else if (stop.is_array()) {
    for (const Json& s : stop) {
      if (!s.is_string()) Members::refuse("stop", "must be a string or an array of strings");
      out.stop.push_back(s.get<std::string>());
      if (out.stop.size() > text::kMaxStopStrings) break;
    }
  } else {
    Members::refuse("stop", "must be a string or an array of strings");
  }
  if (stop.is_array() && stop.size() > text::kMaxStopStrings) {
    Members::refuse("stop", cat(stop.size(), " strings, at most ", text::kMaxStopStrings, " are allowed"));
  }
  for (const std::string& s : out.stop) {
    if (s.empty()) Members::refuse("stop", "a stop string must not be empty");
    if (s.size() > text::kMaxStopBytes) {
      Members::refuse("stop",
                      cat("a stop string of ", s.size(), " bytes, at most ", text::kMaxStopBytes, " are allowed"));
    }
  }
}

void parse_bias(const Members& members, const text::Tokenizer& tokenizer, wire::SamplingParams& sampling) {
  const Json& bias = members.get("logit_bias");
  if (bias.is_null()) return;
  if (!bias.is_object()) Members::refuse("logit_bias", "must be an object of token ids and numbers");
  for (const auto& [key, value] : bias.items()) {
    const auto id = parse_int(key);
    if (!id || *id < 0 || *id > INT32_MAX || !tokenizer.has_text(static_cast<int32_t>(*id))) {
      Members::refuse("logit_bias", cat("\"", key, "\" is no token id of the vocabulary"));
    }
    if (!value.is_number()) Members::refuse("logit_bias", cat("the bias of ", key, " must be a number"));
    sampling.bias.emplace_back(static_cast<int32_t>(*id), std::clamp(value.get<float>(), -100.0f, 100.0f));
  }
}

void parse_sampling(const Members& members, const RequestContext& context, GenerationRequest& out) {
  const SamplingDefaults& defaults = context.settings.sampling;
  const auto as_float = [&](const char* name, double min, double max, float fallback) {
    const auto given = members.number(name, min, max);
    return given ? static_cast<float>(*given) : fallback;
  };
  wire::SamplingParams& s = out.sampling;
  s.temperature = as_float("temperature", 0, 2, defaults.temperature);
  if (s.temperature > 0 && s.temperature < 0.01f) s.temperature = 0.01f;
  s.top_p = as_float("top_p", 0, 1, defaults.top_p);
  if (s.top_p <= 0) Members::refuse("top_p", "must be greater than 0 and at most 1");
  s.top_k = static_cast<int32_t>(members.integer("top_k", -1, INT32_MAX).value_or(defaults.top_k));
  if (s.top_k == -1) s.top_k = 0;
  s.min_p = as_float("min_p", 0, 1, defaults.min_p);
  s.presence = as_float("presence_penalty", -2, 2, 0);
  s.frequency = as_float("frequency_penalty", -2, 2, 0);
  s.repetition = as_float("repetition_penalty", 1e-5, 1e6, defaults.repetition);
  s.ignore_eos = members.boolean("ignore_eos", false);
  s.min_tokens = static_cast<int32_t>(members.integer("min_tokens", 0, INT32_MAX).value_or(0));
  const auto has_text = [&](int32_t id) { return context.tokenizer.has_text(id); };
  s.stop_ids = members.ids("stop_token_ids", has_text);
  s.allowed = members.ids("allowed_token_ids", has_text);
  if (members.given("allowed_token_ids") && s.allowed.empty()) {
    Members::refuse("allowed_token_ids", "must not be empty");
  }
  parse_bias(members, context.tokenizer, s);
  out.seed = members.integer("seed", INT64_MIN, INT64_MAX);
  if (out.seed == -1) out.seed.reset();
}

void parse_stream(const Members& members, GenerationRequest& out) {
  out.stream = members.boolean("stream", false);
  const Json& options = members.get("stream_options");
  if (options.is_null()) return;
  if (!out.stream) Members::refuse("stream_options", "Stream options can only be defined when `stream=True`.");
  if (!options.is_object()) Members::refuse("stream_options", "must be an object");
  const Members inner(options);
  out.include_usage = inner.boolean("include_usage", false);
  out.continuous_usage = inner.boolean("continuous_usage_stats", false);
}

void parse_salt(const Members& members, GenerationRequest& out) {
  const auto salt = members.text("cache_salt");
  if (!salt) return;
  const bool bad =
      salt->empty() || salt->size() > 128 || salt->find_first_of(std::string_view("@/\\\0", 4)) != std::string::npos;
  if (bad) Members::refuse("cache_salt", "must have 1 to 128 characters, none of them @ / \\ or NUL");
  out.salt = *salt;
}

constexpr size_t kMaxChoiceTexts = 4096, kMaxBadWords = 1024;

std::vector<std::string> strings(std::string_view name, const Json& value, size_t most) {
  std::vector<std::string> out;
  if (value.is_null()) return out;
  if (!value.is_array()) Members::refuse(name, "must be an array of strings");
  if (value.size() > most) Members::refuse(name, cat(value.size(), " strings, at most ", most, " are allowed"));
  for (const Json& one : value) {
    if (!one.is_string()) Members::refuse(name, "must be an array of strings");
    out.push_back(one.get<std::string>());
    if (out.back().empty()) Members::refuse(name, "a string must not be empty");
  }
  return out;
}

/// A member that says what the output must be, and that in the words of engine/grammar/compile.h.
struct Form {
  std::string member, path;
  Json content;
};

Json schema_of(std::string_view name, const Json& value) {
  if (!value.is_string()) return value;
  try {
    return parse_json(value.get_ref<const std::string&>());
  } catch (const Error& e) {
    Members::refuse(name, e.what());
  }
}

void add_form(std::vector<Form>& forms, const std::string& member, const std::string& path, const std::string& kind,
              const Json& value) {
  if (value.is_null()) return;
  if (kind == "json") {
    forms.push_back({member, path, {{"json", schema_of(member, value)}}});
  } else if (kind == "json_object") {
    if (!value.is_boolean()) Members::refuse(member, "json_object must be true or false");
    if (value == true) forms.push_back({member, path, {{"json_object", true}}});
  } else if (kind == "regex" || kind == "grammar") {
    if (!value.is_string()) Members::refuse(member, cat(kind, " must be a string"));
    forms.push_back({member, path, {{kind == "regex" ? "regex" : "ebnf", value}}});
  } else if (kind == "choice") {
    forms.push_back({member, path, {{"choice", value}}});
  } else {
    Members::refuse(member, cat(kind, " is not supported; json, json_object, regex, choice and grammar are"));
  }
}

void add_response_format(std::vector<Form>& forms, const Json& format) {
  const char* name = "response_format";
  if (format.is_null()) return;
  if (!format.is_object() || !format.contains("type")) Members::refuse(name, "must be an object with a type");
  const Json& type = format["type"];
  if (type == "text") return;
  if (type == "json_object") {
    forms.push_back({name, name, {{"json_object", true}}});
  } else if (type == "json_schema") {
    const Json inner = format.value("json_schema", Json());
    if (!inner.is_object() || !inner.contains("schema")) Members::refuse(name, "json_schema.schema is missing");
    forms.push_back({name, "response_format.json_schema.schema", {{"json", inner["schema"]}}});
  } else {
    Members::refuse(name, "type must be text, json_object or json_schema");
  }
}

/// At most one member may say what the output is.
void parse_structure(const Members& members, GenerationRequest& out) {
  out.bad_words = strings("bad_words", members.get("bad_words"), kMaxBadWords);
  std::vector<Form> forms;
  const Json& structured = members.get("structured_outputs");
  if (!structured.is_null() && !structured.is_object()) Members::refuse("structured_outputs", "must be an object");
  if (structured.is_object()) {
    for (const auto& [key, value] : structured.items()) {
      const bool layout = key == "whitespace_pattern" || key.starts_with("disable_");
      if (layout && (value.is_null() || value == false)) continue;
      add_form(forms, "structured_outputs", cat("structured_outputs.", key), key, value);
    }
    if (forms.empty()) Members::refuse("structured_outputs", "json, json_object, regex, choice or grammar is missing");
  }
  for (const char* kind : {"json", "regex", "choice", "grammar"}) {
    const std::string name = cat("guided_", kind);
    add_form(forms, name, name, kind, members.get(name));
  }
  add_response_format(forms, members.get("response_format"));
  if (forms.empty()) return;
  const Form& form = forms[0];
  if (forms.size() > 1) Members::refuse(forms[1].member, cat("does not go with ", form.path));
  if (out.sampling.ignore_eos) Members::refuse("ignore_eos", cat("does not go with ", form.member));
  if (form.content.contains("choice")) {
    out.choices = strings(form.member, form.content["choice"], kMaxChoiceTexts);
    if (out.choices.empty()) Members::refuse(form.member, "the choice must not be empty");
    return;
  }
  out.structure = text::python_json({{"content", form.content}, {"path", form.path}});
  try {
    grammar::compile(out.structure);
  } catch (const Error& e) {
    throw ApiError(400, e.line(), form.member);
  }
}

}  // namespace

std::string check_model(const Json& member, const Settings& settings) {
  if (member.is_null()) return settings.model_names.front();
  if (!member.is_string()) Members::refuse("model", "must be a string");
  const auto name = member.get<std::string>();
  if (std::find(settings.model_names.begin(), settings.model_names.end(), name) == settings.model_names.end()) {
    throw ApiError(404, cat("The model `", name, "` does not exist."), "model");
  }
  return name;
}

void parse_common(const Members& members, const RequestContext& context, GenerationRequest& out) {
  out.model = check_model(members.get("model"), context.settings);
  out.request_id = members.text("request_id");
  parse_sampling(members, context, out);
  parse_stop(members, out);
  parse_stream(members, out);
  parse_salt(members, out);
  parse_structure(members, out);
  out.n = static_cast<int>(members.integer("n", 1, kMaxChoices).value_or(1));
  if (out.n > 1 && out.sampling.temperature == 0) Members::refuse("n", "n must be 1 when using greedy sampling");
  out.include_stop = members.boolean("include_stop_str_in_output", false);
  out.skip_special = members.boolean("skip_special_tokens", true);
  members.boolean("spaces_between_special_tokens", true);
  out.echo = members.boolean("echo", false);
  out.return_token_ids = members.boolean("return_token_ids", false);
  out.tokens_as_ids = members.boolean("return_tokens_as_token_ids", false);
  out.truncate = members.integer("truncate_prompt_tokens", -1, INT32_MAX);
  if (out.truncate == 0) Members::refuse("truncate_prompt_tokens", "must be -1 or at least 1");
  if (const auto side = members.text("truncation_side")) {
    if (*side != "left" && *side != "right") Members::refuse("truncation_side", "must be left or right");
    out.truncate_right = *side == "right";
  }
  out.priority = static_cast<int32_t>(members.integer("priority", -1000, 1000).value_or(0));
  if (const auto mode = members.text("speculation")) {
    if (*mode != "auto" && *mode != "off") Members::refuse("speculation", "must be auto or off");
    out.speculate = *mode == "auto";
  }
}

int32_t fit(std::vector<int32_t>& prompt, const GenerationRequest& request, const RequestContext& context) {
  const int32_t limit = context.max_context;
  if (request.truncate) {
    const int64_t room = std::max<int64_t>(1, limit - request.max_tokens.value_or(1));
    const auto keep = static_cast<size_t>(*request.truncate == -1 ? room : *request.truncate);
    if (prompt.size() > keep) {
      const auto cut = static_cast<std::ptrdiff_t>(prompt.size() - keep);
      if (request.truncate_right) {
        prompt.resize(keep);
      } else {
        prompt.erase(prompt.begin(), prompt.begin() + cut);
      }
    }
  }
  const auto used = static_cast<int64_t>(prompt.size());
  const int64_t room = limit - used;
  const int64_t asked = request.max_tokens ? *request.max_tokens
                        : context.settings.default_max_tokens > 0
                            ? std::min<int64_t>(context.settings.default_max_tokens, std::max<int64_t>(room, 1))
                            : std::max<int64_t>(room, 1);
  if (asked > room) {
    throw ApiError(400,
                   cat("This model's maximum context length is ", limit, " tokens. However, you requested ", asked,
                       " output tokens and your prompt contains at least ", used,
                       " input tokens, for a total of at least ", used + asked,
                       " tokens. Please reduce the length of the input prompt or the number of requested "
                       "output tokens."),
                   "input_tokens");
  }
  if (request.sampling.min_tokens > asked) {
    Members::refuse("min_tokens", cat("must be at most the output limit of ", asked, " tokens"));
  }
  return static_cast<int32_t>(asked);
}

std::vector<int32_t> branch_points(const std::vector<int32_t>& prompt, const text::Tokenizer& tokenizer) {
  const text::ChatTokens& t = tokenizer.chat();
  std::vector<int32_t> points;
  const auto first = std::find(prompt.begin(), prompt.end(), t.user);
  if (first != prompt.end() && first != prompt.begin()) points.push_back(static_cast<int32_t>(first - prompt.begin()));
  const auto last = std::find(prompt.rbegin(), prompt.rend(), t.assistant);
  if (last != prompt.rend()) {
    const auto at = static_cast<int32_t>(prompt.rend() - last) - 1;
    if (at > 0 && (points.empty() || at > points.back())) points.push_back(at);
  }
  return points;
}

}  // namespace glm53::api
