// A rank from its configuration to its exit code (docs/rank-contract.md).
#include "engine/runtime/rank.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <optional>
#include <pthread.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "common/config.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/file.h"
#include "common/json.h"
#include "common/log.h"
#include "common/process.h"
#include "common/rank_contract.h"
#include "common/strings.h"
#include "common/version.h"
#include "engine/grammar/compile.h"
#include "engine/loader/safetensors.h"
#include "engine/runtime/admin_server.h"
#include "engine/runtime/memory_guard.h"
#include "engine/runtime/memory_ledger.h"
#include "engine/runtime/model_executor.h"
#include "engine/runtime/rank_drafter.h"
#include "engine/runtime/rank_weights.h"
#include "engine/runtime/spill_tier.h"
#include "engine/runtime/step_loop.h"
#include "engine/runtime/step_watchdog.h"

namespace glm53 {
namespace {

using Json = nlohmann::ordered_json;
using std::chrono::milliseconds;

constexpr milliseconds kProgressEvery{200};

/// SIGTERM and SIGINT of the process, taken by one thread: the first asks the loop to end (before there is a loop: ends
/// at once), the second ends at once. Made before any other thread, so that all inherit the blocked signals.
class SignalWatch {
 public:
  SignalWatch(Controls& controls, Notifier& notifier) : controls_(controls), notifier_(notifier) {
    sigemptyset(&set_);
    for (const int s : {SIGTERM, SIGINT, SIGUSR1}) sigaddset(&set_, s);
    if (pthread_sigmask(SIG_BLOCK, &set_, nullptr) != 0) throw Error(Code::internal, "signals cannot be blocked");
    if (std::signal(SIGPIPE, SIG_IGN) == SIG_ERR) throw_errno(Code::internal, "SIGPIPE cannot be ignored");
    thread_ = std::thread([this] { loop(); });
  }
  ~SignalWatch() {
    ended_ = true;
    pthread_kill(thread_.native_handle(), SIGUSR1);
    thread_.join();
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  void serving() { serving_ = true; }

 private:
  void loop() {
    bool asked = false;
    for (int signal = 0; !ended_;) {
      if (sigwait(&set_, &signal) != 0 || signal == SIGUSR1) continue;
      Notice notice;
      notice.stopping = true;
      notifier_.send(notice);
      if (asked || !serving_) ::_exit(0);  // nothing durable is in flight
      asked = true;
      controls_.stop();
    }
  }

  Controls& controls_;
  Notifier& notifier_;
  sigset_t set_{};
  std::atomic<bool> ended_ = false, serving_ = false;
  std::thread thread_;
};

KvFormat kv_format(const std::string& text) {
  if (text == "auto" || text == "f32") return KvFormat::f32;
  if (text == "bf16") return KvFormat::bf16;
  return text == "fp8_c528" ? KvFormat::fp8_c528 : KvFormat::int8_c528;
}

ReuseOutput reuse_output(const std::string& text) {
  if (text == "always") return ReuseOutput::always;
  return text == "idle" ? ReuseOutput::idle : ReuseOutput::never;
}

/// Ids below this have text: the release's head has a few rows more than its tokenizer has tokens.
int32_t text_vocab(const std::string& dir, int64_t vocab) {
  const std::string path = dir + "/tokenizer.json";
  if (::access(path.c_str(), R_OK) != 0) return static_cast<int32_t>(vocab);
  const Json tokenizer = parse_json(read_file(path));
  int64_t highest = -1;
  for (const auto& [text, id] : tokenizer.at("model").at("vocab").items())
    highest = std::max(highest, id.get<int64_t>());
  if (const auto added = tokenizer.find("added_tokens"); added != tokenizer.end())
    for (const Json& token : *added) highest = std::max(highest, token.at("id").get<int64_t>());
  if (highest < 0) throw Error(Code::weights, cat("'", path, "' has no tokens"));
  return static_cast<int32_t>(std::min(highest + 1, vocab));
}

/// What structured output needs to know of the tokens; null, with a word in the log, when it cannot be had.
std::shared_ptr<grammar::Cache> grammars_of(const std::string& dir) {
  const std::string path = dir + "/tokenizer.json";
  try {
    if (::access(path.c_str(), R_OK) == 0)
      return std::make_shared<grammar::Cache>(grammar::vocabulary_of(text::Tokenizer::load(path)));
    log::warn(cat("structured output is off: there is no '", path, "'"));
  } catch (const Error& e) {
    log::warn(cat("structured output is off: ", e.line()));
  }
  return nullptr;
}

int report(const Error& error, Notifier& notifier) {
  log::error(error.line());
  notifier.error(error.line());
  return rank_exit(error.code());
}

class Rank {
 public:
  Rank(RankConfig config, Notifier& notifier, Controls& controls, SignalWatch& signals);
  void run();

