// Frames and bodies: pieces of a copy, datagrams of ranks, what is posted to the admin API and to the OpenAI API.
#include <array>
#include <charconv>
#include <memory>
#include <span>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/pki.h"
#include "common/rank_contract.h"
#include "common/strings.h"
#include "engine/api/errors.h"
#include "engine/api/request.h"
#include "tests/unit/agent/cluster.h"
#include "tests/unit/fuzz/fuzz.h"
#include "tests/unit/sync/world.h"

using namespace glm53;
using test::fuzz;

namespace {

/// "ETAG OFFSET CHECKSUM\n" and the bytes.
std::string frame(const std::string& etag, int64_t offset, const std::string& data) {
  std::array<char, 17> hex{};
  const auto end = std::to_chars(hex.data(), hex.data() + hex.size(), xxh64(std::as_bytes(std::span(data))), 16).ptr;
  return cat(etag, " ", offset, " ", std::string(hex.data(), end), "\n", data);
}

/// What the admin API makes of a frame: the numbers are judged as it judges them.
void take(sync::Receiver& receiver, const std::string& text) {
  const size_t line = text.find('\n');
  const auto parts = split(text.substr(0, line), ' ');
  if (line == std::string::npos || parts.size() != 3) throw Error(Code::usage, "no frame");
  uint64_t offset = 0, checksum = 0;
  const auto read = [](const std::string& from, uint64_t& into, int base) {
    const auto [end, ec] = std::from_chars(from.data(), from.data() + from.size(), into, base);
    if (ec != std::errc() || end != from.data() + from.size()) throw Error(Code::usage, "no number");
  };
  read(parts[1], offset, 10);
  read(parts[2], checksum, 16);
  if (offset > uint64_t{INT64_MAX}) throw Error(Code::usage, "out of bounds");
  receiver.take(parts[0], static_cast<int64_t>(offset), std::string_view(text).substr(line + 1), checksum);
}

/// One route of an agent; a refusal is an Error, and 500 is one of ours.
std::function<void(const std::string&)> post(test::TestCluster& cluster, const std::string& method,
                                             const std::string& path, bool worker) {
  auto client = std::make_shared<HttpClient>(
      "unix:" + (cluster.dir() / (worker ? "worker/run/agent.sock" : "head/run/agent.sock")));
  client->set_timeout(std::chrono::seconds(5), std::chrono::seconds(30));
  return [client, method, path](const std::string& body) {
    HttpAnswer answer;
    try {
      answer = client->request(method, "/admin/v1" + path, body);
    } catch (const Error& e) {
      throw std::runtime_error(cat(path, ": ", e.line()));
    }
    const auto json = parse_json(answer.body);
    if (json.is_object() && json.value("ok", true) == false) throw Error(Code::usage, answer.body);
    if (answer.status < 300) return;
    if (answer.status == 500 || json.at("error").at("message").get<std::string>().empty())
      throw std::runtime_error(cat(path, ": ", answer.status, " ", answer.body));
    throw Error(Code::usage, json.at("error").at("message").get<std::string>());
  };
}

}  // namespace

