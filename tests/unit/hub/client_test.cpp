#include "agent/hub/client.h"

#include <doctest/doctest.h>

#include "fixture.h"

using namespace glm53;
using namespace glm53::hub;
using namespace glm53::test;

namespace {

struct ClientFixture : Fixture {
  Transport transport{TransportOptions{}};
  Source source{hub.endpoint(), kRepo};
  std::vector<std::string> reports;
  Client client(const std::string& token = "") {
    Client::Options options;
    options.token = token;
    options.token_hosts = {parse_url(hub.endpoint()).authority()};
    options.retry = settings.retry;
    options.report = [this](const std::string& r) { reports.push_back(r); };
    return {options, transport};
  }
  FileEntry entry(const std::string& path) {
    return {path, static_cast<int64_t>(file(path).content.size()), file(path).etag};
  }
};

}  // namespace

TEST_CASE("hub client: revisions and listings with pages") {
  ClientFixture f;
  Client client = f.client();
  CHECK(client.resolve(f.source, "main") == FakeHub::commit());
  CHECK(client.resolve(f.source, FakeHub::commit()) == FakeHub::commit());
  const auto all = client.tree(f.source, FakeHub::commit());
  CHECK(all.size() == f.hub.files(Fixture::kRepo).size());
  f.hub.set_page(2);
  CHECK(client.tree(f.source, FakeHub::commit()) == all);
  for (const FileEntry& e : all) CHECK(e.etag == f.file(e.path).etag);
  f.hub.faults.endless_pages = -1;
  CHECK(has(error_of([&] { client.tree(f.source, FakeHub::commit()); }), "E615"));
}

TEST_CASE("hub client: a signed URL is found, and gets no token") {
  ClientFixture f;
  f.hub.set_token("hf_secrettoken");
  Client client = f.client("hf_secrettoken");
  const Location big = client.locate(f.source, FakeHub::commit(), f.entry("model-00001-of-00002.safetensors"));
  CHECK(big.url.authority() == f.hub.cdn());
  CHECK(big.token.empty());
  const Location small = client.locate(f.source, FakeHub::commit(), f.entry("README.md"));
  CHECK(small.token == "hf_secrettoken");
  CHECK_NOTHROW(client.locate(f.source, FakeHub::commit(), f.entry("docs/pictures/a b+c.png")));
  CHECK(client.small_file(f.source, FakeHub::commit(), f.entry("README.md")) == "read me");
  CHECK(client.token_for(parse_url("https://elsewhere.example/x")).empty());
  CHECK(client.token_for(parse_url("http://huggingface.co/x")).empty());
}

TEST_CASE("hub client: an answer about another file, commit or place is refused") {
  ClientFixture f;
  Client client = f.client();
  const auto locate = [&] { client.locate(f.source, FakeHub::commit(), f.entry("model-00001-of-00002.safetensors")); };
  f.hub.faults.wrong_etag = 1;
  CHECK(has(error_of(locate), "E612 hub: the etag"));
  f.hub.faults.wrong_commit = 1;
  CHECK(has(error_of(locate), "E612 hub: the commit"));
  FileEntry longer = f.entry("model-00001-of-00002.safetensors");
  ++longer.size;
  CHECK(has(error_of([&] { client.locate(f.source, FakeHub::commit(), longer); }), "E612 hub: the size"));
  f.hub.faults.loop = -1;
  CHECK(has(error_of(locate), "E618"));
  f.hub.faults.loop = 0;
  f.hub.faults.hop = -1;
  CHECK(has(error_of(locate), "E618"));
  f.hub.faults.hop = 0;
  CHECK_NOTHROW(locate());
}

TEST_CASE("hub client: refusals say what they mean and what helps") {
  ClientFixture f;
  Client client = f.client("hf_secrettoken");
  struct Row {
    int status;
    const char *code, *message, *expected;
    Code kind;
  };
  for (const Row& row :
       {Row{401, "RepoNotFound", "", "E620", Code::not_found}, Row{401, "", "", "E620", Code::not_found},
        Row{401, "", "Invalid credentials in Authorization header", "E621", Code::denied},
        Row{403, "GatedRepo", "", "E622", Code::denied}, Row{401, "GatedRepo", "", "E622", Code::denied},
        Row{403, "", "", "E623", Code::denied}, Row{404, "RevisionNotFound", "", "E624", Code::not_found},
        Row{404, "EntryNotFound", "", "E625", Code::not_found},
        Row{403, "", "Access to this resource is disabled.", "E626", Code::not_found},
        Row{404, "", "", "E620", Code::not_found}, Row{418, "", "", "E619", Code::unavailable}}) {
    CAPTURE(row.status);
    CAPTURE(row.expected);
    f.hub.faults.error_code = row.code;
    f.hub.faults.error_message = row.message;
    f.hub.faults.status = row.status;
    const Error e = error_of([&] { client.resolve(f.source, "main"); });
    CHECK(has(e, row.expected));
    CHECK(e.code() == row.kind);
    CHECK_FALSE(has(e, "hf_secrettoken"));
  }
  f.hub.faults.status = 0;
  CHECK(has(error_of([&] { client.resolve({f.hub.endpoint(), "org/other"}, "main"); }), "E620"));
  CHECK(has(error_of([&] { client.resolve(f.source, "gone"); }), "E624"));
}

