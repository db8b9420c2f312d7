#include "agent/hub/command.h"

#include <doctest/doctest.h>

#include "fixture.h"

using namespace glm53;
using namespace glm53::hub;
using namespace glm53::test;

namespace {

struct Resolved {
  Settings settings;
  DownloadRequest request;
  std::vector<std::string> notes;
  bool note(const std::string& part) const {
    return std::any_of(notes.begin(), notes.end(), [&](const auto& n) { return n.find(part) != std::string::npos; });
  }
};

Resolved resolve(const CommandOptions& options, const std::string& toml, std::map<std::string, std::string> env) {
  env.emplace("HOME", "/nonexistent");
  Resolved out;
  auto [s, r] = resolve_command(
      options, Config::parse(toml, "c.toml"),
      [&](const std::string& name) {
        const auto found = env.find(name);
        return found == env.end() ? std::nullopt : std::optional(found->second);
      },
      [&](const std::string& n) { out.notes.push_back(n); });
  out.settings = std::move(s);
  out.request = std::move(r);
  return out;
}

CommandOptions what(const std::string& repo) {
  CommandOptions o;
  o.what = repo;
  return o;
}

}  // namespace

TEST_CASE("download command: repository and revision") {
  CHECK(resolve(what("a/b"), "", {}).request.revision == "main");
  CHECK(resolve(what("a/b@v1"), "", {}).request.revision == "v1");
  CHECK(error_of([] { resolve(what(""), "", {}); }).code() == Code::usage);
  CHECK(error_of([] { resolve(what("a/b@"), "", {}); }).code() == Code::usage);
  const std::string toml =
      "model.repo = \"m/x\"\nmodel.revision = \"abc\"\nmodel.fallback_repo = \"f/y\"\ndraft.repo = \"d/z\"\n";
  const Resolved configured = resolve(what(""), toml, {});
  CHECK(configured.request.repo == "m/x");
  CHECK(configured.request.revision == "abc");
  CHECK(configured.request.fallback_repo == "f/y");
  CHECK(configured.request.configured);
  CHECK_FALSE(resolve(what("m/x@other"), toml, {}).request.configured);
  CHECK(resolve(what("d/z"), toml, {}).request.configured);
  CHECK(resolve(what("d/z"), toml, {}).request.fallback_repo.empty());
  CHECK(resolve(what("o/o"), toml, {}).request.fallback_repo.empty());
}

TEST_CASE("download command: options win over the environment, and that over the file") {
  const std::string toml = "hub.home = \"/file\"\nhub.endpoint = \"http://file\"\nhub.limit_rate = \"1MiB\"\n";
  CHECK(resolve(what("a/b"), toml, {}).settings.cache == "/file/hub");
  const Resolved env =
      resolve(what("a/b"), toml, {{"HF_HOME", "/env"}, {"HF_ENDPOINT", "http://env/"}, {"HF_HUB_OFFLINE", "1"}});
  CHECK(env.settings.cache == "/env/hub");
  CHECK(env.settings.endpoint == "http://env");
  CHECK(env.settings.offline);
  CHECK(env.note("hub.home=/env (from env HF_HOME)"));
  CHECK(env.note("HF_ENDPOINT"));
  CHECK(resolve(what("a/b"), toml, {{"HF_HOME", "/env"}, {"HF_HUB_CACHE", "/c"}}).settings.cache == "/c");
  CHECK(resolve(what("a/b"), toml, {{"HF_HOME", ""}, {"HF_HUB_OFFLINE", "0"}}).settings.cache == "/file/hub");
  CommandOptions o = what("a/b");
  o.cache = "/flag";
  o.limit_rate = "2M";
  o.offline = true;
  const Resolved flag = resolve(o, toml, {{"HF_HUB_CACHE", "/c"}});
  CHECK(flag.settings.cache == "/flag");
  CHECK(flag.settings.limit_rate == 2000000);
  CHECK(flag.settings.offline);
  o.no_env = true;
  CHECK(resolve(o, toml, {{"HF_ENDPOINT", "http://env"}}).settings.endpoint == "http://file");
  o.limit_rate = "fast";
  CHECK(error_of([&] { resolve(o, toml, {}); }).code() == Code::usage);
}

TEST_CASE("download command: the token comes from the environment or a file, and is named nowhere") {
  const TempDir dir;
  write_file(dir / "token", "hf_standardtoken\n", 0644);
  write_file(dir / "mine", "hf_minetoken\n", 0600);
  write_file(dir / "open", "hf_opentoken\n", 0644);
  const std::map<std::string, std::string> home{{"HF_HOME", dir.path()}};
  const Resolved standard = resolve(what("a/b"), "", home);
  CHECK(standard.settings.token == "hf_standardtoken");
  CHECK(standard.note("can be read by other users"));
  CHECK(resolve(what("a/b"), cat("hub.token_file = \"", dir / "mine", "\"\n"), home).settings.token == "hf_minetoken");
  CHECK(error_of([&] { resolve(what("a/b"), cat("hub.token_file = \"", dir / "open", "\"\n"), home); }).code() ==
        Code::config);
  auto env = home;
  env["HF_TOKEN"] = " hf_envtoken\n";
  const Resolved from_env = resolve(what("a/b"), "", env);
  CHECK(from_env.settings.token == "hf_envtoken");
  for (const std::string& n : from_env.notes) CHECK(n.find("hf_envtoken") == std::string::npos);
  env["HF_TOKEN"] = "two lines\r\nX-Evil: 1";
  CHECK(error_of([&] { resolve(what("a/b"), "", env); }).code() == Code::config);
  CommandOptions offline = what("a/b");
  offline.offline = true;
  CHECK(resolve(offline, "", home).settings.token.empty());
}

TEST_CASE("download command: the progress line tells bytes, rate, time left and the file") {
  Progress p;
  p.phase = "transferring";
  p.bytes_done = 512 << 20;
  p.bytes_total = int64_t{1} << 30;
  p.rate = 100 << 20;
  p.eta_s = 75;
  p.files_done = 1;
  p.files_total = 7;
  p.file = "model-00001.safetensors";
  CHECK(progress_line(p, 200) ==
        "[##########----------] 50% 512.0 MiB of 1.0 GiB, 100.0 MiB/s, 1 min 15 s left, 1/7 files, "
        "model-00001.safetensors");
  CHECK(progress_line(p, 30).size() == 30);
  p.file = "ü";
  for (int width = 1; width < 120; ++width) CHECK(valid_utf8(progress_line(p, width)));
}
