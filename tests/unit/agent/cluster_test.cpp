// Head and worker in this process, with real children: starts, deaths in every phase, restarts of the agents
// themselves, stop.
#include "tests/unit/agent/cluster.h"

#include <fstream>
#include <signal.h>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "agent/api/agent.h"
#include "agent/hub/downloader.h"
#include "common/error.h"
#include "common/http_client.h"
#include "common/json.h"
#include "common/socket.h"
#include "common/strings.h"
#include "tests/temp_dir.h"
#include "tests/unit/hub/fake_hub.h"

using namespace glm53;
using namespace glm53::agent;
using namespace std::chrono_literals;
using test::eventually;
using test::FakeHub;
using test::kRunning;
using test::one_tensor;
using test::TestCluster;
using Json = nlohmann::ordered_json;

TEST_CASE("start, status, stop") {
  TestCluster c;
  CHECK(c.state() == "down");
  const Json answer = c.put(kRunning, 202);
  const auto id = answer["operation"].get<std::string>();
  REQUIRE(c.reaches("up"));
  CHECK(eventually([&] { return c.get("/operations/" + id)["state"] == "done"; }));
  const Json operation = c.get("/operations/" + id);
  std::string actions;
  for (const Json& a : operation["actions"])
    actions += cat(a["node"].get<std::string>(), ":", a["action"].get<std::string>(), " ");
  CHECK(actions == "head:preflight head:start_api worker:start_rank head:start_rank head:warm_up head:open_gate ");
  const Json status = c.get("/status");
  CHECK(status["api"]["ready"] == true);
  CHECK(status["nodes"].size() == 2);
  CHECK(status["nodes"][1]["reachable"] == true);
  CHECK(status["warnings"].empty());
  CHECK(status["config"]["drift"].empty());
  CHECK(status["config"]["hash_running"] == status["config"]["hash_file"]);
  CHECK(c.put(kRunning, 200)["unchanged"] == true);
  CHECK(read_file(c.dir() / "model/asked.api").starts_with("canary\ngate_open\n"));

  CHECK(c.put({{"state", "stopped"}}, 202)["attached"] == false);
  REQUIRE(c.reaches("down"));
  CHECK(c.put({{"state", "stopped"}}, 200)["unchanged"] == true);
  for (const char* left : {"head/run/rank0.sock", "head/run/api.sock", "worker/run/rank1.sock"}) {
    CHECK_FALSE(std::filesystem::exists(c.dir() / left));
  }
  CHECK(std::filesystem::is_empty(c.dir() / "head/run/notify"));
  c.end_head();
  c.end_worker();
  CHECK(std::filesystem::is_empty(c.dir() / "head/run"));
  CHECK(std::filesystem::is_empty(c.dir() / "worker/run"));
  c.start_worker();
}

