#include <future>
#include <numeric>

#include <doctest/doctest.h>
#include <sys/socket.h>

#include "common/error.h"
#include "group.h"

using namespace glm53;
using namespace glm53::test;

namespace {

struct Pair {
  std::unique_ptr<ControlLink> rank0, rank1;
};

Pair connected_pair() {
  const uint16_t port = free_port();
  auto other = std::async(std::launch::async, [&] { return join_rank0(kLoopback, port, hello_of(1, 2), kWait); });
  auto links = accept_ranks(kLoopback, port, hello_of(0, 2), kWait);
  return {std::move(links.at(0)), other.get()};
}

std::vector<std::byte> frame_of(size_t n) {
  std::vector<std::byte> frame(n);
  for (size_t i = 0; i < n; ++i) frame[i] = static_cast<std::byte>(i * 31 + n);
  return frame;
}

template <class F>
Error error_of(F&& body) {
  try {
    body();
  } catch (const Error& e) {
    return e;
  }
  return Error(Code::ok, "nothing was thrown");
}

/// Both sides' errors when rank 1 says `theirs`.
std::pair<Error, Error> refusal(const Hello& theirs) {
  const uint16_t port = free_port();
  auto other =
      std::async(std::launch::async, [&] { return error_of([&] { join_rank0(kLoopback, port, theirs, kWait); }); });
  Error mine = error_of([&] { accept_ranks(kLoopback, port, hello_of(0, 2), kWait); });
  return {mine, other.get()};
}

}  // namespace

TEST_CASE("control links carry frames of any size in both directions") {
  Pair p = connected_pair();
  for (const size_t n : {size_t{0}, size_t{1}, size_t{1000}, size_t{65536}, size_t{3000000}}) {
    auto sent = std::async(std::launch::async, [&] { p.rank1->send(frame_of(n)); });
    CHECK(p.rank0->receive() == frame_of(n));
    sent.get();
    p.rank0->send(frame_of(n / 2));
    CHECK(p.rank1->receive() == frame_of(n / 2));
  }
}

TEST_CASE("links come in rank order, whatever the order of arrival") {
  const uint16_t port = free_port();
  auto late = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return join_rank0(kLoopback, port, hello_of(1, 3), kWait);
  });
  auto early = std::async(std::launch::async, [&] { return join_rank0(kLoopback, port, hello_of(2, 3), kWait); });
  auto links = accept_ranks(kLoopback, port, hello_of(0, 3), kWait);
  REQUIRE(links.size() == 2);
  early.get()->send(frame_of(22));
  late.get()->send(frame_of(11));
  CHECK(links[0]->receive() == frame_of(11));
  CHECK(links[1]->receive() == frame_of(22));
}

TEST_CASE("a hello that differs is refused on both sides, naming the field") {
  struct Case {
    const char* field;
    Code code;
    std::function<void(Hello&)> change;
  };
  const Case cases[] = {
      {"protocol", Code::fabric, [](Hello& h) { h.protocol = 99; }},
      {"generation", Code::config, [](Hello& h) { h.generation = 6; }},
      {"size", Code::fabric, [](Hello& h) { h.size = 3; }},
      {"rank 5", Code::fabric, [](Hello& h) { h.rank = 5; }},
      {"config_hash", Code::config, [](Hello& h) { h.config_hash = "other"; }},
      {"model_digest", Code::fabric, [](Hello& h) { h.model_digest = "other"; }},
      {"build", Code::fabric, [](Hello& h) { h.build = "other"; }},
  };
  for (const Case& c : cases) {
    CAPTURE(c.field);
    Hello theirs = hello_of(1, 2);
    c.change(theirs);
    const auto [mine, other] = refusal(theirs);
    CHECK(mine.code() == c.code);
    CHECK(other.code() == c.code);
    CHECK(std::string(mine.what()).find(c.field) != std::string::npos);
    CHECK(std::string(other.what()).find(c.field) != std::string::npos);
  }
}

TEST_CASE("garbage, silent and half connections are waited past") {
  const uint16_t port = free_port();
  auto accepted = std::async(std::launch::async, [&] { return accept_ranks(kLoopback, port, hello_of(0, 2), kWait); });
  const auto connect = [&] {
    for (;;) try {
        return connect_tcp(kLoopback, port, std::chrono::steady_clock::now() + kWait);
      } catch (const Error&) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
  };
  const UniqueFd silent = connect(), http = connect(), huge = connect(), half = connect();
  { const UniqueFd gone = connect(); }
  const std::string request = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
  send_all(http.get(), std::as_bytes(std::span(request)));
  const std::string lying = std::string("GLM53CL1") + "\xff\xff\xff\x7f";
  send_all(huge.get(), std::as_bytes(std::span(lying)));
  send_all(half.get(), std::as_bytes(std::span(lying)).first(4));
  const auto link = join_rank0(kLoopback, port, hello_of(1, 2), kWait);
  const auto links = accepted.get();
  REQUIRE(links.size() == 1);
  link->send(frame_of(5));
  CHECK(links[0]->receive() == frame_of(5));
  std::byte b;
  CHECK(::recv(http.get(), &b, 1, 0) <= 0);
}

TEST_CASE("a rank that does not come is named, and one without rank 0 gives up") {
  const uint16_t port = free_port();
  auto one = std::async(std::launch::async, [&] {
    return error_of([&] { join_rank0(kLoopback, port, hello_of(1, 3), kWait)->receive(); });
  });
  const Error e = error_of([&] { accept_ranks(kLoopback, port, hello_of(0, 3), std::chrono::milliseconds(500)); });
  CHECK(e.code() == Code::fabric);
  CHECK(std::string(e.what()).find("rank 2") != std::string::npos);
  CHECK(std::string(e.what()).find("rank 1") == std::string::npos);
  CHECK(one.get().code() == Code::peer_lost);
  CHECK(error_of([&] { join_rank0(kLoopback, free_port(), hello_of(1, 2), std::chrono::milliseconds(200)); }).code() ==
        Code::fabric);
}

TEST_CASE("close wakes a blocked receive; the end of the other side is peer_lost") {
  Pair p = connected_pair();
  auto blocked = std::async(std::launch::async, [&] { return error_of([&] { p.rank0->receive(); }).code(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  p.rank0->close();
  CHECK(blocked.get() == Code::peer_lost);
  CHECK(error_of([&] { p.rank1->receive(); }).code() == Code::peer_lost);
  const Code sending = error_of([&] {
                         for (int i = 0; i < 100; ++i) p.rank1->send(frame_of(100000));
                       }).code();
  CHECK(sending == Code::peer_lost);
}
