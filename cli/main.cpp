// glm53ctl: command line only; the commands are in the other files of this folder.
#include <algorithm>
#include <exception>
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"
#include "common/version.h"

namespace {

using namespace glm53;
using namespace glm53::cli;

constexpr int kUsage = 2;

/// Everything the command line can say.
struct Options {
  GlobalOptions global;
  StartOptions start, restart;
  StopOptions stop;
  StatusOptions status;
  LogsOptions logs;
  SmokeOptions smoke;
  DoctorOptions doctor;
  DownloadOptions download;
  EngineOptions engine;
  SyncOptions sync;
  std::string code, member;
  TokenOptions token;
  JoinOptions join, login;
  NodeAddOptions node;
  BenchOptions bench;
  DecodeOptions decode;
  std::string config_file, import_file, import_role = "head";
};

void add_global(CLI::App& app, GlobalOptions& o) {
  app.add_option("--config", o.config, "Configuration file of the agent to talk to (finds its socket)");
  app.add_option("--socket", o.socket, "Unix socket of the agent (default /run/glm53/agent.sock)");
  app.add_option("--url", o.url, "Agent over TCP, such as https://10.0.0.1:8890 or http://127.0.0.1:8890");
  app.add_option("--identity", o.identity, "Key and certificate for https (default ~/.config/glm53/identity.pem)");
  app.add_option("--token-file", o.token_file, "File with the admin token, for --url with http");
  app.add_flag("--json", o.json, "Print JSON");
}

CLI::App* add_start(CLI::App& app, const char* name, const char* what, StartOptions& o) {
  CLI::App* start = app.add_subcommand(name, what);
  start->add_option("--set", o.set, "key=value: a setting for this and later starts (repeatable)")
      ->allow_extra_args(false);
  start->add_flag("--no-env", o.no_env, "Do not look at the recipe's variables (docs/from-the-recipe.md)");
  start->add_flag("--detach", o.detach, "Do not wait; print the operation's id");
  start->add_option("--wait", o.wait, "Wait until ready (default) or launched")
      ->check(CLI::IsMember({"ready", "launched"}));
  start->add_option("--timeout", o.limit, "Longest wait, such as 10m (exit 5; the operation goes on)");
  return start;
}

void add_bench_serve(CLI::App& bench, BenchOptions& o, std::function<void()> chosen) {
  CLI::App* serve = bench.add_subcommand("serve", "Load on the API: latencies, throughput, cache hits, fairness");
  serve->add_option("--api", o.api, "Address of the API (default: asked from the agent)");
  serve->add_option("--key-file", o.key_file, "File with API keys (default: api.key_file)");
  serve->add_option("--concurrency,-c", o.concurrency, "Closed loop: requests in flight (default 4)");
  serve->add_option("--rate", o.rate, "Open loop: requests a second on average, at random (Poisson)");
  serve->add_option("--requests,-n", o.requests, "How many requests (default 32, without --duration)");
  serve->add_option("--duration", o.duration, "Start none after this time, such as 5m");
  serve->add_option("--sessions", o.sessions, "Conversations that take turns (default: --concurrency)");
  serve->add_option("--turns", o.turns, "Requests of a conversation (default 1)");
  serve->add_option("--system-tokens", o.system_tokens, "System prompt that all conversations share (default 0: none)");
  serve->add_option("--prompt-tokens", o.prompt_tokens, "What the user says in a turn (default 200)");
  serve->add_option("--max-tokens", o.max_tokens, "Length of an answer (default 128)");
  serve->add_flag("--same", o.same, "All conversations say the same (default: all differ)");
  serve->add_flag("--stop-at-end", o.stop_at_end, "Let the model end its answers (default: --max-tokens long)");
  serve->add_option("--think", o.think, "Mean pause of a conversation before its next turn (default 0s)");
  serve->add_option("--abort-share", o.abort_share, "Share of requests whose client leaves, 0 to 1 (default 0)");
  serve->add_option("--abort-within", o.abort_within, "Half of these leave within this time (default 2s)");
  serve->add_option("--keys", o.keys, "How many keys of the file are used (default 1)");
  serve->add_option("--key-weights", o.key_weights, "Shares of the conversations by key, such as 9,1");
  serve->add_option("--temperature", o.temperature, "Default 0");
  serve->add_option("--seed", o.seed, "Of prompts, times and aborts (default 1)");
  serve->add_option("--idle-connections", o.idle_connections, "Connections that do nothing beside the load");
  serve->add_option("--timeout", o.timeout, "Longest silence of the server in a request (default 600s)");
  serve->callback(std::move(chosen));
}

void add_bench_decode(CLI::App& bench, DecodeOptions& o, std::function<void()> chosen) {
  CLI::App* decode =
      bench.add_subcommand("decode", "How fast answers are written, by class of prompt, and whether they are sound");
  decode->add_option("--api", o.api, "Address of the API (default: asked from the agent)");
  decode->add_option("--key-file", o.key_file, "File with API keys (default: api.key_file)");
  decode
      ->add_option("--phase", o.phases, "structured, prose, code, edit, mixed, or a class of --prompts (default: all)")
      ->delimiter(',');
  decode->add_option("--streams", o.streams, "Requests at once, such as 1,2,4,8 (default)");
  decode->add_option("--runs", o.runs, "Of every cell (default 5)");
  decode->add_option("--warm-up", o.warm_up, "Runs before these that do not count (default 1)");
  decode->add_option("--max-tokens", o.max_tokens, "Longest answer (default 400)");
  CLI::Option* same = decode->add_flag("--same", o.same, "All streams ask the same");
  decode
      ->add_flag_function(
          "--distinct", [&o](int64_t) { o.same = false; }, "All streams ask something else (default)")
      ->excludes(same);
  decode->add_option("--prompts", o.prompts, "JSON file of prompts by class (default: built in, by the model's name)");
  decode->add_option("--speculation", o.speculation, "auto (default) or off: no drafts")
      ->check(CLI::IsMember({"auto", "off"}));
  decode->add_flag("--compare-off", o.compare_off, "Every cell with and without drafts, taking turns");
  decode->add_flag("--skip-coherence", o.skip_coherence, "Do not look at the answers (else exit 7 when one is none)");
  decode->add_option("--out", o.out, "Write the figures of all runs to this file, as JSON");
  decode->add_option("--timeout", o.timeout, "Longest silence of the server in a request (default 600s)");
  decode->callback(std::move(chosen));
}

void add_engine(CLI::App& app, Options& o, std::function<int()>& chosen) {
  CLI::App* engine =
      app.add_subcommand("engine", "Engine bundles of this node, by digest; needs no agent")->require_subcommand(1);
  const auto add = [&](const char* name, const char* what) {
    CLI::App* const command = engine->add_subcommand(name, what);
    command->add_option("--store", o.engine.store, "Where bundles lie (default: engine.store)");
    command->callback([&, name] {
      o.engine.action = name;
      chosen = [&] { return run_engine(o.global, o.engine); };
    });
    return command;
  };
  CLI::App* const install = add("install", "Pull an image, check it, unpack it, try its engine");
  install->add_option("image", o.engine.what, "REGISTRY/NAME@sha256:DIGEST or :TAG (default: engine.image)");
  CLI::App* const import = add("import", "The same from a file that export or scripts/make-image.sh made");
  import->add_option("file", o.engine.file, "A tar with an OCI layout")->required();
  for (CLI::App* const command : {install, import}) {
    command->add_flag("--use", o.engine.use, "It becomes the active one");
  }
  add("list", "Installed bundles: * active, - the one before");
  add("use", "Makes an installed bundle the active one")
      ->add_option("digest", o.engine.what, "Digest, or its first digits (default: engine.image)");
  add("rollback", "Back to the bundle before the active one");
  add("verify", "Hash blobs and files again (exit 7: damaged)")->add_option("digest", o.engine.what, "(default: all)");
  add("gc", "Remove what is neither active, nor the one before, nor running");
  CLI::App* const to_file = add("export", "One file that import takes, for machines without a registry");
  to_file->add_option("digest", o.engine.what, "Digest, or its first digits")->required();
  to_file->add_option("file", o.engine.file, "File to write")->required();
}

void add_bench(CLI::App& app, Options& o, std::function<int()>& chosen) {
  CLI::App* bench = app.add_subcommand("bench", "Measure")->require_subcommand(1);
  add_bench_serve(*bench, o.bench, [&] { chosen = [&] { return run_bench_serve(o.global, o.bench); }; });
  add_bench_decode(*bench, o.decode, [&] { chosen = [&] { return run_bench_decode(o.global, o.decode); }; });
}

void add_join(CLI::App& parent, const char* name, const char* what, JoinOptions& o, std::function<void()> chosen) {
  CLI::App* join = parent.add_subcommand(name, what);
  join->add_option("head", o.head, "ADDRESS:PORT of the head's admin API")->required();
  join->add_option("--token", o.token_file, "File with the token (default: standard input)");
  join->callback(std::move(chosen));
}

void add_cluster(CLI::App& app, Options& o, std::function<int()>& chosen) {
  const auto join_node = [&] { chosen = [&] { return run_cluster_join(o.global, o.join); }; };
  CLI::App* cluster = app.add_subcommand("cluster", "Who belongs to the cluster")->require_subcommand(1);
  cluster->add_subcommand("init", "On the head: make the cluster's CA")->callback([&] {
    chosen = [&] { return run_cluster_init(o.global); };
  });
  CLI::App* token = cluster->add_subcommand("token", "On the head: a token for one join");
  token->add_option("--role", o.token.role, "node (default), operator or reader")
      ->check(CLI::IsMember({"node", "operator", "reader"}));
  token->add_option("--name", o.token.name, "Whose it is (a node's default: worker)");
  token->add_option("--expires", o.token.expires, "Time until then (default 1h, 7 days at most)");
  token->callback([&] { chosen = [&] { return run_cluster_token(o.global, o.token); }; });
  add_join(*cluster, "join", "On the worker: join the head's cluster", o.join, join_node);
  add_join(app, "join", "The same as cluster join", o.join, join_node);
  add_join(*cluster, "login", "Become an operator or reader: fetch a certificate for https", o.login,
           [&] { chosen = [&] { return run_cluster_login(o.global, o.login); }; });
  cluster->add_subcommand("show", "The CA's fingerprint and the members")->callback([&] {
    chosen = [&] { return run_cluster_show(o.global); };
  });

  CLI::App* node = app.add_subcommand("node", "Machines of the cluster")->require_subcommand(1);
  node->add_subcommand("list", "Nodes and members")->callback([&] {
    chosen = [&] { return run_node_list(o.global); };
  });
  CLI::App* add = node->add_subcommand("add", "Install the agent on another machine over SSH, and let it join");
  add->add_option("target", o.node.target, "USER@HOST")->required();
  add->add_option("--bundle", o.node.bundle, "Folder with the programs (scripts/bundle.sh)")->required();
  add->add_option("--name", o.node.name, "Name of the node (default: worker)");
  add->add_option("--listen", o.node.listen, "Its admin.listen (default: HOST:8890)");
  add->add_option("--head", o.node.head, "ADDRESS:PORT of the head (default: its admin.listen)");
  add->add_option("--ssh-port", o.node.port, "Of sshd there (default 22)")->check(CLI::Range(1, 65535));
  add->add_option("--ssh-key", o.node.key, "Private key (default: those of ssh)");
  add->add_option("--known-hosts", o.node.known_hosts, "File with its host key (default: ~/.ssh/known_hosts)");
  add->add_option("--root", o.node.root, "Install below this folder instead of /");
  add->callback([&] { chosen = [&] { return run_node_add(o.global, o.node); }; });
  CLI::App* remove = node->add_subcommand("remove", "Its certificate does not count any more");
  remove->add_option("name", o.member, "Of the member")->required();
  remove->callback([&] { chosen = [&] { return run_node_remove(o.global, o.member); }; });
}

void add_commands(CLI::App& app, Options& o, std::function<int()>& chosen) {
  add_start(app, "start", "Bring the cluster up and wait until it serves", o.start)->callback([&] {
    chosen = [&] { return run_start(o.global, o.start); };
  });
  add_start(app, "restart", "Stop and start again", o.restart)->callback([&] {
    chosen = [&] { return run_start(o.global, o.restart); };
  });

  CLI::App* stop = app.add_subcommand("stop", "Drain and stop the cluster");
  stop->add_option("--drain", o.stop.drain, "Time for running requests (default 30s)");
  stop->add_flag("--now", o.stop.now, "Do not drain; also ends a start that is at work");
  stop->add_flag("--preempt", o.stop.preempt, "End a start that is at work");
  stop->add_flag("--detach", o.stop.detach, "Do not wait; print the operation's id");
  stop->callback([&] { chosen = [&] { return run_stop(o.global, o.stop); }; });

  CLI::App* status = app.add_subcommand("status", "Show nodes, processes, model and speed");
  status->add_flag("--watch,-w", o.status.watch, "Again and again");
  status->add_option("--interval", o.status.interval, "Seconds between two looks (default 2)");
  status->callback([&] { chosen = [&] { return run_status(o.global, o.status); }; });

  CLI::App* logs = app.add_subcommand("logs", "Show logs of agents, ranks and the API process");
  logs->add_option("which", o.logs.which, "head, worker, both (default), agent, api, rank0, rank1");
  logs->add_flag("--follow,-f", o.logs.follow, "Go on with new lines");
  logs->add_option("--lines,-n", o.logs.lines, "How many of the last lines (default 100)");
  logs->add_option("--generation", o.logs.generation, "An earlier generation of the ranks");
  logs->callback([&] { chosen = [&] { return run_logs(o.global, o.logs); }; });

  CLI::App* smoke = app.add_subcommand("smoke", "Stream one answer and judge it (exit 7 when it is no language)");
  smoke->add_option("prompt", o.smoke.prompt, "What to say");
  smoke->add_option("--api", o.smoke.api, "Address of the API (default: asked from the agent)");
  smoke->add_option("--key-file", o.smoke.key_file, "File with the API key (default: api.key_file)");
  smoke->add_option("--max-tokens", o.smoke.max_tokens, "Longest answer (default 200)");
  smoke->callback([&] { chosen = [&] { return run_smoke(o.global, o.smoke); }; });

  CLI::App* doctor =
      app.add_subcommand("doctor", "Every check before a start, with verdict and remedy (exit 3: failed)");
  doctor->add_flag("--deep", o.doctor.deep, "Also the probes that take long or load the devices");
  doctor->add_flag("--local", o.doctor.local, "Ask no agent: the checks of this node, as this user");
  doctor->callback([&] { chosen = [&] { return run_doctor(o.global, o.doctor); }; });

  add_bench(app, o, chosen);
  add_cluster(app, o, chosen);

  CLI::App* download = app.add_subcommand("download", "Fetch a model into the Hugging Face cache; needs no agent");
  download->add_option("repo", o.download.repo, "ORGANISATION/NAME[@REVISION] (default: model.repo)");
  download->add_option("--cache", o.download.cache, "The hub cache (default: as other Hugging Face clients)");
  download->add_option("--include", o.download.include, "Only files that match (glob, repeatable)")
      ->allow_extra_args(false);
  download->add_option("--exclude", o.download.exclude, "No files that match (glob, repeatable)")
      ->allow_extra_args(false);
  download->add_option("--limit-rate", o.download.limit_rate, "Bytes a second, such as 200M");
  download->add_flag("--offline", o.download.offline, "Open no connection: say whether the cache is complete");
  download->add_flag("--verify", o.download.verify, "Hash again what is there");
  download->add_flag("--dry-run", o.download.dry_run, "Say what would be fetched");
  download->add_flag("--no-env", o.download.no_env, "Do not look at HF_HOME and other variables");
  download->callback([&] { chosen = [&] { return run_download(o.global, o.download); }; });

  add_engine(app, o, chosen);

  CLI::App* sync = app.add_subcommand("sync", "Copy a model from the head's cache to the worker's");
  sync->add_option("what", o.sync.what, "ORGANISATION/NAME@COMMIT (default: what the configuration names)");
  sync->add_flag("--detach", o.sync.detach, "Do not wait; print the operation's id");
  sync->callback([&] { chosen = [&] { return run_sync(o.global, o.sync); }; });

  CLI::App* explain = app.add_subcommand("explain", "What a message's code means, and what to do");
  explain->add_option("code", o.code, "Such as E640 (default: all)");
  explain->callback([&] { chosen = [&] { return run_explain(o.code); }; });

  CLI::App* config = app.add_subcommand("config", "Check and show the configuration")->require_subcommand(1);
  CLI::App* check = config->add_subcommand("check", "Validate a file");
  check->add_option("file", o.config_file, "The file (default: --config, else /etc/glm53/config.toml)");
  check->callback([&] { chosen = [&] { return run_config_check(o.global, o.config_file); }; });
  config->add_subcommand("show", "Effective values and where each comes from")->callback([&] {
    chosen = [&] { return run_config_show(o.global); };
  });
  config->add_subcommand("example", "Print a file with every key")->callback([&] {
    chosen = [] { return run_config_example(); };
  });
  CLI::App* import = config->add_subcommand("import", "A recipe's .env as a configuration file");
  import->add_option("file", o.import_file, "The .env")->required();
  import->add_option("--role", o.import_role, "head (default) or worker")->check(CLI::IsMember({"head", "worker"}));
  import->callback([&] { chosen = [&] { return run_config_import(o.import_file, o.import_role); }; });
  app.add_subcommand("version", "Versions of glm53ctl and of the agent")->callback([&] {
    chosen = [&] { return run_version(o.global); };
  });
}

/// One line for people, or an object with --json; returns the exit code.
int report(const Error& e, bool json) {
  if (json) {
    const nlohmann::ordered_json error = {
        {"code", std::string(name(e.code()))}, {"message", e.what()}, {"remedy", e.remedy()}};
    std::cout << dump({{"error", error}}) << "\n";
  } else {
    std::cerr << "error: " << e.what() << "\n";
    if (!e.remedy().empty()) std::cerr << "  try: " << e.remedy() << "\n";
  }
  return std::max(1, ctl_exit(e.code()));
}

Error unknown_command(const CLI::App& app, const std::string& word) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  const auto near = nearest(word, names);
  return {Code::usage, cat("unknown command '", word, "'"), near ? cat("glm53ctl ", *near) : "glm53ctl --help"};
}

int run(int argc, char** argv) {
  CLI::App app{"glm53ctl: operate a glm53 cluster through its agent"};
  app.set_version_flag("--version", std::string(version()));
  app.require_subcommand(1);
  app.fallthrough();
  app.footer(
      "Exit codes: 0 ok, 1 failed, 2 usage or configuration, 3 preflight, 4 busy, 5 timeout, 6 worker unreachable,\n"
      "7 verification failed, 130 interrupted (the operation goes on). More: docs/operating.md");
  Options options;
  options.restart.restart = true;
  std::function<int()> chosen;
  add_global(app, options.global);
  add_commands(app, options, chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& e) {
    // CLI11 only says that a command is missing, also when one was misspelt.
    const auto rest = app.remaining();
    if (rest.empty()) return app.exit(e) == 0 ? 0 : kUsage;
    return report(unknown_command(app, rest.front()), options.global.json);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;
  }
  try {
    return chosen();
  } catch (const Error& e) {
    return report(e, options.global.json);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::cerr << "error: " << e.what() << "\n";
    return 1;
  }
}
