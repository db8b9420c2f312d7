// Checks of program, weights and memory.
#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "agent/preflight/checks.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kIndex = "/model.safetensors.index.json";
constexpr const char* kSingle = "model.safetensors";
constexpr size_t kNamed = 3;
constexpr uint64_t kMostHeader = 100u << 20;

/// The weight files of a checkpoint by its index; the one file of a small one without an index.
std::set<std::string> shards_of(const FileRoot& root, const std::string& folder) {
  if (!root.exists(folder + kIndex)) return {kSingle};
  const Json index = parse_json(read_file(root.at(folder + kIndex), 64u << 20));
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty()) {
    throw Error(Code::weights, cat(folder, std::string_view(kIndex), " has no weight_map"));
  }
  std::set<std::string> shards;
  for (const auto& [tensor, file] : map->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    const bool plain = !name.empty() && name.find('/') == std::string::npos && name != "." && name != "..";
    if (!plain) throw Error(Code::weights, cat("weight_map names no file for ", tensor));
    shards.insert(name);
  }
  return shards;
}

int64_t size_of(const FileRoot& root, const std::string& path) {
  std::error_code ec;
  const auto size = fs::file_size(root.at(path), ec);
  return ec ? -1 : static_cast<int64_t>(size);
}

/// Length a safetensors file must have by its own header; -1 when it has none that can be read.
int64_t length_by_header(const FileRoot& root, const std::string& path) {
  const MappedFile file(root.at(path));
  const auto bytes = file.bytes();
  if (bytes.size() < 8) return -1;
  uint64_t header = 0;
  for (size_t i = 0; i < 8; ++i) header |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  if (header > kMostHeader || header > bytes.size() - 8) return -1;
  const Json table =
      parse_json(std::string_view(reinterpret_cast<const char*>(bytes.data()) + 8, static_cast<size_t>(header)));
  int64_t end = 0;
  for (const auto& [name, entry] : table.items()) {
    const auto offsets = entry.is_object() ? entry.find("data_offsets") : entry.end();
    const bool good = entry.is_object() && offsets != entry.end() && offsets->is_array() && offsets->size() == 2 &&
                      (*offsets)[1].is_number_integer();
    if (good) end = std::max(end, (*offsets)[1].get<int64_t>());
  }
  return 8 + static_cast<int64_t>(header) + end;
}

struct Checkpoint {
  size_t shards = 0;
  int64_t bytes = 0;
  std::vector<std::string> missing, damaged;
};

Checkpoint examine(const FileRoot& root, const std::string& folder, std::initializer_list<const char*> others) {
  Checkpoint c;
  for (const char* name : others) {
    if (size_of(root, cat(folder, "/", name)) <= 0) c.missing.emplace_back(name);
  }
  const auto shards = shards_of(root, folder);
  c.shards = shards.size();
  for (const std::string& shard : shards) {
    const std::string path = cat(folder, "/", shard);
    const int64_t size = size_of(root, path);
    if (size < 0) {
      c.missing.push_back(shard);
      continue;
    }
    c.bytes += size;
    const int64_t wanted = length_by_header(root, path);
    if (wanted < 0) {
      c.damaged.push_back(shard + " is no safetensors file");
    } else if (wanted != size) {
      c.damaged.push_back(cat(shard, " has ", size, " of ", wanted, " bytes"));
    }
  }
  return c;
}

std::string some(const std::vector<std::string>& names) {
  const std::vector<std::string> first(names.begin(), names.begin() + std::min(names.size(), kNamed));
  return join(first, ", ") + (names.size() > kNamed ? cat(" and ", names.size() - kNamed, " more") : std::string());
}

