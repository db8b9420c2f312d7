#include "agent/hub/names.h"

#include <doctest/doctest.h>

#include "agent/hub/blob_hash.h"
#include "fixture.h"

using namespace glm53;
using namespace glm53::hub;
using namespace glm53::test;

TEST_CASE("hub: repository ids") {
  for (const char* good : {"gpt2", "org/model", "Mia-AiLab/GLM-5.3-Flash-EXL3-TR3-4bpw", "a_b/c.d"}) {
    CHECK_NOTHROW(check_repo_id(good));
  }
  const std::vector<std::string> refused{"",
                                         "/",
                                         "a/",
                                         "/a",
                                         "a/b/c",
                                         "../x",
                                         "a/..",
                                         "-a/b",
                                         "a-/b",
                                         "a/b.",
                                         "a/.b",
                                         "a--b/c",
                                         "a/b--c",
                                         "a/b.git",
                                         "a b/c",
                                         "a/b\n",
                                         "a\\b",
                                         "a/b%2f",
                                         "a/" + std::string(97, 'x'),
                                         std::string("a\0b", 3)};
  for (const std::string& bad : refused) {
    CAPTURE(bad);
    CHECK(error_of([&] { check_repo_id(bad); }).code() == Code::usage);
  }
  CHECK(folder_name("Org/Model-1") == "models--Org--Model-1");
  CHECK(folder_name("gpt2") == "models--gpt2");
}

TEST_CASE("hub: file names that could leave their folder are refused") {
  for (const char* good : {"a", "a/b", "a b+c%41.bin", "..a", "a..b", "a-b", "ümlaut/日本", ".hidden"})
    CHECK_FALSE(unsafe_path(good));
  const std::vector<std::string> bad{"",
                                     "/etc/passwd",
                                     "../x",
                                     "a/../b",
                                     "a/..",
                                     "..",
                                     ".",
                                     "a/./b",
                                     "-rf",
                                     "a/-b",
                                     "a//b",
                                     "a/",
                                     "a\\b",
                                     "..\\x",
                                     "a\nb",
                                     "a\x7f",
                                     "\xff\xfe",
                                     std::string("a\0b", 3),
                                     std::string(300, 'x'),
                                     std::string(2000, '/')};
  for (const std::string& name : bad) {
    CAPTURE(name);
    CHECK(unsafe_path(name).has_value());
  }
  CHECK(error_of([] { check_revision("../main"); }).code() == Code::usage);
  CHECK_NOTHROW(check_revision("refs/pr/1"));
}

TEST_CASE("hub: globs match as in the other clients") {
  CHECK(glob_match("*.json", "config.json"));
  CHECK(glob_match("*.json", "a/b.json"));
  CHECK(glob_match("src/**", "src/a/b"));
  CHECK(glob_match("docs/", "docs/a/b"));
  CHECK(glob_match("model-0000[1-3]*", "model-00002-of-3"));
  CHECK(glob_match("[!a]b", "cb"));
  CHECK(glob_match("a?c", "abc"));
  CHECK(glob_match("*", ""));
  CHECK(glob_match("[x", "[x"));
  CHECK_FALSE(glob_match("[!a]b", "ab"));
  CHECK_FALSE(glob_match("*.json", "config.jsonl"));
  CHECK_FALSE(glob_match("a?c", "ac"));
  CHECK_FALSE(glob_match("", "a"));
  CHECK_FALSE(glob_match("a*a*a*a*a*a*a*a*b", std::string(200, 'a')));
}

TEST_CASE("hub: addresses, encoding, links and etags") {
  CHECK(encode("a b/ü?#%", true) == "a%20b/%C3%BC%3F%23%25");
  CHECK(encode("refs/pr/1", false) == "refs%2Fpr%2F1");
  const Url url = parse_url("https://huggingface.co/x?sig=SECRET");
  CHECK(url.authority() == "huggingface.co:443");
  CHECK(url.shown().find("SECRET") == std::string::npos);
  CHECK(resolve_url(url, "/new/name").full == "https://huggingface.co/new/name");
  CHECK(resolve_url(url, "https://cdn.example:8443/y").authority() == "cdn.example:8443");
  for (const char* bad : {"file:///etc/passwd", "", "ftp://x/y", "http://"}) {
    CHECK_THROWS_AS(parse_url(bad), Error);
  }
  CHECK_THROWS_AS(resolve_url(url, "file:///etc/passwd"), Error);
  CHECK(next_link("<https://a/?x=1,2>; rel=\"next\"") == "https://a/?x=1,2");
  CHECK(next_link("<https://a>; rel=\"prev\", <https://b>; rel=\"next\"") == "https://b");
  CHECK(next_link("<https://a>; rel=\"prev\"").empty());
  CHECK(next_link("<<<").empty());
  CHECK(normal_etag("W/\"abc\"") == "abc");
  CHECK(normal_etag("\"abc\"") == "abc");
  CHECK(normal_etag("abc") == "abc");
}

TEST_CASE("hub: digests are those of git and of sha256sum") {
  CHECK(hash_of("", 40) == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");  // git hash-object of nothing
  CHECK(hash_of("hello\n", 40) == "ce013625030ba8dba906f756967f9e9ca394464a");
  CHECK(hash_of("hello\n", 64) == "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03");
}
