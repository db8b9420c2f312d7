// Small pieces of the agent: who may ask, fencing, settings, commands, reports, canary, warnings.
#include <doctest/doctest.h>
#include <nlohmann/json.hpp>
#include <sys/stat.h>

#include "agent/api/auth.h"
#include "agent/api/canary.h"
#include "agent/api/fence.h"
#include "agent/api/local_node.h"
#include "agent/api/report.h"
#include "agent/api/settings.h"
#include "agent/api/status.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

using namespace glm53;
using namespace glm53::agent;
using Json = nlohmann::ordered_json;

namespace {

HttpRequest over_tcp(const std::string& authorization) {
  HttpRequest request;
  request.peer = "127.0.0.1:5000";
  if (!authorization.empty()) request.headers.emplace_back("authorization", authorization);
  return request;
}
HttpRequest over_unix(uid_t uid) {
  HttpRequest request;
  request.credentials = PeerCredentials{1, uid, 0};
  return request;
}

Config head_config(const test::TempDir& dir, const std::string& more = "") {
  return Config::parse(cat("[node]\nrole = \"head\"\n[paths]\nstate = \"", dir / "state", "\"\nrun = \"", dir / "run",
                           "\"\nlogs = \"", dir / "logs", "\"\n[topology]\nranks = [\"head:0\"]\n", more),
                       "test.toml");
}

}  // namespace

