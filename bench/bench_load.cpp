// How fast files of weights are read: the loader's reader (several threads, O_DIRECT, bounded memory) against one
// thread with pread and against a memory map, cold, in one run.
//   bench_load [--bytes N] [--dir DIR] [--reps N] [--json FILE]      writes a file of N bytes (1 GiB) to DIR, removes
//   it bench_load --model DIR [--reps N] [--json FILE]                  reads the shards of a checkpoint
// Before each run the files' pages are dropped from the page cache, which the system may refuse for pages in use.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"
#include "engine/loader/block_reader.h"
#include "engine/loader/safetensors.h"

namespace glm53 {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

struct Options {
  std::string dir = ".", model, json;
  uint64_t bytes = uint64_t{1} << 30;
  int reps = 3;
};

/// A file that goes away with the run.
class OwnFile {
 public:
  explicit OwnFile(std::string path) : path_(std::move(path)) {}
  OwnFile(const OwnFile&) = delete;
  OwnFile& operator=(const OwnFile&) = delete;
  ~OwnFile() { (void)FileOps::real().unlink(path_.c_str()); }

 private:
  std::string path_;
};

void write_noise(const std::string& path, uint64_t bytes) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> words(size_t{1} << 19);
  for (uint64_t& w : words) w = random();
  FileOps& ops = FileOps::real();
  const UniqueFd fd(ops.open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!fd) throw_errno(Code::unavailable, cat("cannot write '", path, "'"));
  for (uint64_t done = 0; done < bytes;) {
    words[0] = done;  // no two blocks are equal
    const auto n = static_cast<size_t>(std::min<uint64_t>(bytes - done, words.size() * sizeof(uint64_t)));
    const ssize_t written = ops.write(fd.get(), words.data(), n);
    if (written < 0) throw_errno(Code::unavailable, cat("cannot write '", path, "'"));
    done += static_cast<uint64_t>(written);
  }
  if (ops.fsync(fd.get()) != 0) throw_errno(Code::unavailable, cat("cannot write '", path, "'"));
}

