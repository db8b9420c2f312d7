#include "agent/sync/manifest.h"

#include <filesystem>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/json.h"
#include "tests/unit/sync/world.h"

using namespace glm53;
using namespace glm53::sync;
using namespace glm53::test;
using Json = nlohmann::ordered_json;

namespace {

const std::string kEtag(64, 'a'), kOther(64, 'b');

Json good() {
  return {{"version", 1},
          {"repo", "org/model"},
          {"commit", kCommit},
          {"refs", {"main"}},
          {"files", {{{"path", "config.json"}, {"etag", kEtag}, {"size", 2}}}}};
}

Code code_of(const Json& j) {
  return error_of([&] { parse_manifest(j.dump()); }).code();
}

Json with_files(std::initializer_list<Json> files) {
  Json j = good();
  j["files"] = Json::array();
  for (const Json& f : files) j["files"].push_back(f);
  return j;
}

}  // namespace

TEST_CASE("the same manifest is the same text and digest, whatever its order") {
  SyncWorld w;
  Manifest a = w.manifest();
  CHECK(a.files.size() == w.files.size());
  CHECK(a.refs == std::vector<std::string>{"main"});
  CHECK(a.bytes() == 5'300'000 + 2'000'001 + 70'000 + 2);
  Manifest b = parse_manifest(to_json(a));
  CHECK(b.files == a.files);
  std::reverse(b.files.begin(), b.files.end());
  CHECK(digest_of(a) == digest_of(b));
  b.files.front().size += 1;
  CHECK(digest_of(a) != digest_of(b));
}

TEST_CASE("what is no snapshot gives no manifest") {
  SyncWorld w;
  CHECK(error_of([&] { manifest_of(hub::Cache(w.source()), kRepo, std::string(40, 'd')); }).code() == Code::not_found);
  const std::string snapshot = cat(w.source(), "/models--org--model/snapshots/", kCommit);
  write_file(snapshot + "/a-file-of-somebody", "x");
  CHECK(error_of([&] { w.manifest(); }).code() == Code::corrupt);
  std::filesystem::remove(snapshot + "/a-file-of-somebody");
  CHECK_NOTHROW(w.manifest());
  std::filesystem::remove(hub::Cache(w.source()).blob_path(kRepo, etag_of("{}")));
  CHECK(error_of([&] { w.manifest(); }).code() == Code::corrupt);
}

TEST_CASE("hostile manifests are refused by name") {
  CHECK(code_of(good()) == Code::ok);
  for (const char* repo : {"../x", "a/b/c", "org/..", "org/model.git", "", "org/mo del", "/etc"}) {
    Json j = good();
    j["repo"] = repo;
    CAPTURE(repo);
    CHECK(code_of(j) == Code::usage);
  }
  for (const char* path :
       {"../config.json", "/etc/passwd", "a/../b", "a//b", "./a", "", "a\\b", "a/", "-rf", "a/-b", "x\ny", ".."}) {
    CAPTURE(path);
    CHECK(code_of(with_files({{{"path", path}, {"etag", kEtag}, {"size", 2}}})) == Code::usage);
  }
  CHECK(code_of(with_files({{{"path", std::string("a\0b", 3)}, {"etag", kEtag}, {"size", 2}}})) == Code::usage);
  CHECK(code_of(with_files({{{"path", std::string(2000, 'a')}, {"etag", kEtag}, {"size", 2}}})) == Code::usage);
  for (const char* etag : {"", "../../etc/passwd", "abc", "g0"}) {
    CHECK(code_of(with_files({{{"path", "a"}, {"etag", etag}, {"size", 2}}})) == Code::usage);
  }
  for (const Json& size : {Json(-1), Json(1.5), Json("2"), Json(nullptr), Json(int64_t{1} << 60)}) {
    CHECK(code_of(with_files({{{"path", "a"}, {"etag", kEtag}, {"size", size}}})) == Code::usage);
  }
  // Two names of one file, a file that is a folder, one blob with two sizes.
  CHECK(code_of(with_files({{{"path", "a"}, {"etag", kEtag}, {"size", 2}},
                            {{"path", "a"}, {"etag", kOther}, {"size", 2}}})) == Code::usage);
  CHECK(code_of(with_files({{{"path", "a"}, {"etag", kEtag}, {"size", 2}},
                            {{"path", "a/b"}, {"etag", kOther}, {"size", 2}}})) == Code::usage);
  CHECK(code_of(with_files({{{"path", "a"}, {"etag", kEtag}, {"size", 2}},
                            {{"path", "b"}, {"etag", kEtag}, {"size", 3}}})) == Code::usage);
  CHECK(code_of(with_files({})) == Code::usage);
  for (const char* key : {"version", "repo", "commit", "refs", "files"}) {
    Json j = good();
    j.erase(key);
    CAPTURE(key);
    CHECK(code_of(j) == Code::usage);
    j[key] = Json::array({Json::array()});
    CHECK(code_of(j) != Code::ok);
  }
  for (const char* ref : {"../../x", kCommit.c_str(), "a..b/../..", ""}) {
    Json j = good();
    j["refs"] = Json::array({ref});
    CAPTURE(ref);
    CHECK(code_of(j) == Code::usage);
  }
  CHECK(error_of([&] { parse_manifest("[]"); }).code() == Code::usage);
  CHECK(error_of([&] { parse_manifest("{"); }).code() != Code::ok);
}