TEST_CASE("fuzz: pieces of a copy, in any order and damaged: the copy ends with the right bytes") {
  test::SyncWorld world;
  sync::Receiver receiver(world.to, world.manifest());
  receiver.have();
  std::vector<std::string> frames;
  const std::string config = "{}", tokenizer = test::noise(70'000, 3);
  frames.push_back(frame(test::etag_of(config), 0, config));
  frames.push_back(frame(test::etag_of(tokenizer), 0, tokenizer));
  fuzz("sync-frame", frames, [&](const std::string& text) { take(receiver, text); }, {.share = 0.5, .rounds = 500});
  CHECK_THROWS_AS(receiver.commit(), Error);  // the large files are missing
  world.copy();
  CHECK(world.whole());
}

TEST_CASE("fuzz: datagrams of ranks") {
  fuzz("notice",
       {"READY=1\nX_GLM53_PHASE=load-target\nX_GLM53_PROGRESS=3/9\nWATCHDOG=1\nSTATUS=text\n",
        "X_GLM53_ERROR=no memory\nSTOPPING=1\nEXTEND_TIMEOUT_USEC=1000000\n"},
       [](const std::string& text) {
         // A rank that talks nonsense is no reason to fail: it is not understood, and nothing else.
         const Notice n = parse_notice(text);
         if (n.error && n.error->find('\n') != std::string::npos) throw std::runtime_error("an error of several lines");
         const bool understood = n.ready || n.stopping || n.watchdog || n.phase || n.progress || n.status || n.error;
         if (!understood && !n.extend_us) throw Error(Code::usage, "nothing in it");
         (void)parse_notice(encode(n));
       },
       {.share = 1});
}

TEST_CASE("fuzz: bodies of the admin API") {
  test::TestCluster cluster;
  REQUIRE(cluster.ask("POST", "/cluster/init", "{}").status == 200);
  struct Route {
    std::string name, method, path, body;
    bool worker = false;
  };
  const std::string commit(40, 'b'), digest(64, 'a');
  // Text without its file: what it names has to be absolute.
  std::string toml = read_file(cluster.dir() / "head.toml");
  toml.replace(toml.find("\"token\""), 7, cat("\"", cluster.dir() / "token", "\""));
  const std::vector<Route> routes{
      {"wanted", "PUT", "/wanted", R"({"state":"stopped","drain_ms":0,"preempt":true})"},
      {"config-check", "POST", "/config/check", toml},
      {"tokens", "POST", "/cluster/tokens", R"({"role":"operator","name":"alice","expires":"1h"})"},
      {"preflight", "POST", "/node/preflight", R"({"config":{"serve.max_seqs":4}})", true},
      {"manifest", "POST", "/node/sync?epoch=99999999999",
       cat(R"({"version":1,"repo":"org/name","commit":")", commit,
           R"(","refs":["main"],"files":[{"path":"a/b","etag":")", digest, R"(","size":5}]})"),
       true},
      // The last: a damaged epoch may be a higher one, after which the others are too low.
      {"actions", "POST", "/node/actions", R"({"epoch":99999999999,"kind":"stop_rank","rank":1,"generation":7})",
       true}};
  for (const Route& r : routes) {
    CAPTURE(r.name);
    fuzz("rest-" + r.name, {r.body}, post(cluster, r.method, r.path, r.worker),
         {.share = 0.5 / static_cast<double>(routes.size()), .rounds = 60});
  }
  // Routes whose good body is good once, or never here: everything is refused, and the agents go on.
  const std::vector<Route> once{
      {"join", "POST", "/cluster/join",
       dump({{"token", cat("glm53-", std::string(32, '0'), "-", digest)},
             {"request", pki::make_request(pki::make_key())}})},
      {"sync", "POST", "/sync", cat(R"({"repo":"org/name","revision":")", commit, R"("})")},
      {"commit", "POST", "/node/sync/commit", cat(R"({"session":"x","digest":")", digest, R"("})"), true},
      {"data", "PUT", "/node/sync/data?session=x&blob=y&offset=0&xxh64=0", "bytes", true}};
  test::Random random(7);
  for (const Route& r : once) {
    CAPTURE(r.name);
    const auto target = post(cluster, r.method, r.path, r.worker);
    for (int i = 0; i < 60; ++i) CHECK_THROWS_AS(target(test::damage(r.body, random)), Error);
  }
  CHECK(cluster.state() == "down");
  CHECK(cluster.get("/version", true)["role"] == "worker");
}

TEST_CASE("fuzz: bodies of the OpenAI API") {
  const text::Tokenizer tokenizer =
      text::Tokenizer::load(std::string(GLM53_SOURCE_DIR) + "/models/glm53-tiny/tokenizer.json");
  api::Settings settings;
  settings.model_names = {"glm53-tiny"};
  settings.max_context = 1000;
  settings.eos = {2624, 2631, 2633};
  const api::RequestContext context{settings, tokenizer, 1000};
  const auto refuse = [](auto&& parse) {
    return [parse](const std::string& text) {
      try {
        parse(parse_json(text));
      } catch (const api::ApiError& e) {
        if (e.status() < 400 || e.status() >= 500) throw std::runtime_error(e.what());
        throw Error(Code::usage, e.what());
      }
    };
  };
  fuzz("chat",
       {R"({"model":"glm53-tiny","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text",)"
        R"("text":"Hi"}]}],"temperature":0.5,"stop":["a"],"max_tokens":5,"stream":true,"tools":[{"type":"function",)"
        R"("function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}],)"
        R"("logit_bias":{"5":1},"n":2,"seed":4,"stream_options":{"include_usage":true}})"},
       refuse([&](const auto& json) { api::parse_chat_request(json, context); }), {.share = 0.3});
  fuzz("completion", {R"({"prompt":["a","b"],"max_tokens":3,"echo":true,"suffix":null})"},
       refuse([&](const auto& json) { api::parse_completion_request(json, context); }), {.share = 0.2});
}