void drop_cache(const std::vector<std::string>& files) {
  for (const std::string& file : files) {
    const UniqueFd fd(FileOps::real().open(file.c_str(), O_RDONLY | O_CLOEXEC, 0));
    if (fd) (void)posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

/// Looks at all bytes, as a load does that copies them.
uint64_t consume(std::span<const std::byte> bytes) {
  return xxh64(bytes);
}

uint64_t with_reader(const std::vector<std::string>& files, const ReadOptions& options, size_t& memory, size_t& plain) {
  std::vector<FileBlock> blocks;
  for (size_t f = 0; f < files.size(); ++f) append_blocks(blocks, f, 0, std::filesystem::file_size(files[f]), options);
  const size_t count = blocks.size();
  BlockReader reader(files, std::move(blocks), options);
  uint64_t sum = 0;
  for (size_t i = 0; i < count; ++i) sum ^= consume(reader.next());
  memory = reader.memory();
  plain = reader.plain_files();
  return sum;
}

uint64_t with_pread(const std::vector<std::string>& files) {
  std::vector<std::byte> buffer(ReadOptions{}.block);
  uint64_t sum = 0;
  for (const std::string& file : files) {
    const UniqueFd fd(FileOps::real().open(file.c_str(), O_RDONLY | O_CLOEXEC, 0));
    if (!fd) throw_errno(Code::unavailable, cat("cannot read '", file, "'"));
    for (uint64_t at = 0, size = std::filesystem::file_size(file); at < size;) {
      const auto wanted = static_cast<size_t>(std::min<uint64_t>(buffer.size(), size - at));
      size_t got = 0;
      while (got < wanted) {
        const ssize_t n =
            FileOps::real().pread(fd.get(), buffer.data() + got, wanted - got, static_cast<int64_t>(at + got));
        if (n <= 0) throw_errno(Code::unavailable, cat("cannot read '", file, "'"));
        got += static_cast<size_t>(n);
      }
      sum ^= consume(std::span(buffer).first(got));
      at += got;
    }
  }
  return sum;
}

uint64_t with_map(const std::vector<std::string>& files) {
  uint64_t sum = 0;
  const size_t block = ReadOptions{}.block;
  for (const std::string& file : files) {
    const MappedFile map(file);
    for (auto rest = map.bytes(); !rest.empty(); rest = rest.subspan(std::min(block, rest.size())))
      sum ^= consume(rest.first(std::min(block, rest.size())));
  }
  return sum;
}

struct Way {
  std::string name;
  std::function<uint64_t(size_t& memory, size_t& plain)> read;
};

std::vector<Way> ways(const std::vector<std::string>& files) {
  std::vector<Way> out;
  out.push_back({"pread, one thread", [&files](size_t&, size_t&) { return with_pread(files); }});
  out.push_back({"memory map", [&files](size_t&, size_t&) { return with_map(files); }});
  for (const auto& [threads, direct] : {std::pair(1, true), {4, true}, {8, true}, {16, true}, {8, false}})
    out.push_back({cat("reader, ", threads, direct ? " threads, O_DIRECT" : " threads, plain"),
                   [&files, threads = threads, direct = direct](size_t& memory, size_t& plain) {
                     return with_reader(files, {.threads = threads, .direct = direct}, memory, plain);
                   }});
  return out;
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (i + 1 == argc) throw Error(Code::usage, cat("'", word, "' needs a value"));
    const std::string value = argv[++i];
    if (word == "--dir")
      o.dir = value;
    else if (word == "--model")
      o.model = value;
    else if (word == "--json")
      o.json = value;
    else if (word == "--bytes")
      o.bytes = static_cast<uint64_t>(std::max<int64_t>(parse_int(value).value_or(0), 1));
    else if (word == "--reps")
      o.reps = static_cast<int>(std::clamp<int64_t>(parse_int(value).value_or(1), 1, 100));
    else
      throw Error(Code::usage, cat("unknown option '", word, "'"), "--bytes, --dir, --model, --reps or --json");
  }
  return o;
}

int run(int argc, char** argv) {
  const Options o = parse(argc, argv);
  std::vector<std::string> files;
  std::optional<OwnFile> own;
  if (o.model.empty()) {
    files.push_back(cat(o.dir, "/bench_load.", random_hex(6), ".tmp"));
    own.emplace(files.back());
    write_noise(files.back(), o.bytes);
  } else {
    std::set<std::string> names;
    for (const auto& [tensor, info] : Checkpoint(o.model).tensors()) names.insert(info.file);
    for (const std::string& name : names) files.push_back(cat(o.model, "/", name));
  }
  uint64_t bytes = 0;
  for (const std::string& file : files) bytes += std::filesystem::file_size(file);
  Json results = Json::array();
  for (const Way& way : ways(files)) {
    double best = 1e30;
    size_t memory = 0, plain = 0;
    for (int rep = 0; rep < o.reps; ++rep) {
      drop_cache(files);
      const auto begin = Clock::now();
      const uint64_t sum = way.read(memory, plain);
      best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
      if (sum == 0) throw Error(Code::internal, "nothing was read");
    }
    const double gbs = static_cast<double>(bytes) / best / 1e9;
    std::printf("%-32s %8.3f s %8.2f GB/s%s\n", way.name.c_str(), best, gbs,
                plain > 0 && way.name.find("DIRECT") != std::string::npos ? "  (refused O_DIRECT)" : "");
    std::fflush(stdout);
    results.push_back(
        {{"way", way.name}, {"seconds", best}, {"gbs", gbs}, {"buffers", memory}, {"plain_files", plain}});
  }
  const Json json = {{"bench", "load"}, {"bytes", bytes}, {"files", files.size()}, {"results", results}};
  std::cout << dump(json) << "\n";
  if (!o.json.empty()) write_file(o.json, dump(json) + "\n");
  return 0;
}

}  // namespace
}  // namespace glm53

int main(int argc, char** argv) {
  try {
    return glm53::run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "bench_load: " << e.what() << "\n";
    return 1;
  }
}
