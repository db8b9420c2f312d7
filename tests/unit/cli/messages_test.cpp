#include "cli/messages.h"

#include <cstdlib>
#include <filesystem>
#include <regex>
#include <set>

#include <doctest/doctest.h>

#include "common/file.h"
#include "common/process.h"
#include "common/strings.h"

using namespace glm53;
using namespace glm53::cli;
namespace fs = std::filesystem;

namespace {

/// Every code within a string of the agents' sources.
std::set<std::string> codes_of_sources() {
  std::set<std::string> codes;
  const std::regex code("\"([EW][2-7][0-9]{2})[ \"]");
  for (const char* folder : {"agent/hub", "agent/sync", "agent/preflight", "agent/trust", "agent/api", "agent/image",
                             "agent/state", "common", "cli"}) {
    for (const auto& entry : fs::directory_iterator(cat(GLM53_SOURCE_DIR, "/", std::string_view(folder)))) {
      if (entry.path().extension() != ".cpp" || entry.path().filename() == "messages.cpp") continue;
      const std::string text = read_file(entry.path().string());
      for (std::sregex_iterator it(text.begin(), text.end(), code), end; it != end; ++it) codes.insert((*it)[1]);
    }
  }
  return codes;
}

}  // namespace

TEST_CASE("messages: every code of the agents is in the catalogue once, and no other") {
  std::set<std::string> known;
  std::string last;
  for (const Message& m : messages()) {
    CAPTURE(std::string(m.code));
    CHECK(known.emplace(m.code).second);
    CHECK(std::string(m.code.substr(1)) > last);
    last = m.code.substr(1);
    CHECK(m.meaning.ends_with('.'));
    CHECK_FALSE(m.remedy.empty());
  }
  CHECK(known == codes_of_sources());
}

TEST_CASE("messages: docs/troubleshooting.md is the catalogue") {
  const std::string path = GLM53_SOURCE_DIR "/docs/troubleshooting.md";
  if (environment("GLM53_UPDATE")) write_file(path, troubleshooting_page());
  CHECK(read_file(path) == troubleshooting_page());
}

TEST_CASE("messages: found in any case, and not by accident") {
  REQUIRE(find_message("e640") != nullptr);
  CHECK(find_message("e640")->code == "E640");
  for (const char* odd : {"", "E", "E64", "E6400", "E999", "640"}) CHECK(find_message(odd) == nullptr);
}
