#include "engine/loader/prepared_manifest.h"

#include <charconv>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/loader/formats.h"
#include "kernels/quantise.h"

namespace glm53 {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "glm53 prepared weights";
constexpr int kFormats = 6, kDtypes = 9;

/// Number of an enumerator, checked.
template <class Enum>
Enum enumerator(const Json& json, int count) {
  const int value = json.get<int>();
  if (value < 0 || value >= count) throw Error(Code::weights, cat("number ", value, " of ", count));
  return static_cast<Enum>(value);
}

Json to_json(const PreparedWeight& w) {
  Json parts = Json::array(), tensors = Json::array();
  for (const StackPart& part : w.take.parts) parts.push_back({part.name, static_cast<int>(part.split)});
  for (const PreparedTensor& t : w.tensors) tensors.push_back({static_cast<int>(t.dtype), t.shape, t.begin});
  return {{"parts", parts},
          {"group", static_cast<int>(w.take.group)},
          {"stacked", w.take.stacked},
          {"format", static_cast<int>(w.weight.format)},
          {"out", w.weight.out},
          {"in", w.weight.in},
          {"bits", w.weight.bits},
          {"codebook", static_cast<uint32_t>(w.weight.codebook)},
          {"tensors", tensors}};
}

PreparedWeight to_weight(const Json& json) {
  PreparedWeight w;
  for (const Json& part : json.at("parts"))
    w.take.parts.push_back(
        {part.at(0).get<std::string>(), static_cast<Split>(enumerator<int>(Json(part.at(1).get<int>() + 1), 3) - 1)});
  w.take.group = enumerator<WeightGroup>(json.at("group"), kWeightGroups);
  w.take.stacked = json.at("stacked").get<bool>();
  w.weight.format = enumerator<WeightFormat>(json.at("format"), kFormats);
  w.weight.out = json.at("out").get<int64_t>();
  w.weight.in = json.at("in").get<int64_t>();
  w.weight.bits = json.at("bits").get<int>();
  w.weight.codebook = enumerator<Codebook>(json.at("codebook"), 3);
  for (const Json& t : json.at("tensors"))
    w.tensors.push_back(
        {enumerator<Dtype>(t.at(0), kDtypes), t.at(1).get<std::vector<int64_t>>(), t.at(2).get<uint64_t>()});
  return w;
}

std::string hex(uint64_t value) {
  char text[16];
  const auto end = std::to_chars(std::begin(text), std::end(text), value, 16).ptr;
  return {text, end};
}

uint64_t from_hex(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size())
    throw Error(Code::weights, cat("'", text, "' is no sum"));
  return value;
}

std::vector<std::string> format_names(const FormatPolicy& policy) {
  std::vector<std::string> out;
  for (const WeightFormat format : policy.of_group) out.emplace_back(format_name(format));
  return out;
}

}  // namespace

PreparedManifest manifest_of(const PreparedKey& key) {
  PreparedManifest m;
  m.config = key.config;
  m.checkpoint = key.checkpoint;
  m.sample = key.sample;
  m.formats = format_names(key.formats);
  m.shard = key.shard;
  return m;
}

std::string write_manifest(const PreparedManifest& m) {
  Json formats = Json::object(), sums = Json::array(), weights = Json::array();
  for (size_t g = 0; g < m.formats.size(); ++g) formats[std::string(name(static_cast<WeightGroup>(g)))] = m.formats[g];
  for (const uint64_t sum : m.sums) sums.push_back(hex(sum));
  for (const PreparedWeight& w : m.weights) weights.push_back(to_json(w));
  Json json = {{"format", kFormat},    {"layout", kPreparedLayout},
               {"config", m.config},   {"checkpoint", m.checkpoint},
               {"sample", m.sample},   {"formats", formats},
               {"rank", m.shard.rank}, {"ranks", m.shard.size},
               {"bytes", m.bytes},     {"sums", sums},
               {"weights", weights}};
  json["digest"] = sha256_hex(dump(json));
  return dump(json) + "\n";
}

PreparedManifest read_manifest(const std::string& text, const std::string& where) {
  const auto refuse = [&](const std::string& why) { return Error(Code::weights, cat("'", where, "': ", why)); };
  try {
    Json json = parse_json(text);
    if (json.value("format", "") != kFormat) throw refuse("no manifest of prepared weights");
    if (json.value("layout", 0) != kPreparedLayout)
      throw refuse(cat("layout ", json.value("layout", 0), ", this version has layout ", kPreparedLayout));
    const std::string digest = json.value("digest", "");
    json.erase("digest");
    if (sha256_hex(dump(json)) != digest) throw refuse("not as it was written: damaged");
    PreparedManifest m;
    m.config = json.at("config").get<std::string>();
    m.checkpoint = json.at("checkpoint").get<std::string>();
    m.sample = json.at("sample").get<std::string>();
    for (const auto& [group, format] : json.at("formats").items()) m.formats.push_back(format.get<std::string>());
    m.shard = {json.at("rank").get<int>(), json.at("ranks").get<int>()};
    m.bytes = json.at("bytes").get<uint64_t>();
    for (const Json& sum : json.at("sums")) m.sums.push_back(from_hex(sum.get<std::string>()));
    for (const Json& w : json.at("weights")) m.weights.push_back(to_weight(w));
    return m;
  } catch (const nlohmann::json::exception& e) {
    throw refuse(e.what());
  } catch (const Error& e) {
    if (e.code() == Code::usage) throw refuse(e.what());
    throw;
  }
}

std::string difference(const PreparedManifest& found, const PreparedKey& wanted) {
  const PreparedManifest m = manifest_of(wanted);
  if (found.shard.rank != m.shard.rank || found.shard.size != m.shard.size)
    return cat("holds rank ", found.shard.rank, " of ", found.shard.size, ", this is rank ", m.shard.rank, " of ",
               m.shard.size);
  if (found.config != m.config || found.checkpoint != m.checkpoint) return "was made from another checkpoint";
  if (found.sample != m.sample)
    return "was made from a checkpoint with the same tensors but other values (an edited or damaged one)";
  for (size_t g = 0; g < std::min(found.formats.size(), m.formats.size()); ++g)
    if (found.formats[g] != m.formats[g])
      return cat("holds ", name(static_cast<WeightGroup>(g)), " as ", found.formats[g], ", the configuration says ",
                 m.formats[g]);
  if (found.formats.size() != m.formats.size()) return "has other groups of weights";
  return {};
}

std::vector<Tensor*> tensors_of(Weight& w) {
  if (w.format == WeightFormat::exl3) return {&w.codes, &w.suh, &w.svh};
  if (is_quantised(w.format)) return {&w.codes, &w.scales};
  return {&w.codes};
}

}  // namespace glm53
