// Errors, strings, digests, bytes, version.
#include <array>
#include <cerrno>
#include <set>
#include <span>

#include <doctest/doctest.h>

#include "common/bytes.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"
#include "common/version.h"

using namespace glm53;
using namespace std::chrono_literals;

TEST_CASE("error: every code has its own name and a place in each table") {
  std::set<std::string_view> names;
  for (int i = 0; i <= static_cast<int>(Code::internal); ++i) {
    const auto code = static_cast<Code>(i);
    CAPTURE(std::string(name(code)));
    CHECK(names.insert(name(code)).second);
    CHECK((code == Code::ok) == (http_status(code) == 200));
    CHECK((code == Code::ok) == (rank_exit(code) == 0));
    CHECK((code == Code::ok) == (ctl_exit(code) == 0));
    CHECK((rank_exit(code) == 0 || (rank_exit(code) >= 64 && rank_exit(code) <= 71)));
    CHECK((ctl_exit(code) >= 0 && ctl_exit(code) <= 7));
  }
  CHECK(http_status(Code::overloaded) == 429);
  CHECK(http_status(Code::cancelled) == 503);
  CHECK(rank_exit(Code::peer_lost) == 68);
  CHECK(rank_exit(Code::stalled) == 71);
  CHECK(ctl_exit(Code::busy) == 4);
  CHECK(ctl_exit(Code::cancelled) == 1);
}

TEST_CASE("error: text, remedy and context") {
  const Error error(Code::busy, "port 1 is in use", "choose another");
  CHECK(error.line() == "port 1 is in use — choose another");
  CHECK(error.within("start").line() == "start: port 1 is in use — choose another");
  CHECK(Error(Code::busy, "x").line() == "x");
  errno = ENOENT;
  CHECK_THROWS_WITH_AS(throw_errno(Code::not_found, "a"), "a: No such file or directory", Error);
}

TEST_CASE("strings: cat, split, join, trim") {
  CHECK(cat("a", 'b', 1, -2L, true, 0.1, std::string("c")) == "ab1-2true0.1c");
  CHECK(split("a,,b,", ',') == std::vector<std::string>{"a", "", "b", ""});
  CHECK(split("", ',') == std::vector<std::string>{""});
  CHECK(join(std::vector<std::string>{"a", "b"}, ", ") == "a, b");
  CHECK(trim(" \t\na b\r ") == "a b");
  CHECK(trim("  ").empty());
}

TEST_CASE("strings: numbers are whole or nothing") {
  CHECK(parse_int("-9223372036854775808") == INT64_MIN);
  for (const char* bad : {"", " 1", "1 ", "+1", "1.0", "0x1", "9223372036854775808", "1e3"})
    CHECK_FALSE(parse_int(bad));
  CHECK(parse_double("1e3") == 1000.0);
  for (const char* bad : {"", "1,5", "nan", "inf", "1e999", "1 "}) CHECK_FALSE(parse_double(bad));
}

TEST_CASE("strings: sizes and durations") {
  CHECK(parse_bytes("64") == 64);
  CHECK(parse_bytes("512KiB") == 512 * 1024);
  CHECK(parse_bytes("14 GiB") == int64_t{14} << 30);
  CHECK(parse_bytes("1.5GB") == 1500000000);
  for (const char* bad : {"", "GiB", "-1", "1.5", "1..5GB", "1XB", "9999999999999GiB", "99999999999.5TiB"})
    CHECK_FALSE(parse_bytes(bad));
  CHECK(parse_duration("250ms") == 250ms);
  CHECK(parse_duration("1.5s") == 1500ms);
  CHECK(parse_duration("2m") == 2min);
  CHECK(parse_duration("1h") == 1h);
  CHECK(parse_duration("0") == 0ms);
  for (const char* bad : {"", "5", "s", "-1s", "1d", "99999999999h"}) CHECK_FALSE(parse_duration(bad));
  CHECK(human_bytes(0) == "0 B");
  CHECK(human_bytes(1023) == "1023 B");
  CHECK(human_bytes(1024) == "1.0 KiB");
  CHECK(human_bytes(1024 * 1024 - 1) == "1.0 MiB");
  CHECK(human_bytes(14388199424) == "13.4 GiB");
  CHECK(human_bytes(-2048) == "-2.0 KiB");
}

TEST_CASE("strings: the nearest name") {
  const std::vector<std::string> names = {"serve.max_seqs", "serve.max_context", "api.port"};
  CHECK(nearest("serve.max_seq", names) == "serve.max_seqs");
  CHECK(nearest("api.prot", names) == "api.port");
  CHECK(nearest("a", std::vector<std::string>{"b", "c"}) == "b");
  CHECK_FALSE(nearest("something.else.entirely", names));
  CHECK_FALSE(nearest(std::string(100000, 'x'), names));
  CHECK_FALSE(nearest("x", {}));
}

TEST_CASE("strings: UTF-8 is well formed or not") {
  for (const char* good : {"", "abc", "\u00e9", "\u20ac", "\U0001f600", "\U0010ffff"}) CHECK(valid_utf8(good));
  for (const char* bad : {"\x80", "\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                          "\xf8\x88\x80\x80\x80", "a\xff", "\xe2\x82"}) {
    CHECK_FALSE(valid_utf8(bad));
  }
}

TEST_CASE("strings: constant-time equality") {
  CHECK(equal_constant_time("secret", "secret"));
  CHECK_FALSE(equal_constant_time("secret", "secreT"));
  CHECK_FALSE(equal_constant_time("Xecret", "secret"));
  CHECK_FALSE(equal_constant_time("secret", "secret1"));
  CHECK(equal_constant_time("", ""));
}

TEST_CASE("digest: published values") {
  CHECK(sha256_hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  Sha256 sha;
  sha.update("a");
  sha.update("bc");
  CHECK(sha.hex() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(xxh64({}) == 0x2D06800538D394C2u);
  CHECK(random_hex(16).size() == 32);
  CHECK(random_hex(16) != random_hex(16));
  CHECK(random_hex(0).empty());
}

TEST_CASE("bytes: what was written is read, nothing is read past the end") {
  ByteWriter writer;
  writer.put(uint8_t{7});
  writer.put(std::string("text"));
  writer.put(std::vector<int32_t>{1, -2});
  const auto bytes = writer.take();
  ByteReader reader(bytes);
  CHECK(reader.get<uint8_t>() == 7);
  CHECK(reader.get_string() == "text");
  CHECK(reader.get_vector<int32_t>() == std::vector<int32_t>{1, -2});
  reader.finish();
  for (size_t n = 0; n < bytes.size(); ++n) {
    ByteReader cut(std::span<const std::byte>(bytes).first(n));
    CHECK_THROWS_AS((cut.get<uint8_t>(), cut.get_string(), cut.get_vector<int32_t>()), Error);
  }
  const std::array<std::byte, 4> huge = {std::byte{255}, std::byte{255}, std::byte{255}, std::byte{255}};
  CHECK_THROWS_AS(ByteReader(huge).get_vector<int64_t>(), Error);
  CHECK_THROWS_AS(ByteReader(huge).finish(), Error);
}

TEST_CASE("version") {
  CHECK(version().find(" (") != std::string_view::npos);
}