 private:
  void choose_backend(std::unique_ptr<Communicator> comm);
  std::unique_ptr<Communicator> device_communicator(std::unique_ptr<Communicator> host);
  void meet();
  void load();
  void load_drafter();
  std::vector<std::pair<std::string, size_t>> weight_bytes() const;
  void make_pools();
  spill::StoreOptions spill_options() const;
  uint64_t spill_memory() const;
  void make_spill();
  void serve_rank0();
  ModelLimits limits() const;
  LoopParts parts() { return {*group_, *watched_, *comm_, notifier_, controls_, spill_.get()}; }
  Json admin(const std::string& command);
  void say_ready();
  void guard_memory();
  void watch_steps();

  const RankConfig rank_;
  const Config config_;
  Notifier& notifier_;
  Controls& controls_;
  SignalWatch& signals_;
  std::string dir_, digest_, backend_;
  ModelConfig model_config_;
  DrafterChoice draft_;
  MemoryFacts facts_;
  PoolSizes pools_;
  // In the order of making; destroyed in reverse.
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<RankGroup> group_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Communicator> comm_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Drafter> drafter_;
  OwnedCaches caches_;
  std::unique_ptr<SpillTier> spill_;
  std::unique_ptr<SamplingTable> sampling_;
  std::unique_ptr<ModelExecutor> executor_;
  std::unique_ptr<StepWatchdog> watchdog_;
  std::unique_ptr<WatchedExecutor> watched_;
  std::unique_ptr<MemoryGuard> guard_;
};

Rank::Rank(RankConfig config, Notifier& notifier, Controls& controls, SignalWatch& signals)
    : rank_(std::move(config)),
      config_(Config::from_json(parse_json(rank_.config_json), "the rank's configuration")),
      notifier_(notifier),
      controls_(controls),
      signals_(signals) {
  log::init(cat("rank", rank_.rank), log::parse_level(config_.text("log.level")));
}

void Rank::run() {
  notifier_.phase(Phase::init);
  prefer_to_be_killed();
  log::info(
      cat("glm53-engine ", version(), ", rank ", rank_.rank, " of ", rank_.size, ", generation ", rank_.generation));
  dir_ = config_.path("model.path");
  if (config_.text("model.path").empty())
    throw Error(Code::config, "model.path is not set", "set it to the folder of a checkpoint");
  admin_ =
      std::make_unique<AdminServer>(rank_.admin_socket, [this](const std::string& command) { return admin(command); });
  model_config_ = load_model_config(dir_);
  digest_ = sha256_hex(cat(model_config_.digest, " ", Checkpoint(dir_).digest()));
  meet();
  draft_ =
      choose_drafter(config_, dir_, model_config_, backend_, [this](bool mine) { return group_->everywhere(mine); });
  load();
  load_drafter();
  make_pools();
  notifier_.phase(Phase::warmup);
  if (rank_.rank == 0)
    serve_rank0();
  else
    follow(parts(), rank_.generation, [this] { say_ready(); });
  log::info("stopped");
}

/// Who is there, and the way of collectives.
void Rank::meet() {
  notifier_.phase(Phase::rendezvous);
  glm53::Hello hello;
  hello.generation = rank_.generation;
  hello.rank = rank_.rank;
  hello.size = rank_.size;
  hello.config_hash = rank_.config_hash;
  hello.model_digest = digest_;
  hello.build = version();
  const milliseconds patience = config_.duration("ranks.stall_timeout");
  std::vector<std::unique_ptr<ControlLink>> links;
  if (rank_.rank == 0)
    links = accept_ranks(rank_.rendezvous_host, rank_.rendezvous_port, hello, patience);
  else
    links.push_back(join_rank0(rank_.rendezvous_host, rank_.rendezvous_port, hello, patience));
  group_ = std::make_unique<RankGroup>(rank_.rank, rank_.size, std::move(links));
  notifier_.phase(Phase::comm_init);
  facts_.ranks_on_host = group_->ranks_on_host(boot_id());
  choose_backend(make_gloo_communicator({rank_.rank, rank_.size}, rank_.bind_address, group_->links(),
                                        config_.duration("ranks.collective_timeout")));
}

/// A GPU where all ranks have one; `comm` is how they agree, and in the end what the backend needs.
void Rank::choose_backend(std::unique_ptr<Communicator> comm) {
  const std::string wanted = config_.text("engine.backend");
  std::optional<Error> missing;
  if (wanted != "cpu") {
    try {
      ops_ = make_cuda_ops(rank_.device);
    } catch (const Error& e) {
      if (e.code() != Code::unavailable) throw;
      missing = e;
      if (wanted == "cuda") throw Error(Code::config, cat("engine.backend = \"cuda\": ", e.what()), e.remedy());
    }
  }
  float have = ops_ ? 1 : 0;
  comm->all_reduce(Tensor::of(&have, Dtype::f32, {1}));
  if (have == static_cast<float>(rank_.size)) {
    backend_ = "cuda";
    log::info(cat("backend cuda, device ", rank_.device, ", activations ", name(ops_->activation())));
    comm_ = device_communicator(std::move(comm));
    return;
  }
  if (have > 0)
    log::warn(cat("only ", have, " of ", rank_.size, " ranks have a GPU: all use the CPU",
                  missing ? cat(" (here: ", missing->what(), ")") : ""));
  backend_ = "cpu";
  const auto cores = static_cast<int>(std::max(std::thread::hardware_concurrency(), 1u));
  const auto threads = static_cast<int>(config_.integer("engine.threads"));
  const int mine = threads > 0 ? threads : std::max(cores / std::max(facts_.ranks_on_host, 1), 1);
  ops_ = make_cpu_ops(mine);
  comm_ = std::move(comm);
  log::info(cat("backend cpu, ", mine, " threads"));
}

std::unique_ptr<Communicator> Rank::device_communicator(std::unique_ptr<Communicator> host) {
  if (rank_.size == 1) return host;
  if (config_.text("ranks.collectives") == "nccl")
    return make_nccl_communicator(*host, *ops_, config_.duration("ranks.collective_timeout"));
  log::warn("ranks.collectives = \"host\": every collective goes through host memory, which is slow");
  return make_staged_communicator(std::move(host), *ops_);
}

ModelLimits Rank::limits() const {
  ModelLimits l;
  l.max_seqs = static_cast<int>(config_.integer("serve.max_seqs"));
  // Room for every sequence's row and one piece of a prompt.
  l.max_rows = std::max(static_cast<int>(config_.integer("serve.max_batched_tokens")), l.max_seqs + kChunk);
  // Each sequence's newest token and its drafts.
  l.max_window = kMostDrafts + 1;
  l.max_logit_rows = l.max_seqs * l.max_window;
  const int64_t wanted = config_.integer("serve.max_context");
  if (wanted > model_config_.max_positions)
    throw Error(Code::config,
                cat("serve.max_context is ", wanted, ", the model knows ", model_config_.max_positions, " positions"));
  l.max_context = static_cast<int>(wanted > 0 ? wanted : model_config_.max_positions);
  l.kv = kv_format(config_.text("serve.kv_format"));
  l.taps = draft_.taps;
  return l;
}

void Rank::load() {
  notifier_.phase(Phase::load_target);
  auto told = std::chrono::steady_clock::now();
  const auto begin = told;
  const LoadOptions options = load_options(config_);
  model_ =
      load_model(dir_, format_policy(config_), limits(), *ops_, *comm_, options, [&](uint64_t done, uint64_t total) {
        const auto now = std::chrono::steady_clock::now();
        if (now < told + kProgressEvery && done < total) return;
        told = now;
        notifier_.progress(done, total);
      });
  log::info(cat("loaded ", options.prepared.empty() ? dir_ : options.prepared, " in ",
                std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin).count(), " ms"));
}

void Rank::load_drafter() {
  notifier_.phase(Phase::load_draft);
  drafter_ = make_drafter(draft_, config_, format_policy(config_), *model_, *ops_, *comm_,
                          [this](bool mine) { return group_->everywhere(mine); });
  log::info(cat("drafter: ", draft_.kind, draft_.kind == "none" ? "" : cat(" of ", draft_.dir)));
}

/// Bytes of weights by group; the drafter's are named after it.
std::vector<std::pair<std::string, size_t>> Rank::weight_bytes() const {
  auto all = model_->weight_bytes();
  if (drafter_)
    for (auto& [group, bytes] : drafter_->weight_bytes()) all.emplace_back(cat(draft_.kind, " ", group), bytes);
  return all;
}

void Rank::make_pools() {
  notifier_.phase(Phase::measure);
  group_->agree({});  // nobody measures while another rank still loads
  const auto snapshots = static_cast<int>(config_.integer("cache.snapshots"));
  facts_.available = available_memory(config_.text("paths.proc"));
  const uint64_t spill = spill_memory() * static_cast<uint64_t>(facts_.ranks_on_host);
  facts_.available -= std::min(facts_.available, spill);
  facts_.reserve = static_cast<uint64_t>(config_.integer("memory.reserve"));
  facts_.kv_bytes = static_cast<uint64_t>(config_.integer("memory.kv_bytes"));
  facts_.snapshots = !config_.boolean("cache.enabled") ? 0 : snapshots > 0 ? snapshots : -1;
  facts_.max_seqs = model_->limits().max_seqs;
  facts_.max_context = model_->limits().max_context;
  PoolUnit unit = pool_unit(model_->geometry(), ops_->activation());
  if (drafter_) {
    const PoolUnit more = drafter_->pool_unit();
    unit.block += more.block;
    unit.slot += more.slot;
    unit.snap += more.snap;
  }
  const PoolSizes mine = plan_pools(facts_, unit);
  const uint64_t resident = resident_bytes(::getpid());
  notifier_.phase(Phase::pools);
  pools_ = group_->agree(mine);
  for (const std::string& line : ledger_lines(facts_, weight_bytes(), resident, unit, pools_)) log::info(line);
  caches_ = make_caches(model_->geometry(), pools_, *ops_);
  if (drafter_) drafter_->make_pools(pools_);
  make_spill();
  if (rank_.rank == 0) {
    TokenSpace space;
    space.vocab = static_cast<int32_t>(model_config_.vocab);
    space.text_vocab = text_vocab(dir_, model_config_.vocab);
    space.eos = model_config_.eos;
    space.grammars = grammars_of(dir_);
    sampling_ = std::make_unique<SamplingTable>(std::move(space));
  }
  executor_ =
      std::make_unique<ModelExecutor>(*model_, caches_.caches, *ops_, sampling_.get(), spill_.get(), drafter_.get());
  watch_steps();
}

/// Ends this rank a little before the agent would, with a reason.
void Rank::watch_steps() {
  const milliseconds limit = config_.duration("ranks.watchdog") * 9 / 10;
  watchdog_ = std::make_unique<StepWatchdog>(limit, [this, limit](uint64_t step) {
    const Error error(Code::stalled, cat("step ", step, " has not ended within ", limit.count(), " ms"),
                      "look at the accelerator and at the other ranks, or raise ranks.watchdog");
    ::_exit(report(error, notifier_));
  });
  watched_ = std::make_unique<WatchedExecutor>(*executor_, *watchdog_);
}

spill::StoreOptions Rank::spill_options() const {
  spill::StoreOptions options;
  options.memory_bytes = static_cast<uint64_t>(config_.integer("cache.spill_memory_bytes"));
  options.disk.bytes = static_cast<uint64_t>(config_.integer("cache.spill_disk_bytes"));
  return options;
}

/// That the spill tier will take, and the pools must leave.
uint64_t Rank::spill_memory() const {
  const spill::StoreOptions options = spill_options();
  return options.memory_bytes + (options.disk.bytes > 0 ? options.write_queue_bytes : 0);
}

void Rank::make_spill() {
  if (spill_memory() == 0) return;
  if (pools_.snaps == 0) {
    log::warn("nothing is spilled: the prefix cache is off (cache.enabled)");
    return;
  }
  spill::StoreOptions options = spill_options();
  const size_t block = SpillTier::block_bytes(caches_.caches), snapshot = SpillTier::snapshot_bytes(caches_.caches);
  options.disk.largest_record = std::max(block, snapshot);
  options.disk.dir = cat(config_.path("cache.spill_path"), "/rank", rank_.rank, "of", rank_.size);
  // Everything that decides the bytes of a block or a snapshot.
  options.disk.name_space = sha256_hex(cat(digest_, " ", backend_, " ", name(ops_->activation()), " ",
                                           formats_of(config_), " ", config_.text("cache.reuse_output"), " ",
                                           rank_.rank, " of ", rank_.size, " block ", block, " snapshot ", snapshot));
  log::info(cat("spilled cache: ", human_bytes(static_cast<int64_t>(options.memory_bytes)), " of memory, ",
                human_bytes(static_cast<int64_t>(options.disk.bytes)), " of disk in '", options.disk.dir, "'"));
  spill_ = std::make_unique<SpillTier>(std::move(options), caches_.caches, *ops_);
}

void Rank::serve_rank0() {
  const ModelLimits& l = model_->limits();
  SchedulerLimits s;
  s.max_context = l.max_context;
  s.max_seqs = pools_.slots;
  s.max_rows = l.max_rows;
  s.prefill_chunk = static_cast<int32_t>(config_.integer("serve.prefill_chunk"));
  s.max_window = l.max_window;
  s.layers = model_->config().layers;
  s.lookup_drafts = static_cast<int32_t>(config_.integer("draft.lookup"));
  if (drafter_) {
    const DraftTraits traits = drafter_->traits();
    s.model_drafts = std::min(draft_.max_drafts, traits.max_drafts);
    s.chained_drafter = traits.chained;
  }
  s.always_draft = config_.boolean("draft.always");
  s.blocks = pools_.blocks;
  s.snaps = pools_.snaps;
  s.reuse_output = reuse_output(config_.text("cache.reuse_output"));
  if (spill_) {
    constexpr size_t kRestoreBytes = size_t{512} << 20;
    s.spill = &spill_->store();
    s.restore_blocks = std::max<size_t>(kRestoreBytes / std::max<size_t>(SpillTier::block_bytes(caches_.caches), 1), 1);
    s.identity = {.model_revision = digest_,
                  .weights_digest = backend_,
                  .kv_format = config_.text("serve.kv_format"),
                  .kpool = model_config_.kpool,
                  .topk = model_config_.index_topk};
  }
  s.snap_interval = static_cast<int32_t>(config_.integer("cache.interval"));
  s.max_queue = static_cast<size_t>(config_.integer("sched.max_queue"));
  s.max_queue_tokens = static_cast<size_t>(config_.integer("sched.max_queue_tokens"));
  s.reserve_output = static_cast<int32_t>(config_.integer("sched.reserve_output"));
  s.prefill_share = config_.real("sched.prefill_share");
  s.max_piece_ms = static_cast<double>(config_.duration("sched.max_piece").count());
  s.aging = config_.duration("sched.aging");
  s.patience = config_.duration("sched.patience");
  Scheduler scheduler(s, *sampling_, rank_.generation);
  wire::Hello hello;
  hello.generation = rank_.generation;
  hello.model_digest = sha256_hex(cat(digest_, " ", backend_, " ", formats_of(config_), " ", rank_.size));
  hello.vocab = sampling_->space().vocab;
  hello.max_context = l.max_context;
  hello.max_seqs = l.max_seqs;
  hello.eos = model_config_.eos;
  StepPlan warm_up;
  warm_up.generation = rank_.generation;
  SeqStep seq;
  seq.slot = SlotId{0};
  seq.tokens = {0, 0, 0};
  seq.append = {BlockId{1}};
  seq.logits = 1;
  warm_up.seqs.push_back(std::move(seq));
  StepLoop loop(parts(), scheduler, rank_.api_socket, hello);
  loop.run(warm_up, [this] { say_ready(); });
}

void Rank::say_ready() {
  signals_.serving();
  guard_memory();
  notifier_.ready();
  log::info("ready");
}

/// From now on; pools and weights have been taken from what was available before.
void Rank::guard_memory() {
  if (facts_.reserve == 0) {
    log::warn("memory.reserve is 0: nothing guards the memory of the machine");
    return;
  }
  MemoryGuard::Options options;
  options.proc = config_.text("paths.proc");
  options.reserve = facts_.reserve;
  guard_ = std::make_unique<MemoryGuard>(
      std::move(options), [this, before = MemoryLevel::ok](MemoryLevel level, const MemoryReading& reading) mutable {
        controls_.set_memory(level, reading.available);
        if (level == MemoryLevel::low && before < level) drop_page_cache(dir_);
        if (level == MemoryLevel::critical) {
          const Error error(Code::memory,
                            cat("only ", human_bytes(static_cast<int64_t>(reading.available)),
                                " of memory are available on this machine"),
                            "stop other programs, lower memory.kv_bytes or raise memory.reserve");
          // At once and without tidying: every further allocation may be the one that hangs the machine.
          ::_exit(report(error, notifier_));
        }
        before = level;
      });
}

/// Runs on the admin thread.
Json Rank::admin(const std::string& command) {
  if (command == "gate_open" || command == "gate_close") {
    controls_.open_gate(command == "gate_open");
    return Json::object();
  }
  if (command == "drain") {
    controls_.drain();
    return Json::object();
  }
  if (command == "cache_reset") {
    controls_.reset_cache();
    return Json::object();
  }
  if (command != "counters")
    throw Error(Code::usage, cat("unknown command '", command, "'"),
                "gate_open, gate_close, drain, counters or cache_reset");
  const wire::Stats s = controls_.stats();
  if (rank_.rank != 0)
    return {{"step", s.step},
            {"memory_bytes", s.memory_bytes},
            {"memory_available", s.memory_available},
            {"memory_level", name(controls_.memory())}};
  return {{"step", s.step},
          {"running", s.running},
          {"waiting", s.waiting},
          {"blocks_used", s.blocks_used},
          {"blocks_total", s.blocks_total},
          {"slots_used", s.slots_used},
          {"slots_total", s.slots_total},
          {"prompt_tokens", s.prompt_tokens},
          {"generated_tokens", s.generated_tokens},
          {"blocks_cached", s.blocks_cached},
          {"snaps_used", s.snaps_used},
          {"snaps_total", s.snaps_total},
          {"prefix_queries", s.prefix_queries},
          {"prefix_hits", s.prefix_hits},
          {"snaps_written", s.snaps_written},
          {"snaps_evicted", s.snaps_evicted},
          {"blocks_evicted", s.blocks_evicted},
          {"preemptions", s.preemptions},
          {"draft_steps", s.draft_steps},
          {"draft_tokens", s.draft_tokens},
          {"draft_accepted", s.draft_accepted},
          {"draft_accepted_at", s.draft_accepted_at},
          {"drafter", draft_.kind},
          {"drafter_fallback", draft_.fallback},
          {"drafter_paused", s.drafter_paused},
          {"spill_memory_bytes", s.spill_memory_bytes},
          {"spill_disk_bytes", s.spill_disk_bytes},
          {"spill_disk_ok", s.spill_disk_ok},
          {"spilled", s.spilled},
          {"spill_dropped", s.spill_dropped},
          {"restores", s.restores},
          {"restores_failed", s.restores_failed},
          {"progress_age_ms", s.progress_age_ms},
          {"memory_bytes", s.memory_bytes},
          {"memory_available", s.memory_available},
          {"memory_level", name(static_cast<MemoryLevel>(s.memory_level))},
          {"gate_open", s.gate_open},
          {"peers_alive", s.peers_alive}};
}

}  // namespace

int run_rank(int config_fd) {
  Notifier notifier;
  notifier.phase(Phase::exec);
  try {
    Controls controls;
    SignalWatch signals(controls, notifier);
    Rank(parse_rank_config(read_all(config_fd)), notifier, controls, signals).run();
    Notice notice;
    notice.stopping = true;
    notifier.send(notice);
    return rank_exit(Code::ok);
  } catch (const Error& e) {
    return report(e, notifier);
  } catch (const std::bad_alloc&) {
    return report(Error(Code::memory, "out of memory"), notifier);
  } catch (const std::exception& e) {
    return report(Error(Code::internal, e.what()), notifier);
  }
}

}  // namespace glm53
