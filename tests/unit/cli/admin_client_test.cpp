#include "cli/admin_client.h"

#include <cstdlib>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "cli/commands.h"
#include "common/file.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::cli;

namespace {

std::string put_file(const test::TempDir& dir, const std::string& name, const std::string& content, int mode = 0600) {
  write_file(dir / name, content, mode);
  return dir / name;
}

Code code_thrown(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.code();
  }
  return Code::ok;
}

}  // namespace

TEST_CASE("every code survives its JSON name") {
  for (int i = 0; i <= static_cast<int>(Code::internal); ++i) {
    CHECK(parse_code(name(static_cast<Code>(i))) == static_cast<Code>(i));
  }
  CHECK(parse_code("no such code") == Code::internal);
}

TEST_CASE("the target follows url, socket, config, default") {
  const test::TempDir dir;
  CHECK(resolve_target({}).endpoint == "unix:/run/glm53/agent.sock");
  CHECK(resolve_target({.socket = "/a/b.sock", .config = "unused"}).endpoint == "unix:/a/b.sock");
  const auto token = put_file(dir, "token", "secret\n");
  const auto by_url = resolve_target({.url = "http://127.0.0.1:1", .token_file = token});
  CHECK(by_url.endpoint == "http://127.0.0.1:1");
  CHECK(by_url.token == "secret");
  const auto config = put_file(dir, "config.toml", "[paths]\nrun = \"/tmp/somewhere\"\n");
  CHECK(resolve_target({.config = config}).endpoint == "unix:/tmp/somewhere/agent.sock");
  const auto named = put_file(dir, "named.toml", "[admin]\nsocket = \"/tmp/other.sock\"\n");
  CHECK(resolve_target({.config = named}).endpoint == "unix:/tmp/other.sock");
}

TEST_CASE("contradicting or unsafe targets are refused") {
  const test::TempDir dir;
  CHECK(code_thrown([] { resolve_target({.socket = "/a", .url = "http://b"}); }) == Code::usage);
  CHECK(code_thrown([] { resolve_target({.token_file = "/a"}); }) == Code::usage);
  CHECK(code_thrown([] { resolve_target({.config = "/nowhere/config.toml"}); }) != Code::ok);
  const auto open_token = put_file(dir, "token", "secret", 0644);
  CHECK(code_thrown([&] { resolve_target({.url = "http://127.0.0.1:1", .token_file = open_token}); }) != Code::ok);
}

TEST_CASE("errors of the agent keep code and remedy") {
  const Error e = error_of_answer(409, R"({"error":{"code":"busy","message":"op-3 is at work","remedy":"stop it"}})");
  CHECK(e.code() == Code::busy);
  CHECK(std::string(e.what()) == "op-3 is at work");
  CHECK(e.remedy() == "stop it");
  CHECK(error_of_answer(401, "<html>").code() == Code::denied);
  CHECK(error_of_answer(404, "").code() == Code::not_found);
  CHECK(error_of_answer(500, R"({"error":"text"})").code() == Code::internal);
}

TEST_CASE("an agent that is not there is named with the remedy") {
  AdminClient agent({"unix:/nowhere/agent.sock", {}});
  try {
    agent.get("/status");
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.code() == Code::unavailable);
    CHECK(std::string(e.what()).find("/nowhere/agent.sock") != std::string::npos);
    CHECK(e.remedy().find("--config") != std::string::npos);
  }
}

TEST_CASE("settings of start are checked before they are sent") {
  StartOptions options;
  options.set = {"serve.max_seqs=16"};
  CHECK(wanted_running(options).at("settings").at("serve.max_seqs") == "16");
  CHECK(wanted_running(options).at("restart") == false);
  options.set = {"serve.max_seq=16"};
  CHECK(code_thrown([&] { wanted_running(options); }) == Code::usage);
  options.set = {"serve.max_seqs"};
  CHECK(code_thrown([&] { wanted_running(options); }) == Code::usage);
  options.set = {"serve.max_seqs=many"};
  CHECK(code_thrown([&] { wanted_running(options); }) == Code::usage);
}
