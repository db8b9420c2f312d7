// Prepared weights give the model that converting gives, and are refused when they are not the ones wanted.
#include "engine/loader/prepared.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>

#include <doctest/doctest.h>

#include "common/strings.h"
#include "engine/loader/formats.h"
#include "engine/model/load.h"
#include "tests/golden/model_harness.h"
#include "tests/golden/two_ranks.h"
#include "tests/unit/loader/checkpoint_writer.h"

namespace glm53 {
namespace {

using golden::Runner;
using golden::Values;
using testing::caught;
using testing::TempDir;

struct SmallFolder {
  TempDir dir;
  explicit SmallFolder(const std::function<void(testing::NewTensors&)>& edit = {}) {
    const std::string config = testing::small_config().dump();
    testing::write_text(dir / "config.json", config);
    testing::NewTensors tensors = testing::SmallCheckpoint(parse_model_config(config, "config.json"), true).tensors;
    if (edit) edit(tensors);
    testing::write_text(dir / "model.safetensors", testing::file_of(tensors));
  }
};

ModelLimits limits() {
  ModelLimits l;
  l.max_rows = 64;
  l.max_context = 64;
  l.max_logit_rows = 64;
  return l;
}

FormatPolicy formats(const std::string& dense, const std::string& head) {
  FormatPolicy policy = FormatPolicy::as_stored();
  set_format(policy, "dense", dense);
  set_format(policy, "head", head);
  return policy;
}

std::vector<int32_t> prompt() {
  std::vector<int32_t> ids;
  for (int i = 0; i < 40; ++i) ids.push_back((i * 37 + 11) % 90);
  return ids;
}

/// Logits of a model on some ranks, and the bytes of its weights.
struct Result {
  Values logits;
  std::vector<std::pair<std::string, size_t>> bytes;
};
Result run(const std::string& dir, const FormatPolicy& policy, int ranks, const LoadOptions& options) {
  Result out;
  golden::run_ranks(ranks, [&](golden::ThreadGroup::Member& member) {
    const auto ops = make_cpu_ops(1);
    Runner runner(load_model(dir, policy, limits(), *ops, member, options), 1, *ops);
    const Values logits = runner.prefill(0, prompt(), 64);
    if (member.shard().rank == 0) out = {logits, runner.model().weight_bytes()};
  });
  return out;
}

TEST_CASE("prepared weights: bit-equal to those converted while loading") {
  const SmallFolder model;
  for (const int ranks : {1, 2})
    for (const auto& [dense, head] :
         {std::pair("stored", "stored"), std::pair("fp8", "int4"), std::pair("int4", "fp8")}) {
      CAPTURE(ranks);
      CAPTURE(dense);
      const TempDir out;
      const FormatPolicy policy = formats(dense, head);
      for (int rank = 0; rank < ranks; ++rank)
        CHECK(prepare_weights(model.dir.path(), policy, {rank, ranks}, out.path()) > 0);
      const Result converted = run(model.dir.path(), policy, ranks, {});
      const Result prepared = run(model.dir.path(), policy, ranks, {.prepared = out.path()});
      CHECK_FALSE(converted.logits.data.empty());
      CHECK(golden::same_bits(prepared.logits, converted.logits));
      CHECK(prepared.bytes == converted.bytes);
    }
}

TEST_CASE("glm53-tiny from prepared weights: bit-equal, fp8 and two ranks") {
  const std::string dir = golden::source_path(golden::kTrained);
  const TempDir out;
  const FormatPolicy policy = formats("fp8", "int4");
  for (int rank = 0; rank < 2; ++rank) prepare_weights(dir, policy, {rank, 2}, out.path());
  CHECK(golden::same_bits(run(dir, policy, 2, {.check_values = true, .prepared = out.path()}).logits,
                          run(dir, policy, 2, {}).logits));
}

/// What a load of prepared weights says.
testing::Caught loaded(const std::string& dir, const FormatPolicy& policy, const std::string& prepared) {
  const auto ops = make_cpu_ops(1);
  const auto comm = make_single_communicator();
  return caught([&] { (void)load_model(dir, policy, limits(), *ops, *comm, LoadOptions{.prepared = prepared}); });
}

void flip(const std::string& path, std::streamoff at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const auto byte = static_cast<char>(file.get() ^ 4);
  file.seekp(at);
  file.put(byte);
  REQUIRE(file.good());
}

TEST_CASE("prepared weights that are not the ones wanted are refused with the reason") {
  const SmallFolder model;
  const SmallFolder edited([](testing::NewTensors& t) {
    std::string& data = t.at("model.language_model.layers.1.self_attn.o_proj.weight").data;
    for (size_t i = 0; i < data.size(); i += 2) data[i] = static_cast<char>(data[i] ^ 1);
  });
  const SmallFolder other([](testing::NewTensors& t) {
    auto& moved = t.at("model.language_model.norm.weight");
    t["model.visual.norm.weight"] = moved;
  });
  const TempDir out;
  const FormatPolicy policy = formats("fp8", "stored");
  prepare_weights(model.dir.path(), policy, {0, 1}, out.path());
  const std::string folder = out / prepared_folder({0, 1});
  const auto refused = [&](const testing::Caught& c, const std::string& why) {
    CAPTURE(c.text);
    CHECK(c.code == Code::weights);
    CHECK(c.says(why));
    CHECK(c.says("glm53-engine prepare"));
  };
  const auto here = [&] { return loaded(model.dir.path(), policy, out.path()); };
  CHECK(here().code == Code::ok);
  refused(loaded(edited.dir.path(), policy, out.path()), "same tensors but other values");
  refused(loaded(other.dir.path(), policy, out.path()), "another checkpoint");
  refused(loaded(model.dir.path(), formats("int4", "stored"), out.path()),
          "kda_in as fp8, the configuration says int4");
  refused(loaded(model.dir.path(), policy, out / "nowhere"), "no such folder");

  const std::string data = folder + "/weights", manifest = folder + "/manifest.json";
  const auto size = static_cast<std::streamoff>(std::filesystem::file_size(data));
  for (const std::streamoff at : {std::streamoff{0}, size / 2, size - 1}) {
    flip(data, at);
    refused(here(), "are not as they were written");
    flip(data, at);
  }
  flip(manifest, 500);
  CHECK(here().code == Code::weights);
  flip(manifest, 500);
  CHECK(here().code == Code::ok);
  std::filesystem::resize_file(data, static_cast<uintmax_t>(size - 1));
  refused(here(), cat("bytes, ", size, " were written"));
  std::filesystem::remove(manifest);
  refused(here(), "its preparation was not finished");

  // Another rank's folder under this rank's name.
  prepare_weights(model.dir.path(), policy, {1, 2}, out.path());
  std::filesystem::remove_all(folder);
  std::filesystem::rename(out / prepared_folder({1, 2}), folder);
  refused(here(), "holds rank 1 of 2, this is rank 0 of 1");
}

/// Fails the n-th call that changes a file.
class FailingFiles final : public FileOps {
 public:
  explicit FailingFiles(int n) : left_(n) {}
  bool failed = false;
  ssize_t write(int fd, const void* data, size_t n) override { return fails() ? -1 : FileOps::write(fd, data, n); }
  int fsync(int fd) override { return fails() ? -1 : FileOps::fsync(fd); }
  int fdatasync(int fd) override { return fails() ? -1 : FileOps::fdatasync(fd); }
  int rename(const char* from, const char* to) override { return fails() ? -1 : FileOps::rename(from, to); }