TEST_CASE("a start fetches the model that is named by repository on every node, and a restart the next one") {
  FakeHub hub;
  for (const char* repo : {"org/model", "org/other"}) {
    hub.add(repo, "config.json", "{}", false);
    hub.add(repo, "tokenizer.json", "{}", false);
    hub.add(repo, "model.safetensors", one_tensor(300'000, repo), true);
  }
  const std::string keys =
      cat("[hub]\nendpoint = \"", hub.endpoint(), "\"\ndisk_reserve = 0\ngive_up_after = \"500ms\"\n");
  const auto model = [](const std::string& repo) {
    return cat("repo = \"", repo, "\"\nrevision = \"", FakeHub::commit(), "\"");
  };
  // The nodes' models are folders of their own; the children meet in another one.
  TestCluster c(true, cat("[draft]\npath = \"model\"\n", keys), keys);
  const auto use = [&](const std::string& from, const std::string& to) {
    std::string toml = read_file(c.dir() / "head.toml");
    toml.replace(toml.find(from), from.size(), to);
    write_file(c.dir() / "head.toml", toml);
  };
  const auto has = [&](const char* node, const std::string& repo) {
    return std::filesystem::exists(c.dir() / cat(node, "/state/huggingface/hub/models--org--", repo, "/snapshots/",
                                                 FakeHub::commit(), "/model.safetensors"));
  };
  use("path = \"model\"", "repo = \"org/model\"\nrevision = \"main\"");
  CHECK(c.put(kRunning)["error"]["message"].get<std::string>().find("is no commit") != std::string::npos);
  use("repo = \"org/model\"\nrevision = \"main\"", model("org/gone"));
  const auto failed = c.put(kRunning, 202)["operation"].get<std::string>();
  REQUIRE(eventually([&] { return c.get("/operations/" + failed)["state"] == "failed"; }));
  CHECK(c.get("/operations/" + failed)["error"]["message"].get<std::string>().find("E620") != std::string::npos);
  CHECK(c.state() == "failed");

  use("org/gone", "org/model");
  const auto id = c.put(kRunning, 202)["operation"].get<std::string>();
  REQUIRE(c.reaches("up"));
  std::string actions;
  const Json record = c.get("/operations/" + id);
  for (const Json& a : record["actions"]) {
    if (a["action"] == "download") actions += cat(a["node"].get<std::string>(), " ");
  }
  CHECK(actions == "head worker ");
  CHECK(hub.body_bytes < 400'000);  // fetched once: the worker has a copy of the head's
  CHECK(has("head", "model"));
  CHECK(has("worker", "model"));
  CHECK(c.get("/status")["model"]["name"] == "model");
  CHECK(c.get("/status")["nodes"][1]["download"]["state"] == "present");

  // A restart that cannot have its model leaves what serves alone.
  const pid_t rank0 = c.pid("rank0");
  use("org/model", "org/gone");
  const auto lost = c.put({{"state", "running"}, {"restart", true}}, 202)["operation"].get<std::string>();
  REQUIRE(eventually([&] { return c.get("/operations/" + lost)["state"] == "failed"; }));
  CHECK(c.state() == "up");
  CHECK(c.pid("rank0") == rank0);
  use("org/gone", "org/other");
  c.put({{"state", "running"}, {"restart", true}, {"drain_ms", 0}}, 202);
  REQUIRE(eventually([&] { return c.generation() == 2 && c.state() == "up"; }));
  CHECK(has("worker", "other"));
  // Complete and pinned: nothing is asked of the Hub.
  const int requests = hub.api_requests;
  c.put({{"state", "running"}, {"restart", true}, {"drain_ms", 0}}, 202);
  REQUIRE(eventually([&] { return c.generation() == 3 && c.state() == "up"; }));
  CHECK(hub.api_requests == requests);
}

TEST_CASE("sync copies a model to the worker, whatever is wanted") {
  FakeHub hub;
  hub.add("org/model", "config.json", "{}", false);
  hub.add("org/model", "tokenizer.json", "{}", false);
  hub.add("org/model", "model.safetensors", one_tensor(3'000'000, "x"), true);
  bool tls = false;
  SUBCASE("with a token, on loopback") {}
  SUBCASE("over TLS") {
    tls = true;
  }
  TestCluster c(true, "", "", tls ? "tls = \"on\"\n" : "");
  if (tls) {
    REQUIRE(c.ask("POST", "/cluster/init").status == 200);
    REQUIRE(c.enter(c.token("node", "worker")).status == 200);
  }
  REQUIRE(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  const std::string order = dump({{"repo", "org/model"}, {"revision", FakeHub::commit()}});
  const auto post = [&](const std::string& body, bool worker = false) { return c.ask("POST", "/sync", body, worker); };
  CHECK(post("{}").status == 400);  // nothing is named
  CHECK(post(R"({"repo":"org/model","revision":"main"})").status == 400);
  CHECK(post(R"({"repo":"../x","revision":"main"})").status == 400);
  CHECK(post(order, true).status == 400);
  CHECK(post(order).status == 404);  // the head lacks it
  hub::Settings settings;
  settings.cache = c.dir() / "head/state/huggingface/hub";
  settings.journal_dir = c.dir() / "head/state/hub";
  settings.endpoint = hub.endpoint();
  settings.disk_reserve = 0;
  hub::DownloadRequest request;
  request.repo = "org/model";
  hub::Downloader(settings).run(request);
  const auto copied = [&] {
    const auto id = parse_json(post(order).body)["operation"].get<std::string>();
    REQUIRE(eventually([&] { return c.get("/operations/" + id)["state"] != "running"; }));
    return c.get("/operations/" + id);
  };
  CHECK(copied()["state"] == "done");
  const std::string there =
      c.dir() / cat("worker/state/huggingface/hub/models--org--model/snapshots/", FakeHub::commit());
  CHECK(read_file(there + "/model.safetensors") == one_tensor(3'000'000, "x"));
  CHECK(copied()["state"] == "done");
  CHECK(c.state() == "down");
  // A worker without room says so.
  std::filesystem::remove_all(c.dir() / "worker/state/huggingface");
  c.end_worker();
  std::string toml = read_file(c.dir() / "worker.toml");
  write_file(c.dir() / "worker.toml", toml + "[hub]\ndisk_reserve = \"900TiB\"\n");
  c.start_worker();
  REQUIRE(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  const Json full = copied();
  CHECK(full["state"] == "failed");
  CHECK(full["error"]["message"].get<std::string>().find("E640") != std::string::npos);
  // What is no copy is refused.
  for (const char* body : {"", "[]", "{}", R"({"version":1,"repo":"../x"})"}) {
    CHECK(c.ask("POST", "/node/sync?epoch=90000000000", body, true).status == 400);
  }
  CHECK(c.ask("POST", "/node/sync?epoch=5", "{}", true).status == 409);
  CHECK(c.ask("POST", "/node/sync", "{}", true).status == 400);
  CHECK(c.ask("PUT", "/node/sync/data?session=x&blob=y&offset=0&xxh64=0", "abc", true).status == 404);
  CHECK(c.ask("PUT", "/node/sync/data?session=x", "abc", true).status == 404);
  CHECK(c.ask("PUT", "/node/sync/data", "abc", true).status == 400);
  CHECK(c.ask("POST", "/node/sync/commit", R"({"session":"x","digest":"y"})", true).status == 404);
  CHECK(c.ask("GET", "/node/sync", "").status == 400);
}

TEST_CASE("stop ends a download, and the next start goes on with it") {
  FakeHub hub;
  hub.add("org/model", "config.json", "{}", false);
  hub.add("org/model", "tokenizer.json", "{}", false);
  hub.add("org/model", "model.safetensors", one_tensor(3'000'000, "x"), true);
  hub.faults.bytes_per_s = 500'000;
  const std::string keys = cat("[hub]\nendpoint = \"", hub.endpoint(), "\"\ndisk_reserve = 0\n");
  TestCluster c(false, keys);
  std::string toml = read_file(c.dir() / "head.toml");
  toml.replace(toml.find("path = \"model\""), 14, cat("repo = \"org/model\"\nrevision = \"", FakeHub::commit(), "\""));
  write_file(c.dir() / "head.toml", toml);
  c.put(kRunning, 202);
  REQUIRE(eventually([&] {
    const Json download = c.get("/status")["nodes"][0]["download"];
    return download.is_object() && download["bytes_done"].get<int64_t>() > 200'000;
  }));
  CHECK(c.get("/status")["cluster"]["reason"].get<std::string>().find("org/model") != std::string::npos);
  c.put({{"state", "stopped"}, {"preempt", true}}, 202);
  REQUIRE(c.reaches("down"));
  hub.faults.bytes_per_s = 0;
  const int64_t before = hub.body_bytes;
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  CHECK(hub.body_bytes - before < 3'000'000);
}

TEST_CASE("a rank killed in any phase, on either node, costs one generation") {
  for (const char* name : {"rank0", "rank1"}) {
    for (const char* phase : {"exec", "init", "rendezvous", "load_target", "warmup", "ready"}) {
      CAPTURE(name);
      CAPTURE(phase);
      TestCluster c;
      c.request(cat("die.", name, ".", phase), "kill");
      c.put(kRunning, 202);
      REQUIRE(eventually([&] { return c.generation() == 2 && c.state() == "up"; }));
      CHECK(c.get("/status")["cluster"]["restarts"] == 1);
      const auto reason = c.get("/status")["cluster"]["reason"].get<std::string>();
      CHECK(reason.find(cat(name, " killed by signal 9")) != std::string::npos);
      CHECK_FALSE(std::filesystem::exists(c.dir() / cat("model/die.", name, ".", phase)));
      bool told = false;
      const Json events = c.get("/events");
      for (const Json& e : events["events"])
        told = told || e["text"].get<std::string>().find("killed by signal 9") != std::string::npos;
      CHECK(told);
    }
  }
}

TEST_CASE("a start asked for while the next attempt waits happens at once") {
  TestCluster c;
  c.put(kRunning, 202);
  for (const uint64_t n : {1, 2}) {
    REQUIRE(eventually([&] { return c.generation() == n && c.state() == "up"; }));
    REQUIRE(c.kill("rank0"));
  }
  REQUIRE(eventually([&] {
    return c.get("/status")["cluster"]["reason"].get<std::string>().find("next start in") != std::string::npos;
  }));
  const auto id = c.put(kRunning, 202)["operation"].get<std::string>();
  REQUIRE(eventually([&] { return c.get("/operations/" + id)["state"] == "done"; }));
  CHECK(c.generation() == 3);
  CHECK(c.get("/status")["cluster"]["restarts"] == 0);
}

TEST_CASE("a rank that refuses its configuration is not started again") {
  TestCluster c;
  c.request("always.rank0.load_target", "64");
  const auto id = c.put(kRunning, 202)["operation"].get<std::string>();
  REQUIRE(c.reaches("failed"));
  REQUIRE(eventually([&] { return c.get("/operations/" + id)["state"] == "failed"; }));
  CHECK(c.get("/operations/" + id)["error"]["code"] == "config");
  CHECK(c.generation() == 1);
  CHECK(c.get("/status")["cluster"]["reason"].get<std::string>().find("told to exit with 64") != std::string::npos);
  CHECK(c.get("/status")["warnings"][0]["name"] == "cluster-failed");
  // Somebody acts.
  std::filesystem::remove(c.dir() / "model/always.rank0.load_target");
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  CHECK(c.generation() == 2);
}

TEST_CASE("a program that cannot be started fails at once") {
  TestCluster c(false, "");
  const std::string toml = read_file(c.dir() / "head.toml");
  const std::string needle = "rank_path = \"" GLM53_BINARY_DIR "/tests/glm53-test-child\"";
  std::string changed = toml;
  changed.replace(changed.find(needle), needle.size(), "rank_path = \"/nowhere/engine\"");
  c.end_head();
  write_file(c.dir() / "head.toml", changed);
  c.start_head();
  c.put(kRunning, 202);
  REQUIRE(c.reaches("failed"));
  CHECK(c.get("/status")["cluster"]["reason"].get<std::string>().find("/nowhere/engine") != std::string::npos);
}

TEST_CASE("the API process is started again while ranks go on") {
  TestCluster c;
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  const pid_t rank0 = c.pid("rank0"), api = c.pid("api");
  REQUIRE(::kill(api, SIGKILL) == 0);
  REQUIRE(eventually([&] {
    return c.process("api")["state"] == "ready" && c.pid("api") > 0 && c.pid("api") != api && c.state() == "up";
  }));
  CHECK(c.pid("rank0") == rank0);
  CHECK(c.generation() == 1);
}

TEST_CASE("the head's agent ends and comes back: everything serves on") {
  TestCluster c;
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  const pid_t rank0 = c.pid("rank0"), rank1 = c.pid("rank1"), api = c.pid("api");
  c.end_head();
  CHECK(::kill(rank0, 0) == 0);
  c.start_head();
  REQUIRE(c.reaches("up"));
  CHECK(c.pid("rank0") == rank0);
  CHECK(c.pid("rank1") == rank1);
  CHECK(c.pid("api") == api);
  CHECK(c.generation() == 1);
  // And it still looks after them.
  REQUIRE(::kill(rank1, SIGKILL) == 0);
  REQUIRE(eventually([&] { return c.generation() == 2 && c.state() == "up"; }));
}

TEST_CASE("the worker's agent ends and comes back") {
  TestCluster c;
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  const pid_t rank1 = c.pid("rank1");
  c.end_worker();
  c.start_worker();
  REQUIRE(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  CHECK(c.pid("rank1") == rank1);
  CHECK(c.state() == "up");
}

TEST_CASE("an agent that ends in the middle of a start goes on with it") {
  TestCluster c;
  c.request("die.rank1.load_target", "hang");
  const auto id = c.put(kRunning, 202)["operation"].get<std::string>();
  REQUIRE(eventually([&] { return c.process("rank1").is_object() && c.process("rank1")["phase"] == "load_target"; }));
  c.end_head();
  c.start_head();
  CHECK(c.get("/status")["cluster"]["operation"] == id);
  REQUIRE(c.kill("rank1"));
  REQUIRE(eventually([&] { return c.generation() == 2 && c.state() == "up"; }));
  CHECK(eventually([&] { return c.get("/operations/" + id)["state"] == "done"; }));
}

TEST_CASE("a worker without its head stops its ranks") {
  TestCluster c;
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  const pid_t rank1 = c.pid("rank1");
  c.end_head();
  CHECK(eventually([&] {
    c.worker().tend();
    const Json processes = c.get("/node", true)["processes"];
    return processes.size() == 1 && processes[0]["state"] == "exited" && ::kill(rank1, 0) != 0;
  }));
}

TEST_CASE("restart takes the file's settings, and drift shows them before") {
  TestCluster c(false, "[serve]\nmax_seqs = 4\n");
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  std::string toml = read_file(c.dir() / "head.toml");
  toml.replace(toml.find("max_seqs = 4"), 12, "max_seqs = 6");
  write_file(c.dir() / "head.toml", toml);
  const Json drift = c.get("/status")["config"]["drift"];
  REQUIRE(drift.size() == 1);
  CHECK(drift[0].get<std::string>().find("serve.max_seqs: runs with 4, the file says 6") != std::string::npos);
  CHECK(c.put({{"state", "running"}, {"settings", {{"serve.max_seqs", "5"}}}})["error"]["code"] == "usage");
  const pid_t api = c.pid("api");
  c.put({{"state", "running"}, {"restart", true}, {"drain_ms", 0}}, 202);
  REQUIRE(eventually([&] { return c.generation() == 2 && c.state() == "up"; }));
  CHECK(c.get("/status")["config"]["drift"].empty());
  CHECK(c.get("/config")["serve.max_seqs"]["value"] == 6);
  CHECK(c.pid("api") != api);
  // The same configuration again: the API process stays.
  const pid_t kept = c.pid("api");
  c.put({{"state", "running"}, {"restart", true}, {"drain_ms", 0}}, 202);
  REQUIRE(eventually([&] { return c.generation() == 3 && c.state() == "up"; }));
  CHECK(c.pid("api") == kept);
}

TEST_CASE("one operation at a time") {
  TestCluster c;
  c.request("die.rank1.load_target", "hang");
  const auto id = c.put(kRunning, 202)["operation"].get<std::string>();
  const Json again = c.put(kRunning, 202);
  CHECK(again["operation"] == id);
  CHECK(again["attached"] == true);
  CHECK(c.ask("PUT", "/wanted", R"({"state":"running","settings":{"serve.max_seqs":"5"}})").status == 409);
  const HttpAnswer busy = c.ask("PUT", "/wanted", R"({"state":"stopped"})");
  CHECK(busy.status == 409);
  CHECK(busy.body.find(id) != std::string::npos);
  c.put({{"state", "stopped"}, {"preempt", true}}, 202);
  REQUIRE(c.reaches("down"));
  CHECK(c.get("/operations/" + id)["state"] == "cancelled");
}

TEST_CASE("events of an operation") {
  TestCluster c(false);
  const auto id = c.put(kRunning, 202)["operation"].get<std::string>();
  std::vector<std::string> names;
  Json done;
  SseParser parser([&](std::string_view name, std::string_view data) {
    names.emplace_back(name);
    if (name == "done") done = parse_json(data);
  });
  HttpClient client("unix:" + (c.dir() / "head/run/agent.sock"));
  client.set_timeout(5s, 60s);
  client.stream("GET", "/admin/v1/operations/" + id + "/events", "", [&](std::string_view bytes) {
    parser.feed(bytes);
    return true;
  });
  CHECK(done["state"] == "done");
  CHECK(std::count(names.begin(), names.end(), "action") >= 6);
  CHECK(std::count(names.begin(), names.end(), "progress") >= 1);
  CHECK(std::count(names.begin(), names.end(), "done") == 1);
  CHECK(c.ask("GET", "/operations/op-999/events").status == 404);
}

TEST_CASE("logs of both nodes through the head, without secrets") {
  TestCluster c;
  c.put(kRunning, 202);
  REQUIRE(c.reaches("up"));
  std::ofstream(c.dir() / "worker/logs/rank1/gen-1.log", std::ios::app) << "Authorization: Bearer abcdefghijklmnop\n";
  for (const char* query : {"process=rank1", "process=rank1&node=worker", "process=rank1&generation=1&lines=100"}) {
    const HttpAnswer answer = c.ask("GET", std::string("/logs?") + query);
    CHECK(answer.status == 200);
    CHECK(answer.body.find("phase load_target") != std::string::npos);
    CHECK(answer.body.find("abcdefgh") == std::string::npos);
  }
  CHECK(c.ask("GET", "/logs?process=rank0&lines=1").body == "phase warmup\n");
  CHECK(c.ask("GET", "/logs?process=agent").body.find("cluster is up") != std::string::npos);
  CHECK(c.ask("GET", "/logs?process=agent&node=worker").body.find("start_rank") != std::string::npos);
  CHECK(c.ask("GET", "/logs?process=rank0&generation=99").status == 404);
  CHECK(c.ask("GET", "/logs?process=../../etc/passwd").status == 400);
  CHECK(c.ask("GET", "/logs?process=rank0&lines=x").status == 400);
  CHECK(c.ask("GET", "/logs?process=rank0&node=moon").status == 404);
  for (const char* follow : {"0", "1"}) {
    const HttpAnswer answer = c.ask("GET", std::string("/logs?process=rank1&generation=99&follow=") + follow);
    CHECK(answer.status == 404);
    CHECK(parse_json(answer.body)["error"]["message"] == "there is no log of rank1 of generation 99");
  }
}

TEST_CASE("bad requests are told what is wrong") {
  TestCluster c(false);
  for (const char* body :
       {"", "[]", "{", R"({"state":"flying"})", R"({"state":"running","drain_ms":-1})",
        R"({"state":"running","colour":"red"})", R"({"state":"running","restart":"yes"})",
        R"({"state":"running","settings":[1]})", R"({"state":"running","settings":{"serve.max_seqs":"many"}})",
        R"({"state":"running","settings":{"node.role":"worker"}})"}) {
    CAPTURE(body);
    const HttpAnswer answer = c.ask("PUT", "/wanted", body);
    CHECK(answer.status == 400);
    CHECK_FALSE(parse_json(answer.body)["error"]["message"].get<std::string>().empty());
  }
  CHECK(c.state() == "down");
  CHECK(c.ask("GET", "/nothing").status == 404);
  CHECK(c.ask("POST", "/node/actions", R"({"epoch":1,"kind":"clean"})").status == 400);
  CHECK(parse_json(c.ask("POST", "/config/check", "[topology]\nranks = [\"head:0\"]\n").body)["ok"] == true);
  CHECK(parse_json(c.ask("POST", "/config/check", "[serve]\nmax_sqs = 4\n").body)["ok"] == false);
}

TEST_CASE("a worker obeys the newest epoch only, and wants nothing itself") {
  TestCluster c;
  REQUIRE(eventually([&] { return c.get("/status")["nodes"][1]["reachable"] == true; }));
  CHECK(c.ask("PUT", "/wanted", R"({"state":"running"})", true).status == 400);
  CHECK(c.ask("POST", "/node/actions", R"({"epoch":90000000000,"kind":"clean"})", true).status == 200);
  const HttpAnswer old =
      c.ask("POST", "/node/actions", R"({"epoch":5,"kind":"stop_rank","rank":1,"generation":1})", true);
  CHECK(old.status == 409);
  CHECK(c.ask("POST", "/node/actions", R"({"epoch":90000000000,"kind":"start_api"})", true).status == 400);
  CHECK(c.get("/status", true)["cluster"].is_null());
}

TEST_CASE("two agents do not share a state folder or an address") {
  TestCluster c(false);
  Agent second(c.dir() / "head.toml");
  CHECK_THROWS_WITH_AS(second.lock(), doctest::Contains("in use by pid"), Error);
  std::string toml = read_file(c.dir() / "head.toml");
  toml.replace(toml.find("head/state"), 10, "other/state");
  {
    write_file(c.dir() / "other.toml", toml);
    Agent same_run(c.dir() / "other.toml");
    CHECK_THROWS_WITH_AS(same_run.lock(), doctest::Contains("head/run"), Error);
  }
  toml.replace(toml.find("head/run"), 8, "other/run");
  toml.replace(toml.find("[admin]"), 7, "[admin]\nsocket = \"head/run/agent.sock\"");
  write_file(c.dir() / "other.toml", toml);
  Agent third(c.dir() / "other.toml");
  third.lock();
  CHECK_THROWS_AS(third.open(), Error);
  CHECK(c.state() == "down");  // and the first one still answers
}
