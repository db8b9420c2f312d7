#include "common/log.h"

#include <fcntl.h>
#include <random>
#include <regex>
#include <unistd.h>

#include <doctest/doctest.h>

#include "common/error.h"
#include "common/file.h"
#include "tests/temp_dir.h"

using namespace glm53;

namespace {

/// What `body` writes to stderr.
template <class Body>
std::string stderr_of(Body body) {
  const test::TempDir folder;
  const UniqueFd before(::fcntl(2, F_DUPFD_CLOEXEC, 10));
  const UniqueFd file(::open((folder / "log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  ::dup2(file.get(), 2);
  body();
  ::dup2(before.get(), 2);
  return read_file(folder / "log");
}

}  // namespace

TEST_CASE("log: one line with time, level and tag; lower levels are left out") {
  const std::string text = stderr_of([] {
    log::init("rank0", log::Level::info);
    log::debug("hidden");
    log::info("two\nlines\x01");
    log::error("password is Bearer abc123");
  });
  log::init("", log::Level::info);
  CHECK(std::regex_match(
      text, std::regex("\\d{4}-\\d\\d-\\d\\dT\\d\\d:\\d\\d:\\d\\d\\.\\d{3}Z info  rank0: two\\\\nlines\\\\x01\n"
                       "\\S+Z error rank0: password is Bearer \\[redacted\\]\n")));
  CHECK(log::parse_level("warn") == log::Level::warn);
  CHECK_THROWS_AS(log::parse_level("loud"), Error);
}

TEST_CASE("log: secrets are hidden") {
  log::add_secret("");
  log::add_secret("s3cret");
  log::add_secret("s3cret-longer");
  CHECK(log::redact("a s3cret b s3cret") == "a [redacted] b [redacted]");
  CHECK(log::redact("x=s3cret-longer") == "x=[redacted]");
  CHECK(log::redact("Authorization: bearer abc.DEF-1_~+/=, ok") == "Authorization: bearer [redacted], ok");
  CHECK(log::redact("Authorization: Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==") == "Authorization: Basic [redacted]");
  CHECK(log::redact("token hf_abcdefghijklmnop, ghp_0123456789abcdef.") == "token hf_[redacted], ghp_[redacted].");
  CHECK(log::redact("GET https://h/x?a=1&X-Amz-Signature=ff&X-Amz-Credential=A%2FB&b=2") ==
        "GET https://h/x?a=1&X-Amz-Signature=[redacted]&X-Amz-Credential=[redacted]&b=2");
  CHECK(log::redact("\"https://h/x?Policy=p~_&Signature=s-&Key-Pair-Id=K\"") ==
        "\"https://h/x?Policy=[redacted]&Signature=[redacted]&Key-Pair-Id=[redacted]\"");
}

TEST_CASE("log: ordinary text stays") {
  for (const char* text :
       {"", "hf_hub", "basic training", "the policy is = x", "half_hf_abcdefghijklmnop", "X-Amz-Date", "shelf"}) {
    CHECK(log::redact(text) == text);
  }
}

TEST_CASE("log: redaction of arbitrary bytes ends and leaves no known secret") {
  log::add_secret("needle");
  std::mt19937 random(5);
  for (int round = 0; round < 2000; ++round) {
    std::string line;
    for (int i = 0; i < 40; ++i)
      line += random() % 9 == 0   ? "needle"
              : random() % 9 == 0 ? "Bearer "
                                  : std::string(1, static_cast<char>(random()));
    CHECK(log::redact(line).find("needle") == std::string::npos);
  }
}
