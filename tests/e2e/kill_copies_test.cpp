// kill -9 of the agents while a start downloads and copies its model: the bytes are right in both caches, and few come
// twice.
#include <algorithm>
#include <filesystem>
#include <random>
#include <thread>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/strings.h"
#include "tests/e2e/cluster.h"
#include "tests/unit/hub/fake_hub.h"

using namespace glm53;
using namespace glm53::e2e;
using namespace std::chrono_literals;

namespace {

constexpr const char* kRepo = "org/model";
constexpr int64_t kBytes = 6 << 20, kRate = 3 << 19;

/// How often in all, of each node: five times, or what GLM53_KILLS says.
int kills_wanted() {
  const auto given = environment("GLM53_KILLS");
  const auto number = given ? parse_int(*given) : std::nullopt;
  return number && *number > 0 ? static_cast<int>(*number) : 5;
}

std::string safetensors() {
  const std::string header = cat(R"({"t":{"dtype":"U8","shape":[)", kBytes, R"(],"data_offsets":[0,)", kBytes, "]}}");
  std::string out;
  for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(header.size() >> shift & 0xff);
  std::minstd_rand random(1);
  out += header;
  for (int64_t i = 0; i < kBytes; ++i) out += static_cast<char>(random() >> 8);
  return out;
}

std::string cache_of(const LocalCluster& cluster, const std::string& node) {
  return cat(cluster.dir(), "/", node, "/state/huggingface/hub/models--org--model");
}

bool whole(const LocalCluster& cluster, const std::string& node, test::FakeHub& hub) {
  for (const auto& [name, file] : hub.files(kRepo)) {
    try {
      const std::string path = cat(cache_of(cluster, node), "/snapshots/", test::FakeHub::commit(), "/", name);
      if (read_file(path, size_t{64} << 20) != file.content) return false;
    } catch (const Error&) {
      return false;
    }
  }
  for (const auto& entry : std::filesystem::directory_iterator(cache_of(cluster, node) + "/blobs")) {
    if (entry.path().filename().string().find("incomplete") != std::string::npos) return false;
  }
  return true;
}

/// A blob is on its way.
bool begun(const LocalCluster& cluster, const std::string& node) {
  std::error_code none_yet;
  for (const auto& entry : std::filesystem::directory_iterator(cache_of(cluster, node) + "/blobs", none_yet)) {
    if (entry.path().filename().string().find("incomplete") != std::string::npos) return true;
  }
  return false;
}

void start_with_kills(std::minstd_rand& random) {
  test::FakeHub hub;
  hub.add(kRepo, "config.json", "{}", false);
  hub.add(kRepo, "tokenizer.json", "{}", false);
  hub.add(kRepo, "model.safetensors", safetensors(), true);
  hub.faults.bytes_per_s = kRate;
  const std::string endpoint = "\"" + hub.endpoint() + "\"";
  ClusterOptions options;
  options.head = {{"model.path", "\"\""},
                  {"model.repo", "\"org/model\""},
                  {"model.revision", "\"" + test::FakeHub::commit() + "\""},
                  {"sync.limit_rate", "\"1MiB\""}};
  for (auto* lines : {&options.head, &options.worker}) {
    lines->insert({{"hub.endpoint", endpoint}, {"hub.disk_reserve", "0"}, {"hub.segment_bytes", "\"1MiB\""}});
  }
  LocalCluster cluster(options);
  REQUIRE(cluster.ctl({"start", "--detach"}).code == 0);
  for (int i = 0; i < 5; ++i) {
    const int64_t enough = hub.body_bytes + (100 << 10) + static_cast<int64_t>(random() % (1u << 20));
    REQUIRE(wait_for([&] { return hub.body_bytes >= enough || whole(cluster, "head", hub); }));
    cluster.kill_agent("head");
    cluster.start_agent("head");
  }
  hub.faults.bytes_per_s = 0;
  REQUIRE(wait_for([&] { return whole(cluster, "head", hub); }));
  int64_t payload = 0;
  for (const auto& [name, file] : hub.files(kRepo)) payload += static_cast<int64_t>(file.content.size());
  const int64_t again = hub.body_bytes - payload;
  MESSAGE("fetched again: ", again, " of ", payload, " bytes in 5 kills");
  // A life loses at most what came in the journal's last two seconds, and what was on its way.
  CHECK(again <= 5 * (2 * kRate + (int64_t{1} << 20)));

  // The copy: either side, while a blob has begun there.
  for (int i = 0; i < 5 && !whole(cluster, "worker", hub); ++i) {
    if (!wait_for([&] { return begun(cluster, "worker") || whole(cluster, "worker", hub); })) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 700));
    const std::string node = i % 2 == 0 ? "worker" : "head";
    cluster.kill_agent(node);
    cluster.start_agent(node);
  }
  CHECK(wait_for([&] { return whole(cluster, "worker", hub); }, 120s));
  CHECK(hub.body_bytes == payload + again);  // the worker has its bytes from the head
  CHECK(cluster.ctl({"stop", "--now", "--preempt"}).code == 0);
}

}  // namespace

TEST_CASE("kill -9 of the agents during the download and the copy of a start: final bytes equal, few of them twice") {
  std::minstd_rand random(std::random_device{}());
  for (int done = 0; done < kills_wanted(); done += 5) start_with_kills(random);
}