TEST_CASE("authenticate") {
  const std::string token = "0123456789abcdef";
  CHECK_NOTHROW(authenticate(over_unix(0), 1000, token, nullptr));
  CHECK_NOTHROW(authenticate(over_unix(1000), 1000, token, nullptr));
  CHECK_THROWS_AS(authenticate(over_unix(1001), 1000, token, nullptr), Error);
  CHECK_NOTHROW(authenticate(over_tcp("Bearer " + token), 1000, token, nullptr));
  for (const char* wrong : {"", "Bearer", "Bearer ", "Bearer 0123456789abcdeF", "Bearer 0123456789abcde",
                            "Basic 0123456789abcdef", "0123456789abcdef", "Bearer 0123456789abcdef0"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(authenticate(over_tcp(wrong), 1000, token, nullptr), Error);
    try {
      authenticate(over_tcp(wrong), 1000, token, nullptr);
    } catch (const Error& e) {
      CHECK(log::redact(e.what()) == e.what());  // the reason itself must not look like a secret
    }
  }
  CHECK_THROWS_AS(authenticate(over_tcp("Bearer "), 1000, "", nullptr), Error);
  HttpRequest page = over_tcp("Bearer " + token);
  page.headers.emplace_back("Origin", "http://evil.example");
  CHECK_THROWS_AS(authenticate(page, 1000, token, nullptr), Error);
}

TEST_CASE("without TLS only loopback addresses, only with a token") {
  CHECK(is_loopback("127.0.0.1"));
  CHECK(is_loopback("127.8.9.1"));
  CHECK(is_loopback("::1"));
  for (const char* other : {"0.0.0.0", "10.0.0.1", "::", "localhost", "128.0.0.1", ""}) CHECK_FALSE(is_loopback(other));

  const test::TempDir dir;
  write_file(dir / "token", "secret-token-of-the-test\n", 0600);
  const std::string token = cat("token_file = \"", dir / "token", "\"\n");
  CHECK_NOTHROW(agent_settings(head_config(dir)));
  CHECK_NOTHROW(agent_settings(head_config(dir, "[admin]\nlisten = \"127.0.0.1:1\"\n" + token)));
  CHECK_THROWS_WITH_AS(agent_settings(head_config(dir, "[admin]\ntls = \"off\"\nlisten = \"0.0.0.0:1\"\n" + token)),
                       doctest::Contains("loopback"), Error);
  // Other addresses are answered over TLS, where certificates take the place of the token.
  CHECK(agent_settings(head_config(dir, "[admin]\nlisten = \"0.0.0.0:1\"\n")).admin_tls);
  CHECK(agent_settings(head_config(dir, "[admin]\ntls = \"on\"\nlisten = \"127.0.0.1:1\"\n")).admin_tls);
  CHECK_FALSE(agent_settings(head_config(dir, "[admin]\nlisten = \"127.0.0.1:1\"\n" + token)).admin_tls);
  CHECK_THROWS_WITH_AS(agent_settings(head_config(dir, "[admin]\nlisten = \"127.0.0.1:1\"\n")),
                       doctest::Contains("token_file"), Error);
  REQUIRE(::chmod((dir / "token").c_str(), 0644) == 0);
  CHECK_THROWS_AS(agent_settings(head_config(dir, "[admin]\nlisten = \"127.0.0.1:1\"\n" + token)), Error);
}

TEST_CASE("the effective configuration") {
  const test::TempDir dir;
  const Config file = head_config(dir, "[model]\npath = \"models/tiny\"\n");
  const Effective plain = make_effective(file, {});
  CHECK(plain.config.text("model.path").front() == '/');
  CHECK(restore_effective(plain.json).hash == plain.hash);
  const Effective other = make_effective(file, {{"serve.max_seqs", "3"}});
  CHECK(other.config.integer("serve.max_seqs") == 3);
  CHECK(other.hash != plain.hash);
  CHECK_THROWS_WITH_AS(make_effective(file, {{"engine.path", "/bin/sh"}}), doctest::Contains("one machine"), Error);
  CHECK_THROWS_AS(make_effective(file, {{"serve.max_seq", "3"}}), Error);
  CHECK_THROWS_WITH_AS(make_effective(file, {{"api.cors_origins", "https://a.example"}}), doctest::Contains("CORS"),
                       Error);
  CHECK_THROWS_WITH_AS(make_effective(file, {{"topology.ranks", "head:0,worker:0"}}), doctest::Contains("worker.admin"),
                       Error);
  CHECK_THROWS_AS(make_effective(file, {{"topology.ranks", "worker:0,head:0"}}), Error);
  CHECK_THROWS_AS(make_effective(file, {{"topology.ranks", "head:0,moon:0"}}), Error);
}

TEST_CASE("commands for a worker leave this machine over TLS or through a tunnel only") {
  const test::TempDir dir;
  write_file(dir / "token", "a-token-of-the-tests\n", 0600);
  for (const char* admin : {"10.0.0.2:8890", "192.168.1.5:1", "[2001:db8::1]:8890", "worker:8890"}) {
    const Config file =
        head_config(dir, cat("[admin]\ntls = \"off\"\n[worker]\nadmin = \"", std::string_view(admin), "\"\n"));
    CHECK_THROWS_WITH_AS(worker_address(file, agent_settings(file)), doctest::Contains("no loopback address"), Error);
    const Config tls = head_config(dir, cat("[worker]\nadmin = \"", std::string_view(admin), "\"\n"));
    const auto address = worker_address(tls, agent_settings(tls));
    CHECK(address->endpoint == cat("https://", std::string_view(admin)));
    CHECK(address->token.empty());
  }
  const Config file =
      head_config(dir, "[worker]\nadmin = \"127.0.0.1:8891\"\ntoken_file = \"" + (dir / "token") + "\"\n");
  CHECK(worker_address(file, agent_settings(file))->endpoint == "http://127.0.0.1:8891");
}

TEST_CASE("documents for children") {
  const test::TempDir dir;
  const Config file = head_config(dir, "[engine]\nthreads = 3\n[model]\npath = \"/m\"\n");
  const AgentSettings settings = agent_settings(file);
  const Effective e = make_effective(file, {});
  const RankConfig r = localize(rank_config(e, 0, 7), settings);
  CHECK(r.generation == 7);
  CHECK(r.size == 1);
  CHECK(r.config_hash == e.hash);
  CHECK(r.admin_socket == settings.run_dir + "/rank0.sock");
  CHECK(r.api_socket == api_config(e, settings).rank_socket);
  CHECK(Config::from_json(parse_json(r.config_json), "t").integer("engine.threads") == 3);
  CHECK(parse_rank_config(glm53::to_json(r)).config_hash == e.hash);
}

TEST_CASE("children get a small environment") {
  ::setenv("GLM53_TEST_SECRET", "x", 1);
  ::setenv("NCCL_TEST", "1", 1);
  CHECK_FALSE(child_environment(true).contains("GLM53_TEST_SECRET"));
  CHECK(child_environment(true).contains("NCCL_TEST"));
  CHECK_FALSE(child_environment(false).contains("NCCL_TEST"));
  CHECK(child_environment(false).contains("PATH"));
}

TEST_CASE("epochs only grow") {
  const test::TempDir dir;
  {
    const auto db = state::Database::open(dir.path());
    Fence fence(*db);
    fence.admit(5);
    fence.admit(5);
    CHECK_THROWS_AS(fence.admit(4), Error);
    CHECK(fence.contact(5));
    CHECK_FALSE(fence.contact(4));
    CHECK_FALSE(fence.contact(0));
    fence.admit(9);
  }
  const auto db = state::Database::open(dir.path());
  Fence again(*db);
  CHECK(again.newest() == 9);
  CHECK_THROWS_WITH_AS(again.admit(8), doctest::Contains("older"), Error);
}

TEST_CASE("commands for a node") {
  NodeCommand c;
  c.epoch = 4;
  c.kind = reconcile::ActionKind::stop_rank;
  c.rank = 1;
  c.generation = 6;
  c.grace = std::chrono::milliseconds(50);
  const NodeCommand back = parse_command(agent::to_json(c));
  CHECK(back.epoch == 4);
  CHECK(back.kind == c.kind);
  CHECK(back.rank == 1);
  CHECK(back.generation == 6);
  CHECK(back.grace == c.grace);
  for (const char* wrong :
       {"", "[]", "{}", R"({"kind":"format_disk"})", R"({"kind":"warm_up"})", R"({"kind":"stop_rank","rank":"one"})",
        R"({"kind":"stop_rank","rank":99999})", R"({"kind":"start_rank","rank":1})",
        R"({"kind":"download","config":{"models":[]}})", R"({"kind":"download","request":"1"})",
        R"({"kind":"download","request":7,"config":{"models":[]}})", R"({"kind":"start_rank","rank":1,"config":7})",
        R"({"kind":"stop_rank","grace_ms":-1})"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(parse_command(wrong), Error);
  }
}

TEST_CASE("models by repository: what is named, and what a command may name") {
  Config cluster;
  CHECK(hub_models(cluster).empty());
  const std::string commit(40, 'a');
  cluster.set("model.repo", "org/name", "test");
  CHECK_THROWS_WITH_AS(hub_models(cluster), doctest::Contains("is no commit"), Error);
  cluster.set("model.revision", "main", "test");
  CHECK_THROWS_AS(hub_models(cluster), Error);
  cluster.set("model.revision", commit, "test");
  cluster.set("draft.repo", "org/draft", "test");
  cluster.set("draft.revision", commit, "test");
  const auto models = hub_models(cluster);
  CHECK(models == std::vector<HubModel>{{"model", "org/name", commit}, {"draft", "org/draft", commit}});
  CHECK(parse_hub_models(agent::to_json(models)) == models);
  const Config local = with_local_models(cluster, "/cache/hub");
  CHECK(local.text("model.path") == cat("/cache/hub/models--org--name/snapshots/", commit));
  CHECK(local.text("draft.path") == cat("/cache/hub/models--org--draft/snapshots/", commit));
  cluster.set("model.path", "/model", "test");
  CHECK(hub_models(cluster).size() == 1);  // a path wins
  CHECK(with_local_models(cluster, "/cache/hub").text("model.path") == "/model");
  const auto body = [&](const std::string& key, const std::string& repo, const std::string& hash) {
    return dump({{"models", {{{"key", key}, {"repo", repo}, {"commit", hash}}}}});
  };
  CHECK(parse_hub_models(body("model", "org/name", commit)).size() == 1);
  for (const std::string& wrong :
       {std::string("[]"), std::string("{"), std::string(R"({"models":7})"), std::string(R"({"models":[]})"),
        std::string(R"({"models":[7]})"), body("api", "org/name", commit), body("model", "../..", commit),
        body("model", "org/name", "main"), body("model", "/etc", commit), body("model", "org/name", "../../x")}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS(parse_hub_models(wrong), Error);
  }
}

TEST_CASE("a node's report survives the way, and a strange one is taken as it is") {
  NodeReport r;
  r.name = "spark2";
  r.role = "worker";
  r.memory_total = 5;
  ProcessReport p;
  p.name = "rank1";
  p.generation = 3;
  p.pid = 9;
  p.phase = Phase::load_target;
  p.progress = {4, 8};
  p.silent_ms = 100;
  ProcessReport q = p;
  q.name = "rank2";
  q.ended = true;
  q.exit_signal = 9;
  q.ended_ms_ago = 50;
  r.processes = {p, q};
  r.fetch = {"17", reconcile::Weights::failed, "org/name", 5, 9, 2, 3, "unavailable", "E640 hub: full", "make room"};
  const NodeReport back = parse_report(dump(agent::to_json(r)));
  REQUIRE(back.processes.size() == 2);
  CHECK(back.processes[0].progress == p.progress);
  CHECK(back.processes[0].phase == Phase::load_target);
  CHECK_FALSE(back.processes[0].ended);
  CHECK(back.processes[1].exit_signal == 9);
  CHECK_FALSE(back.processes[1].exit_code);
  const auto observed = to_observed(back, reconcile::Time(std::chrono::milliseconds(1000)), true, "");
  CHECK(back.fetch.request == "17");
  CHECK(back.fetch.bytes_total == 9);
  CHECK(back.fetch.remedy == "make room");
  const auto weights = [&](const std::string& request) { return to_observed(back, {}, true, request).weights; };
  CHECK(weights("17") == reconcile::Weights::failed);
  CHECK(weights("18") == reconcile::Weights::none);  // of another wish
  CHECK(to_observed(back, {}, true, "17").weights_text == "E640 hub: full");
  CHECK(observed.weights == reconcile::Weights::none);
  NodeReport busy = back;
  busy.fetch.state = reconcile::Weights::fetching;
  CHECK(to_observed(busy, {}, true, "").weights == reconcile::Weights::fetching);  // a leftover
  CHECK(to_observed(busy, {}, true, "18").weights == reconcile::Weights::none);
  CHECK(to_observed(busy, {}, true, "17").weights_text == "org/name: 55 % of 9 B, 2 B/s");
  CHECK(observed.processes[0].rank == 1);
  CHECK(observed.processes[0].last_heard == reconcile::Time(std::chrono::milliseconds(900)));
  CHECK(observed.processes[1].end->signal == 9);
  CHECK(parse_report(R"({"processes":[{"name":7,"pid":"x"},3],"agent":[]})").processes.size() == 1);
  CHECK_THROWS_AS(parse_report("[]"), Error);
  CHECK_THROWS_AS(parse_report("{"), Error);
  CHECK(rank_of("rank12") == 12);
  CHECK(rank_of("api") == -1);
  CHECK(rank_of("rankle") == -1);
}

TEST_CASE("the canary's verdict") {
  CHECK(judge_canary(R"({"ok":true,"text":"one two","tokens":8})").empty());
  CHECK(judge_canary(R"({"ok":true,"text":"","tokens":8})").empty());
  CHECK(judge_canary(R"({"ok":true,"text":"!!!!!!!!","tokens":8})").find("degenerate") != std::string::npos);
  CHECK(judge_canary(R"({"ok":true,"text":"","tokens":0})").find("no token") != std::string::npos);
  CHECK(judge_canary(R"({"ok":false,"error":"no rank"})") == "no rank");
  CHECK(judge_canary(R"({"ok":"yes","error":{"code":"busy","message":"no rank is there"}})") == "no rank is there");
  for (const char* odd : {R"({"ok":1})", R"({"ok":false,"error":[1]})", R"({"error":{"message":7}})", "[]", "7"}) {
    CAPTURE(odd);
    const std::string said = judge_canary(odd);
    CHECK_FALSE(said.empty());
    CHECK(said.find_first_of("{}[]\"") == std::string::npos);
  }
  CHECK_FALSE(judge_canary("nonsense").empty());
  CHECK_FALSE(judge_canary("{}").empty());
}

TEST_CASE("warnings name their remedy") {
  DriverView view;
  ConfigFile::Drift drift;
  CHECK(warnings_of(view, drift, "").empty());
  view.cluster = {reconcile::ClusterState::failed, "crash loop"};
  view.worker = WorkerView{};
  drift.lines = {"serve.max_seqs: …"};
  view.head.memory_total = 100;
  view.head.memory_available = 1;
  const auto warnings = warnings_of(view, drift, "/x/state.db.corrupt-1");
  CHECK(warnings.size() == 5);
  for (const auto& w : warnings) CHECK_FALSE(w.remedy.empty());
  DriverView full;
  full.stuck = "database or disk is full";
  const auto stuck = warnings_of(full, {}, "");
  REQUIRE(stuck.size() == 1);
  CHECK(stuck[0].severity == "error");
  CHECK(stuck[0].text.find("database or disk is full") != std::string::npos);
}
