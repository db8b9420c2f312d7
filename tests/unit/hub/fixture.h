// A fake Hub with one repository, an empty cache, and settings that try again quickly.
#pragma once

#include <map>
#include <random>
#include <string>
#include <vector>

#include "agent/hub/downloader.h"
#include "common/digest.h"
#include "common/file.h"
#include "common/strings.h"
#include "fake_hub.h"
#include "tests/temp_dir.h"

namespace glm53::test {

inline std::string noise(size_t n, unsigned seed) {
  std::minstd_rand random(seed);
  std::string out(n, '\0');
  for (char& c : out) c = static_cast<char>(random() >> 8);
  return out;
}

/// A safetensors file of one tensor with that many bytes.
inline std::string safetensors(const std::string& tensor, size_t bytes, unsigned seed) {
  const std::string header =
      cat("{\"", tensor, "\":{\"dtype\":\"U8\",\"shape\":[", bytes, "],\"data_offsets\":[0,", bytes, "]}}");
  std::string out;
  for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(header.size() >> shift & 0xff);
  return out + header + noise(bytes, seed);
}

struct Fixture {
  static constexpr const char* kRepo = "org/model";
  FakeHub hub;
  TempDir dir;
  hub::Settings settings;
  hub::DownloadRequest request;
  std::vector<std::string> events;
  hub::Progress last;

  explicit Fixture(size_t shard_bytes = 300000) {
    hub.add(kRepo, "config.json", "{\"model_type\":\"x\"}", false);
    hub.add(kRepo, "model.safetensors.index.json",
            "{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\",\"b\":\"model-00002-of-00002.safetensors\"}}",
            false);
    hub.add(kRepo, "model-00001-of-00002.safetensors", safetensors("a", shard_bytes, 1), true);
    hub.add(kRepo, "model-00002-of-00002.safetensors", safetensors("b", shard_bytes / 2, 2), true);
    hub.add(kRepo, "docs/pictures/a b+c.png", noise(5000, 3), true);
    hub.add(kRepo, "README.md", "read me", false);
    hub.add(kRepo, "empty.txt", "", false);
    settings.cache = dir / "hub";
    settings.journal_dir = dir / "state";
    settings.endpoint = hub.endpoint();
    settings.segment_bytes = 64 * 1024;
    settings.ranges_above = 100000;
    settings.disk_reserve = 0;
    settings.journal_period = hub::Millis(50);
    settings.retry = {hub::Millis(1), hub::Millis(5), hub::Millis(3000), hub::Millis(5000)};
    request.repo = kRepo;
  }

  hub::DownloadResult run() {
    hub::Downloader downloader(settings);
    return downloader.run(
        request, [&](const hub::Progress& p) { last = p; }, [&](const std::string& e) { events.push_back(e); });
  }
  std::string repo_dir() const { return dir / "hub/models--org--model"; }
  std::string snapshot() const { return cat(repo_dir(), "/snapshots/", FakeHub::commit()); }
  const HubFile& file(const std::string& path) { return hub.files(kRepo).at(path); }
  /// Every file of the repository is in the snapshot, byte for byte.
  bool whole() {
    for (const auto& [path, f] : hub.files(kRepo)) {
      try {
        if (read_file(cat(snapshot(), "/", path)) != f.content) return false;
      } catch (const std::exception&) {
        return false;
      }
    }
    return true;
  }
  bool event(const std::string& part) const {
    for (const std::string& e : events) {
      if (e.find(part) != std::string::npos) return true;
    }
    return false;
  }
  int64_t payload() {
    int64_t n = 0;
    for (const auto& [path, f] : hub.files(kRepo)) n += static_cast<int64_t>(f.content.size());
    return n;
  }
};

/// The error of a call; Error(ok) when there is none.
template <class F>
Error error_of(F&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return {Code::ok, ""};
}

inline bool has(const Error& e, const std::string& part) {
  return e.line().find(part) != std::string::npos;
}

}  // namespace glm53::test
