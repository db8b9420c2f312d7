// Keys: limits in their file, quotas, rotation while serving; bodies with a Content-Encoding.
#include <filesystem>
#include <zlib.h>

#include <doctest/doctest.h>

#include "engine/api/auth.h"
#include "engine/api/body.h"
#include "engine/api/errors.h"
#include "engine/api/quota.h"
#include "tests/unit/api/fixture.h"

using namespace api_test;
using glm53::api::ApiError;
using glm53::api::KeyLimits;
using glm53::api::KeyRing;
using glm53::api::QuotaBook;
using std::chrono::seconds;

namespace {

constexpr const char* kHello = R"({"messages":[{"role":"user","content":"Hi"}]})";

std::string compress_as(const std::string& text, int window) {
  z_stream stream{};
  REQUIRE(deflateInit2(&stream, 6, Z_DEFLATED, window, 8, Z_DEFAULT_STRATEGY) == Z_OK);
  std::string input = text, out(text.size() / 2 + 1000, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  REQUIRE(deflate(&stream, Z_FINISH) == Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

int status_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const ApiError& e) {
    return e.status();
  }
  return 200;
}

}  // namespace

TEST_CASE("key file: names, limits behind keys, and what is refused") {
  const KeyRing ring("# staff\nalice:sk-a requests_per_minute=60  concurrent=2\nbob: sk-b tokens_per_day=1000\nsk-c\n");
  CHECK(ring.check("Bearer sk-a") == "alice");
  CHECK(ring.check("bearer  sk-b") == "bob");
  CHECK(ring.check("Bearer sk-c") == "key3");
  CHECK_FALSE(ring.check("Bearer sk-d").has_value());
  CHECK_FALSE(ring.check("Basic sk-a").has_value());
  CHECK(ring.check_secret("sk-a") == "alice");
  CHECK_FALSE(ring.check_secret("").has_value());
  CHECK(ring.limits("alice") == KeyLimits{60, 2, 0, 0});
  CHECK(ring.limits("bob") == KeyLimits{0, 0, 0, 1000});
  CHECK(ring.limits("key3") == KeyLimits{});
  for (const char* bad : {"a:sk-a rpm=3", "a:sk-a concurrent=0", "a:sk-a concurrent", "a:sk-a concurrent=x", "a:x\na:y",
                          "# none", "a:"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(KeyRing{bad}, glm53::Error);
  }
}

TEST_CASE("quota: requests a minute come back evenly, and the answer says when") {
  const auto book = std::make_shared<QuotaBook>();
  const KeyLimits limits{6, 0, 0, 0};
  const QuotaBook::Time now{};
  for (int i = 0; i < 6; ++i) book->admit("a", limits, now);
  try {
    book->admit("a", limits, now + seconds(3));
    FAIL("admitted");
  } catch (const ApiError& e) {
    CHECK(e.status() == 429);
    CHECK(e.retry_after_s() == 7);
    CHECK(std::string(e.what()).find("6 requests a minute") != std::string::npos);
  }
  CHECK_NOTHROW(book->admit("b", limits, now));  // others have their own
  CHECK_NOTHROW(book->admit("a", limits, now + seconds(10)));
  CHECK_THROWS_AS(book->admit("a", limits, now + seconds(11)), ApiError);
  CHECK_NOTHROW(book->admit("a", KeyLimits{7, 0, 0, 0}, now + seconds(11)));  // new limits begin anew
}

TEST_CASE("quota: requests at once, released once whatever ends them") {
  const auto book = std::make_shared<QuotaBook>();
  const KeyLimits limits{0, 2, 0, 0};
  const QuotaBook::Time now{};
  auto first = book->admit("a", limits, now);
  {
    const auto second = book->admit("a", limits, now);
    CHECK(book->running("a") == 2);
    CHECK_THROWS_AS(book->admit("a", limits, now), ApiError);
  }
  CHECK(book->running("a") == 1);
  first->end(5);
  first->end(5);
  CHECK(book->running("a") == 0);
  first.reset();
  CHECK(book->running("a") == 0);
}

TEST_CASE("quota: tokens are counted when they were used; debts are waited for") {
  const auto book = std::make_shared<QuotaBook>();
  const KeyLimits limits{0, 0, 600, 100000};
  const QuotaBook::Time now{};
  book->admit("a", limits, now)->end(900);
  try {
    book->admit("a", limits, now);
    FAIL("admitted");
  } catch (const ApiError& e) {
    CHECK(e.retry_after_s() == 31);  // 300 too many and one to spend, 10 a second
    CHECK(std::string(e.what()).find("600 tokens a minute") != std::string::npos);
  }
  book->admit("a", limits, now + seconds(31))->end(200000);
  try {
    book->admit("a", limits, now + seconds(86400));
    FAIL("admitted");
  } catch (const ApiError& e) {
    CHECK(std::string(e.what()).find("tokens a day") != std::string::npos);
  }
}

TEST_CASE("a key's quota is answered with 429 and Retry-After; other keys are served") {
  const TempDir dir;
  glm53::write_file(dir / "keys", "a:sk-a requests_per_minute=1\nb:sk-b concurrent=1\n", 0600);
  RankedServer served(Overrides{{"api.key_file", dir / "keys"}});
  const auto ask = [&](const std::string& key) {
    auto got =
        std::async(std::launch::async, [&] { return served.server().post("/v1/chat/completions", kHello, key); });
    served.rank().answer(served.rank().submitted(), "</think>Hi");
    return got.get();
  };
  CHECK(ask("sk-a").status == 200);
  const glm53::HttpAnswer refused = served.server().post("/v1/chat/completions", kHello, "sk-a");
  CHECK(refused.status == 429);
  CHECK(refused.body.find("requests a minute") != std::string::npos);
  CHECK(std::stoi(header(refused, "retry-after")) > 30);
  // What never runs is not counted as running: an unknown member value, then two in a row.
  CHECK(served.server().post("/v1/chat/completions", R"({"messages":[]})", "sk-b").status == 400);
  CHECK(ask("sk-b").status == 200);
  CHECK(ask("sk-b").status == 200);
}

TEST_CASE("keys are replaced while serving; a bad file leaves them as they are") {
  const TempDir dir;
  glm53::write_file(dir / "keys", "a:sk-old\n", 0600);
  Server server(Overrides{{"api.key_file", dir / "keys"}});
  const auto status = [&](const std::string& key) {
    return glm53::HttpClient(server.url(), key).request("GET", "/v1/models").status;
  };
  CHECK(status("sk-old") == 200);
  glm53::write_file(dir / "keys", "a:sk-new-one\n", 0600);
  CHECK(eventually([&] { return status("sk-new-one") == 200; }));
  CHECK(status("sk-old") == 401);
  glm53::write_file(dir / "keys", "# nobody, and no opening of the door\n", 0600);
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  CHECK(status("sk-new-one") == 200);
  CHECK(status("") == 401);
  std::filesystem::remove(dir / "keys");
  glm53::write_file(dir / "keys", "a:sk-third\n", 0600);
  CHECK(eventually([&] { return status("sk-third") == 200; }));
}

TEST_CASE("bodies: gzip and deflate, with and without a wrapper; bombs and rubbish") {
  const std::string text(100000, 'x');
  const std::string gzip = compress_as(text, 15 + 16);
  CHECK(glm53::api::decode_body(gzip, "gzip", 200000) == text);
  CHECK(glm53::api::decode_body(gzip, " X-GZIP ", 200000) == text);
  CHECK(glm53::api::decode_body(compress_as(text, 15), "deflate", 200000) == text);
  CHECK(glm53::api::decode_body(compress_as(text, -15), "deflate", 200000) == text);
  CHECK(glm53::api::decode_body("abc", "identity", 10) == "abc");
  CHECK(glm53::api::decode_body("abc", "", 10) == "abc");
  const auto status = [](const std::string& body, const char* encoding, size_t limit) {
    return status_of([&] { glm53::api::decode_body(body, encoding, limit); });
  };
  CHECK(status(gzip, "gzip", 99999) == 413);
  CHECK(status(gzip, "gzip", 100000) == 200);
  CHECK(status(gzip.substr(0, gzip.size() - 10), "gzip", 200000) == 400);
  CHECK(status(gzip + "more", "gzip", 200000) == 400);
  CHECK(status("no gzip at all", "gzip", 200000) == 400);
  CHECK(status("", "gzip", 200000) == 400);
  CHECK(status(gzip, "br", 200000) == 415);
}

TEST_CASE("a compressed request is served, and held to api.max_body as it is inside") {
  Server server(Overrides{{"api.max_body", "64KiB"}});
  const auto tokenize = [&](const std::string& text, const std::string& encoding) {
    return raw_request(server.port(), "POST /tokenize",
                       "Host: x\r\nContent-Type: application/json\r\nContent-Encoding: " + encoding + "\r\n",
                       compress_as("{\"prompt\":\"" + text + "\"}", 15 + 16));
  };
  const std::string good = tokenize("Hello, world!", "gzip");
  CHECK(good.starts_with("HTTP/1.1 200"));
  CHECK(good.find("\"count\":" + std::to_string(tiny().encode("Hello, world!").size())) != std::string::npos);
  CHECK(tokenize(std::string(70000, 'a'), "gzip").starts_with("HTTP/1.1 413"));
  CHECK(tokenize("Hello", "br").starts_with("HTTP/1.1 415"));
}