 private:
  bool fails() {
    if (left_-- != 0) return false;
    errno = ENOSPC;
    return failed = true;
  }
  int left_;
};

TEST_CASE("a preparation that fails anywhere leaves a folder that is whole or refused") {
  const SmallFolder model;
  const FormatPolicy policy = FormatPolicy::as_stored();
  const TempDir out;
  prepare_weights(model.dir.path(), policy, {0, 1}, out.path());
  int failures = 0;
  for (int n = 0;; ++n) {
    CAPTURE(n);
    FailingFiles files(n);
    const auto error = caught([&] { prepare_weights(model.dir.path(), policy, {0, 1}, out.path(), {}, {}, files); });
    if (!files.failed) break;
    ++failures;
    CHECK(error.code == Code::unavailable);
    // Only the sync of the folder comes after the manifest is there.
    const auto after = loaded(model.dir.path(), policy, out.path());
    CHECK((after.code == Code::ok || after.says("its preparation was not finished")));
    for (const auto& file : std::filesystem::directory_iterator(out / prepared_folder({0, 1})))
      CHECK(file.path().extension() != ".tmp");
  }
  CHECK(failures >= 5);
  CHECK(loaded(model.dir.path(), policy, out.path()).code == Code::ok);
}

}  // namespace
}  // namespace glm53
