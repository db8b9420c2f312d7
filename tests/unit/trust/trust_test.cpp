// Tokens, members and rights, with a clock of the test's.
#include "agent/trust/trust.h"

#include <chrono>
#include <memory>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include "agent/trust/renewal.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::trust;

namespace {

constexpr int64_t kDay = 86'400;

struct Head {
  test::TempDir dir;
  int64_t now = 1'800'000'000;
  Trust trust{dir / "tls", true, [this] { return now; }};
  Head() { trust.init("spark", "h"); }

  struct Joined {
    Credentials credentials;
    TlsPeer peer;
  };
  Joined join(const std::string& role, const std::string& name) {
    Joined j;
    j.credentials.key = pki::make_key();
    const Credentials made = trust.admit(trust.make_token(role, name, 60).secret, pki::make_request(j.credentials.key));
    j.credentials.certificate = made.certificate;
    j.credentials.ca = made.ca;
    j.peer = {true, pki::read_certificate(made.certificate), {}, {}};
    return j;
  }
  std::string line(const std::function<void()>& body) {
    try {
      body();
    } catch (const Error& e) {
      return e.what();
    }
    return "ok";
  }
  std::string may(const TlsPeer& peer, Right right) {
    return line([&] { trust.authorize(peer, right); });
  }
};

}  // namespace

