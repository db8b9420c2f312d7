// glm53ctl download against a Hub that misbehaves, without an agent: exit codes, what is printed, what is left.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/mount.h>

#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"
#include "tests/temp_dir.h"
#include "tests/unit/hub/fake_hub.h"

using namespace glm53;
using namespace glm53::test;
namespace fs = std::filesystem;

namespace {

struct Ended {
  int code = -1;
  std::string output;  ///< both streams
};

/// A Hub with one repository, and a user with an empty home.
struct Setup {
  FakeHub hub;
  TempDir dir;
  std::map<std::string, std::string> env;
  Setup() {
    hub.add("org/model", "config.json", "{}", false);
    hub.add("org/model", "model.safetensors", safetensors(3 << 20), true);
    hub.add("org/model", "notes/a.txt", "a note", false);
    write_file(dir / "config.toml",
               cat("hub.endpoint = \"", hub.endpoint(),
                   "\"\nhub.disk_reserve = 0\nhub.give_up_after = \"1s\"\npaths.state = \"", dir / "state", "\"\n"));
    make_dirs(dir / "state");
    env = {{"HOME", dir.path()}, {"PATH", "/usr/bin:/bin"}};
  }
  static std::string safetensors(size_t bytes) {
    const std::string header = cat(R"({"t":{"dtype":"U8","shape":[)", bytes, R"(],"data_offsets":[0,)", bytes, "]}}");
    std::string out;
    for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(header.size() >> shift & 0xff);
    return out + header + std::string(bytes, 'w');
  }
  Child start(std::vector<std::string> arguments) const {
    SpawnOptions options;
    options.argv = {std::string(GLM53_BINARY_DIR) + "/bin/glm53ctl", "--config", dir / "config.toml", "download"};
    options.argv.insert(options.argv.end(), arguments.begin(), arguments.end());
    options.env = env;
    return spawn(options);
  }
  static Ended finish(const Child& child) {
    Ended ended;
    std::optional<ExitStatus> status;
    while (true) {
      status = status ? status : try_wait(child.id.pid);
      char block[4096];
      ssize_t n;
      while ((n = ::read(child.output.get(), block, sizeof block)) > 0)
        ended.output.append(block, static_cast<size_t>(n));
      if (status) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ended.code = status->code;
    return ended;
  }
  Ended run(std::vector<std::string> arguments) const { return finish(start(std::move(arguments))); }
  std::string cache() const { return dir / ".cache/huggingface/hub"; }
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("glm53ctl download: works alone, fills the users' cache, and prints the snapshot") {
  Setup s;
  const Ended first = s.run({"org/model"});
  CAPTURE(first.output);
  CHECK(first.code == 0);
  const std::string snapshot = cat(s.cache(), "/models--org--model/snapshots/", FakeHub::commit());
  CHECK(has(first.output, snapshot));
  CHECK(read_file(snapshot + "/model.safetensors") == Setup::safetensors(3 << 20));
  CHECK(read_file(snapshot + "/notes/a.txt") == "a note");
  CHECK(read_file(s.cache() + "/models--org--model/refs/main") == FakeHub::commit());
  const int64_t sent = s.hub.body_bytes;
  CHECK(s.run({"org/model", "--offline"}).code == 0);
  CHECK(s.run({"org/model@" + FakeHub::commit()}).code == 0);
  CHECK(s.hub.body_bytes == sent);
  const Ended other = s.run({"org/model", "--cache", s.dir / "other", "--exclude", "notes/*"});
  CHECK(other.code == 0);
  CHECK_FALSE(fs::exists(cat(s.dir / "other/models--org--model/snapshots/", FakeHub::commit(), "/notes")));
}

TEST_CASE("glm53ctl download --json: every line is JSON, the last one the result") {
  Setup s;
  const Ended ended = s.run({"org/model", "--json"});
  CHECK(ended.code == 0);
  nlohmann::ordered_json last;
  int progress = 0;
  for (const std::string& line : split(std::string(trim(ended.output)), '\n')) {
    CAPTURE(line);
    REQUIRE_NOTHROW(last = parse_json(line));
    progress += last.value("type", "") == "progress";
  }
  CHECK(progress >= 2);
  CHECK(last.at("type") == "result");
  CHECK(last.at("complete") == true);
  CHECK(last.at("commit") == FakeHub::commit());
}

TEST_CASE("glm53ctl download: exit codes and the one line for what goes wrong") {
  Setup s;
  const auto expect = [&](const char* what, std::vector<std::string> arguments, int code, const std::string& part) {
    CAPTURE(what);
    const Ended ended = s.run(std::move(arguments));
    CAPTURE(ended.output);
    CHECK(ended.code == code);
    CHECK(has(ended.output, part));
    CHECK_FALSE(has(ended.output, "SECRETSIGNATURE"));
  };
  expect("no such repository", {"org/none"}, 1, "E620");
  expect("no such revision", {"org/model@gone"}, 1, "E624");
  expect("no repository id", {"../x"}, 2, "no repository id");
  expect("no repository", {}, 2, "no repository is named");
  expect("unknown option", {"org/model", "--frobnicate"}, 2, "frobnicate");
  expect("offline", {"org/model", "--offline"}, 1, "offline");
  s.hub.faults.flip = -1;
  expect("damage", {"org/model"}, 7, "E610");
  s.hub.faults.flip = 0;
  s.hub.faults.expired = -1;
  expect("signed URL", {"org/model"}, 1, s.hub.cdn());
  s.hub.faults.expired = 0;
  s.hub.faults.error_code = "GatedRepo";
  s.hub.faults.status = 403;
  expect("gated", {"org/model"}, 1, "E622");
  s.hub.faults.status = 0;
  write_file(s.dir / "config.toml", "hub.endpiont = \"x\"\n");
  expect("configuration", {"org/model"}, 2, "hub.endpoint");
}

TEST_CASE("glm53ctl download: Ctrl-C exits 130 and keeps what came; the next run goes on") {
  Setup s;
  s.hub.faults.bytes_per_s = 1 << 20;
  const Child child = s.start({"org/model"});
  while (s.hub.body_bytes < (1 << 19)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  CHECK(::kill(child.id.pid, SIGINT) == 0);
  CHECK(Setup::finish(child).code == 130);
  s.hub.faults.bytes_per_s = 0;
  const int64_t before = s.hub.body_bytes;
  CHECK(s.run({"org/model"}).code == 0);
  CHECK(s.hub.body_bytes - before < (3 << 20) - (1 << 18));
}

TEST_CASE("glm53ctl download: the token is in no argv, no output, no file") {
  Setup s;
  s.hub.set_token("hf_averysecrettoken");
  s.env["HF_TOKEN"] = "hf_averysecrettoken";
  s.hub.faults.bytes_per_s = 4 << 20;
  const Child child = s.start({"org/model"});
  std::string command_line;
  while (s.hub.body_bytes == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  command_line = read_file(cat("/proc/", child.id.pid, "/cmdline"), 1 << 16);
  const Ended ended = Setup::finish(child);
  CHECK(ended.code == 0);
  CHECK(has(command_line, "download"));
  CHECK_FALSE(has(command_line, "averysecret"));
  CHECK_FALSE(has(ended.output, "averysecret"));
  CHECK_FALSE(s.hub.token_leaked);
  for (const auto& entry : fs::recursive_directory_iterator(s.dir.path())) {
    if (entry.is_regular_file()) CHECK_FALSE(has(read_file(entry.path().string()), "averysecret"));
  }
}

TEST_CASE("glm53ctl download: a read-only cache is named in one line, and stays as it was") {
  Setup s;
  REQUIRE(s.run({"org/model"}).code == 0);
  const std::string other = s.dir / "read-only";
  make_dirs(other);
  if (::mount(s.cache().c_str(), other.c_str(), nullptr, MS_BIND, nullptr) != 0 ||
      ::mount(nullptr, other.c_str(), nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0) {
    ::umount2(other.c_str(), MNT_DETACH);
    MESSAGE("left out: read-only folders cannot be mounted here");
    return;
  }
  s.hub.add("org/new", "config.json", "{}", false);
  s.hub.add("org/new", "model.safetensors", Setup::safetensors(1000), true);
  const Ended refused = s.run({"org/new", "--cache", other});
  CAPTURE(refused.output);
  CHECK(refused.code == 1);
  CHECK(has(refused.output, "error: "));
  CHECK(has(refused.output, other));
  CHECK(has(refused.output, "Read-only file system"));
  CHECK_FALSE(fs::exists(other + "/models--org--new"));
  // What it has is enough without writing.
  const Ended there = s.run({"org/model@" + FakeHub::commit(), "--cache", other, "--offline"});
  CAPTURE(there.output);
  CHECK(there.code == 0);
  CHECK(::umount2(other.c_str(), MNT_DETACH) == 0);
}
