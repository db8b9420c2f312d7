// A local Hub for bench/orchestration.sh: the server of the tests, with repositories of random bytes. Prints
// "ENDPOINT COMMIT SHA256" (of the first file of bench/big) and serves until its standard input ends.
//   bench_hub MODEL_FOLDER [MIB_OF_BIG_FILES] [NUMBER_OF_BIG_FILES]
#include <filesystem>
#include <iostream>
#include <random>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/unit/hub/fake_hub.h"

namespace {

using namespace glm53;

/// A safetensors file of one tensor, `bytes` of it.
std::string safetensors(size_t bytes, unsigned seed) {
  const std::string header = cat(R"({"t":{"dtype":"U8","shape":[)", bytes, R"(],"data_offsets":[0,)", bytes, "]}}");
  std::string out;
  out.reserve(header.size() + bytes + 16);
  for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(header.size() >> shift & 0xff);
  out += header;
  const size_t begin = out.size();
  out.resize(begin + bytes);
  std::mt19937_64 random(seed);
  for (size_t i = begin; i + 8 <= out.size(); i += 8) {
    const uint64_t word = random();
    for (size_t b = 0; b < 8; ++b) out[i + b] = static_cast<char>(word >> (8 * b) & 0xff);
  }
  return out;
}

/// `count` shards with their index.
void add_shards(test::FakeHub& hub, const std::string& repo, int count, size_t bytes) {
  std::string map;
  for (int i = 0; i < count; ++i) {
    const std::string name = cat("model-", 10000 + i, ".safetensors");
    hub.add(repo, name, safetensors(bytes, static_cast<unsigned>(i)), true);
    map += cat(map.empty() ? "" : ",", "\"t", i, "\":\"", name, "\"");
  }
  hub.add(repo, "model.safetensors.index.json", cat(R"({"metadata":{},"weight_map":{)", map, "}}"), false);
  hub.add(repo, "config.json", "{}", false);
  hub.add(repo, "tokenizer.json", "{}", false);
}

size_t number(const char* text) {
  const auto n = parse_int(text);
  if (!n || *n < 1) throw Error(Code::usage, cat("'", std::string_view(text), "' is no number"));
  return static_cast<size_t>(*n);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw Error(Code::usage, "name the folder of a model", "bench_hub models/glm53-tiny 64 16");
    const size_t mib = argc > 2 ? number(argv[2]) : 64, count = argc > 3 ? number(argv[3]) : 16;
    test::FakeHub hub;
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      const std::string name = entry.path().filename().string();
      hub.add("bench/tiny", name, read_file(entry.path().string(), size_t{1} << 30), name.ends_with(".safetensors"));
    }
    add_shards(hub, "bench/big", static_cast<int>(count), mib << 20);
    add_shards(hub, "bench/many", 117, size_t{1} << 16);
    const std::string& first = hub.files("bench/big").at("model-10000.safetensors").etag;
    std::cout << hub.endpoint() << " " << test::FakeHub::commit() << " " << first << std::endl;
    std::string line;
    while (std::getline(std::cin, line)) {
    }
    return 0;
  } catch (const std::exception& e) {
    std::cerr << e.what() << "\n";
    return 1;
  }
}