TEST_CASE("init makes a CA once, and every secret file is its owner's alone") {
  Head h;
  CHECK(h.trust.cluster() == "spark");
  CHECK(h.trust.ca_fingerprint().size() == 64);
  CHECK(h.trust.own()->identity.text() == "head h");
  CHECK(h.line([&] { h.trust.init("spark", "h"); }) == "this cluster has its CA already");
  h.trust.make_token("node", "worker", 60);
  for (const char* name : {"ca.pem", "self.pem", "members.json"}) {
    struct stat info {};
    REQUIRE(::stat((h.dir / "tls" + "/" + name).c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
  }
  test::TempDir dir;
  Trust worker(dir / "tls", false);
  CHECK_THROWS_AS(worker.init("spark", "w"), Error);
  CHECK_FALSE(worker.own());
  CHECK(worker.server() == nullptr);
  CHECK_THROWS_WITH_AS(worker.client("head"), doctest::Contains("E720"), Error);
}

TEST_CASE("an init that was killed between its files is done again with the same CA") {
  Head h;
  const std::string before = h.trust.ca_fingerprint();
  REQUIRE(::unlink((h.dir / "tls/self.pem").c_str()) == 0);
  Trust again(h.dir / "tls", true);
  CHECK_FALSE(again.own());
  again.init("spark", "h");
  CHECK(again.ca_fingerprint() == before);
}

TEST_CASE("a token is good once, in its time, and only on the head that made it") {
  Head h;
  const std::string request = pki::make_request(pki::make_key());
  const JoinToken token = h.trust.make_token("node", "worker", 60);
  CHECK(token.ca_fingerprint == h.trust.ca_fingerprint());
  CHECK(JoinToken::parse(token.text()).secret == token.secret);
  CHECK(h.line([&] { h.trust.admit(token.secret, "nonsense"); }).starts_with("this is no request"));
  CHECK(h.line([&] { h.trust.admit(token.secret, request); }) == "ok");
  CHECK(h.line([&] { h.trust.admit(token.secret, request); }) == "E715 this join token was used already");
  const JoinToken late = h.trust.make_token("node", "worker", 60);
  h.now += 61;
  CHECK(h.line([&] { h.trust.admit(late.secret, request); }) == cat("E716 this join token expired at ",
                                                                    pki::time_text(h.now - 1),
                                                                    "; the head's clock says ", pki::time_text(h.now)));
  CHECK(h.line([&] { h.trust.admit(std::string(32, '0'), request); }) ==
        "E717 this join token is not one of this head's");
  // What was used stays used after a restart of the agent.
  Trust again(h.dir / "tls", true, [&] { return h.now; });
  CHECK_THROWS_WITH_AS(again.admit(token.secret, request), doctest::Contains("E715"), Error);
  CHECK(read_file(h.dir / "tls/members.json").find(token.secret) == std::string::npos);
}

TEST_CASE("malformed tokens, roles, names and times are refused") {
  Head h;
  for (const char* bad : {"", "glm53", "glm53-00-00", "glm53-zz-11", "x"}) {
    CHECK_THROWS_WITH_AS(JoinToken::parse(bad), doctest::Contains("E717"), Error);
  }
  CHECK_THROWS_AS(h.trust.make_token("head", "x", 60), Error);
  CHECK_THROWS_AS(h.trust.make_token("node", "a/b", 60), Error);
  CHECK_THROWS_AS(h.trust.make_token("node", "worker", 0), Error);
  CHECK_THROWS_AS(h.trust.make_token("node", "worker", 8 * kDay), Error);
}

TEST_CASE("roles: a reader looks, an operator acts, a node commands nobody") {
  Head h;
  const auto alice = h.join("operator", "alice"), grafana = h.join("reader", "grafana"), worker = h.join("node", "w");
  CHECK(h.may(alice.peer, Right::read) == "ok");
  CHECK(h.may(alice.peer, Right::operate) == "ok");
  CHECK(h.may(alice.peer, Right::command) == "E719 operator alice may not do that");
  CHECK(h.may(grafana.peer, Right::read) == "ok");
  CHECK(h.may(grafana.peer, Right::operate) == "E719 reader grafana may not do that");
  CHECK(h.may(worker.peer, Right::read) == "E719 node w may not do that");
  CHECK(h.may(TlsPeer{}, Right::read) == "E710 this address asks for a certificate of the cluster");
  CHECK(h.may(TlsPeer{true, alice.peer.certificate, "E711 late", ""}, Right::read) == "E711 late");
}

TEST_CASE("an unknown, a removed and a replaced node are refused by name") {
  Head h, other;
  const auto alice = h.join("operator", "alice"), stranger = other.join("operator", "mallory");
  CHECK(h.may(stranger.peer, Right::read) ==
        "E714 operator mallory is not a member of this cluster, or joined again since");
  const auto again = h.join("operator", "alice");
  CHECK(h.may(alice.peer, Right::read).starts_with("E714 operator alice is not a member"));
  CHECK(h.may(again.peer, Right::read) == "ok");
  h.trust.remove("alice");
  CHECK(h.may(again.peer, Right::read) == "E714 operator alice was removed from the cluster");
  CHECK_THROWS_AS(h.trust.remove("alice"), Error);
  CHECK_THROWS_AS(h.trust.remove("bob"), Error);
  REQUIRE(h.trust.members().size() == 1);
  CHECK(h.trust.members()[0].removed);
}

TEST_CASE("a worker obeys the head only") {
  Head h;
  test::TempDir dir;
  Trust worker(dir / "tls", false, [&] { return h.now; });
  const auto joined = h.join("node", "w");
  worker.adopt(joined.credentials);
  CHECK(worker.own()->identity.text() == "node w");
  CHECK(worker.ca_fingerprint() == h.trust.ca_fingerprint());
  CHECK(worker.server() != nullptr);
  const TlsPeer head{true, *h.trust.own(), {}, {}};
  CHECK_NOTHROW(worker.authorize(head, Right::command));
  CHECK_THROWS_WITH_AS(worker.authorize(h.join("operator", "alice").peer, Right::read),
                       "E719 a worker answers the head only, not operator alice", Error);
  CHECK_THROWS_WITH_AS(worker.authorize(joined.peer, Right::command), "E719 a worker answers the head only, not node w",
                       Error);
  CHECK_THROWS_AS(worker.adopt(h.join("operator", "bob").credentials), Error);
}

TEST_CASE("damaged files are named, and nothing is made up in their place") {
  Head h;
  h.join("node", "w");
  write_file(h.dir / "tls/members.json", "{\"members\":[{}],\"tokens\":[]}", 0600);
  CHECK_THROWS_WITH_AS(Trust(h.dir / "tls", true), doctest::Contains("members.json' is damaged"), Error);
  Head g;
  write_file(g.dir / "tls/self.pem", "nonsense", 0600);
  CHECK_THROWS_WITH_AS(Trust(g.dir / "tls", true), doctest::Contains("self.pem"), Error);
  REQUIRE(::chmod((h.dir / "tls/self.pem").c_str(), 0644) == 0);
  REQUIRE(::unlink((h.dir / "tls/members.json").c_str()) == 0);
  CHECK_THROWS_WITH_AS(Trust(h.dir / "tls", true), doctest::Contains("can be read by other users"), Error);
}

TEST_CASE("renewal: a node's certificate is renewed before it ends, whatever is lost on the way") {
  Head h;
  test::TempDir dir;
  Trust worker(dir / "tls", false, [&] { return h.now; });
  worker.adopt(h.join("node", "w").credentials);
  const auto fingerprint = [&] { return worker.own()->fingerprint; };
  const std::string first = fingerprint();
  Renewal renewal(std::shared_ptr<Trust>(&h.trust, [](Trust*) {}), std::chrono::milliseconds(0));
  int asked = 0, lost_before = 0, lost_after = 0;  // numbers of the messages that are lost
  const auto tend = [&] {
    return renewal.tend([&](const std::string& body) -> Renewal::Answer {
      if (++asked == lost_before) throw Error(Code::peer_lost, "the cable");
      Renewal::Answer answer{200, renewal_answer(worker, body)};
      if (asked == lost_after) throw Error(Code::peer_lost, "the cable");
      return answer;
    });
  };
  /// Whether the head knows who shows that certificate.
  const auto known = [&](const Credentials& credentials) {
    const TlsPeer peer{true, pki::read_certificate(credentials.certificate), {}, {}};
    return h.may(peer, Right::read) == "E719 node w may not do that";
  };
  const Credentials before = load_credentials(dir / "tls/self.pem");
  CHECK_FALSE(tend());
  h.now += 790 * kDay;  // of 825
  CHECK_FALSE(tend());
  CHECK(asked == 0);

  h.now += 10 * kDay;
  lost_before = 2;  // the certificate does not arrive
  CHECK_THROWS_AS(tend(), Error);
  CHECK(fingerprint() == first);
  CHECK(known(before));
  lost_after = asked + 2;  // it arrives, and nobody hears of it; the head's agent starts again
  CHECK_THROWS_AS(tend(), Error);
  const std::string second = fingerprint();
  CHECK(second != first);
  CHECK(known(before));
  CHECK(known(load_credentials(dir / "tls/self.pem")));
  CHECK(Trust(h.dir / "tls", true, [&] { return h.now; }).due() == std::vector<std::string>{"w"});
  CHECK_FALSE(tend());
  CHECK(fingerprint() == second);
  CHECK_FALSE(known(before));
  CHECK(known(load_credentials(dir / "tls/self.pem")));
  CHECK(h.trust.due().empty());

  h.now += 30 * kDay;  // the first one would have ended
  CHECK(worker.own()->validity.until > h.now + 790 * kDay);
  CHECK(pki::belongs(load_credentials(dir / "tls/self.pem").key, load_credentials(dir / "tls/self.pem").certificate));
  h.now += 780 * kDay;
  CHECK(tend());
  CHECK(fingerprint() != second);

  // What nobody asked for, or for somebody else, is refused; who was removed gets none.
  CHECK_THROWS_AS(worker.adopt_next(before.certificate), Error);
  CHECK_THROWS_AS(renewal_answer(worker, R"({"certificate":5})"), Error);
  CHECK_THROWS_AS(h.trust.renew("w", first, worker.next_request()), Error);
  CHECK_THROWS_AS(h.trust.next_request(), Error);
  h.now += 800 * kDay;
  h.trust.remove("w");
  CHECK(h.trust.due().empty());
  CHECK_THROWS_AS(h.trust.renew("w", fingerprint(), worker.next_request()), Error);
}