TEST_CASE("hub client: rate limits are waited for as the server asks") {
  const Head reset{429, {{"ratelimit", "\"resolvers\";r=0;t=57"}, {"Retry-After", "5"}}};
  CHECK(asked_wait(reset) == Millis(58000));
  CHECK(asked_wait({429, {{"RateLimit", "\"api\";r=3;t=57"}, {"Retry-After", "5"}}}) == Millis(5000));
  CHECK(asked_wait({429, {}}) == Millis(-1));
  CHECK(asked_wait({429, {{"RateLimit", "r=0;t=99999999999999999999"}}}) == Millis(-1));
  CHECK(asked_wait({429, {{"Retry-After", "-7"}}}) == Millis(-1));

  ClientFixture f;
  Client client = f.client();
  f.hub.faults.limited = 2;
  f.hub.faults.limited_s = -1;  // no time that means anything: ordinary backoff
  CHECK(client.resolve(f.source, "main") == FakeHub::commit());
  f.hub.faults.limited = 1;
  f.hub.faults.limited_s = 0;
  CHECK(client.resolve(f.source, "main") == FakeHub::commit());
  REQUIRE_FALSE(f.reports.empty());
  CHECK(f.reports.back().find("going on in 1 s") != std::string::npos);
  f.hub.faults.limited = 1;
  f.hub.faults.limited_s = 600;
  const Error e = error_of([&] { client.resolve(f.source, "main"); });
  CHECK(e.code() == Code::overloaded);
  CHECK(has(e, "601 s"));
}

TEST_CASE("hub client: transient faults are tried again, web pages named") {
  ClientFixture f;
  Client client = f.client();
  f.hub.faults.broken = 3;
  CHECK(client.resolve(f.source, "main") == FakeHub::commit());
  f.hub.faults.index_html = 2;
  CHECK(client.tree(f.source, FakeHub::commit()).size() == 7);
  CHECK(f.reports.back().find("a web page instead of an answer") != std::string::npos);
  f.hub.faults.truncate = 1;
  CHECK(client.small_file(f.source, FakeHub::commit(), f.entry("README.md")) == "read me");
  f.settings.retry.give_up_after = Millis(30);
  Client hasty = f.client();
  f.hub.faults.broken = -1;
  CHECK(has(error_of([&] { hasty.resolve(f.source, "main"); }), "E628"));
}

TEST_CASE("hub client: a server that is not there or never answers") {
  ClientFixture f;
  f.settings.retry.give_up_after = Millis(30);
  Client client = f.client();
  CHECK(has(error_of([&] { client.resolve({"http://127.0.0.1:1", "org/model"}, "main"); }), "E632"));
  TransportOptions options;
  options.connect_timeout = options.first_byte_timeout = Millis(50);
  Transport impatient(options);
  Client waiting({"", {}, f.settings.retry, [](const std::string&) {}, nullptr}, impatient);
  f.hub.faults.silent = -1;
  const Error e = error_of([&] { waiting.resolve(f.source, "main"); });
  CHECK(e.code() == Code::stalled);
  CHECK(has(e, "E633"));
}

TEST_CASE("hub client: listings with hostile names are refused whole") {
  for (const char* name : {"../../etc/passwd", "/etc/passwd", "a/../../b", "a\\b", "a\\u0000b", "", "a/./b", "a\\nb"}) {
    CAPTURE(name);
    const std::string text =
        cat(R"([{"type":"file","size":3,"oid":")", std::string(40, 'a'), R"(","path":")", name, "\"}]");
    CHECK(error_of([&] { parse_tree(text, "x"); }).code() == Code::corrupt);
  }
}

TEST_CASE("hub client: arbitrary JSON is refused or read, never worse") {
  const std::string good =
      R"([{"type":"file","path":"a","size":3,"oid":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","lfs":{"oid":"b","size":1}},{"type":"directory"}])";
  std::minstd_rand random(7);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = good;
    for (int k = 0; k < 3; ++k) text[random() % text.size()] = static_cast<char>(random() >> 5);
    try {
      for (const FileEntry& e : parse_tree(text, "x")) {
        CHECK(is_etag(e.etag));
        CHECK_FALSE(unsafe_path(e.path));
      }
      (void)parse_index(text, "x");
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(refused == 3000);  // an index is no listing
}