void judge(const FileRoot& root, const std::string& folder, const std::string& source, const char* key,
           std::initializer_list<const char*> others, Result& r) {
  std::error_code ec;
  if (!source.empty() && !fs::is_directory(root.at(folder), ec)) {
    r.measured = cat(source, " is not in the cache (", folder, "): a start downloads it");
    return;
  }
  if (!fs::is_directory(root.at(folder), ec)) {
    fail(r, cat(key, " ", folder, " is no folder"), cat("set ", key, ", or copy the checkpoint there"));
    return;
  }
  const Checkpoint c = examine(root, folder, others);
  r.measured =
      cat(c.shards, c.shards == 1 ? " weight file, " : " weight files, ", human_bytes(c.bytes), " in ", folder);
  std::string trouble;
  if (!c.missing.empty()) trouble = cat(c.missing.size(), " files are missing in ", folder, ": ", some(c.missing));
  if (!c.damaged.empty()) trouble += (trouble.empty() ? "" : "; ") + some(c.damaged);
  if (!trouble.empty() && !source.empty()) {
    r.measured = trouble + ": a start downloads them";
    return;
  }
  if (!trouble.empty()) fail(r, trouble, "download or copy the checkpoint again; files that are complete are kept");
}

}  // namespace

void check_engine(const Context& c, Result& r) {
  r.measured = c.subject.engine;
  std::string bad;
  for (const std::string& program : {c.subject.engine, c.subject.stand_in}) {
    if (program.empty() || ::access(c.files.at(program).c_str(), X_OK) == 0) continue;
    bad += cat(bad.empty() ? "" : "; ", program, " is no program that this user may run");
  }
  if (!bad.empty()) fail(r, bad, "install the engine, or set engine.path (or engine.rank_path)");
}

void check_weights(const Context& c, Result& r) {
  if (!c.subject.stand_in.empty()) {
    skip(r, "engine.rank_path stands in for the engine");
  } else if (c.subject.devices.empty()) {
    skip(r, "no rank on this node");
  } else if (c.subject.model.empty()) {
    fail(r, "neither model.path nor model.repo with a commit is set",
         "name the folder of the checkpoint in model.path, or model.repo and model.revision (40 hex digits)");
  } else {
    judge(c.files, c.subject.model, c.subject.model_source, "model.path", {"config.json", "tokenizer.json"}, r);
  }
}

void check_draft(const Context& c, Result& r) {
  if (c.subject.draft.empty()) {
    skip(r, "draft.path is not set: no drafter");
  } else if (!c.subject.stand_in.empty() || c.subject.devices.empty()) {
    skip(r, "no rank of the engine on this node");
  } else {
    judge(c.files, c.subject.draft, c.subject.draft_source, "draft.path", {"config.json"}, r);
  }
}

void check_memory(const Context& c, Result& r) {
  const Subject& s = c.subject;
  if (!s.stand_in.empty() || s.devices.empty()) {
    skip(r, "no rank of the engine on this node");
    return;
  }
  if (!c.own_pids.empty()) {
    skip(r, "processes of the cluster run and hold their memory");
    return;
  }
  const auto have = memory(c.files);
  if (!have) {
    fail(r, "/proc/meminfo cannot be read", "mount /proc");
    return;
  }
  int64_t weights = 0;
  try {
    for (const std::string& shard : shards_of(c.files, s.model)) {
      weights += std::max<int64_t>(0, size_of(c.files, cat(s.model, "/", shard)));
    }
  } catch (const Error&) {
    // What is wrong with the checkpoint is the other check's answer; without it the need is a lower bound.
    weights = 0;
  }
  const auto here = static_cast<int64_t>(s.devices.size());
  const int64_t need = s.reserve + here * (weights / s.ranks + s.kv_bytes);
  r.measured = cat(human_bytes(have->available), " available", have->limited ? " (limited by a cgroup)" : "", ", need ",
                   human_bytes(need));
  if (have->available >= need) return;
  std::string top;
  for (const Consumer& p : biggest_consumers(c.files, kNamed)) {
    top += cat(top.empty() ? "" : ", ", p.name, " ", human_bytes(p.resident));
  }
  fail(r,
       cat(r.measured, " (memory.reserve ", human_bytes(s.reserve), ", weights ", human_bytes(here * weights / s.ranks),
           ", KV cache ", human_bytes(here * s.kv_bytes), "); top: ", top),
       "stop what is not needed, or lower memory.kv_bytes");
}

}  // namespace glm53::preflight
