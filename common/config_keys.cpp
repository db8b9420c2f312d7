// The table of configuration keys: the only place where a key, its default and its bounds are written.
#include <array>

#include "common/config.h"

namespace glm53 {
namespace {

using enum KeyType;
constexpr auto kNode = KeyScope::node;
constexpr auto kCluster = KeyScope::cluster;
constexpr double kMiB = 1024.0 * 1024.0;
constexpr double kHour = 3600e3;

constexpr std::array kKeys{
    ConfigKey{"node.name", text, kNode, "", "", "Name of this machine in status and logs; empty: its role."},
    ConfigKey{"node.role", text, kNode, "head", "",
              "What this machine is: the head serves the API and decides, a worker executes.", 0, 0, "head|worker"},
    ConfigKey{"paths.state", text, kNode, "/var/lib/glm53", "", "Folder of the agent's database."},
    ConfigKey{"paths.run", text, kNode, "/run/glm53", "", "Folder of sockets; emptied of stale ones at start."},
    ConfigKey{"paths.logs", text, kNode, "/var/log/glm53", "",
              "Folder of process logs, one file a process and generation."},
    ConfigKey{"paths.proc", text, kCluster, "/proc", "",
              "Where the kernel tells of memory (meminfo, pressure/memory); another folder in tests."},
    ConfigKey{"admin.socket", text, kNode, "", "", "Unix socket of the admin API; empty: agent.sock in paths.run."},
    ConfigKey{"admin.listen", text, kNode, "", "",
              "Address and port of the admin API over TCP, such as 10.0.0.1:8890; empty: only the unix socket."},
    ConfigKey{"admin.tls", text, kNode, "auto", "",
              "Whether TCP connections between agents are mutual TLS with the cluster's certificates (glm53ctl cluster "
              "init); auto: unless the address is loopback; off: only loopback addresses.",
              0, 0, "auto|on|off"},
    ConfigKey{"admin.token_file", text, kNode, "", "",
              "File with the bearer token of the admin API over TCP without TLS; must be readable by its owner only."},
    ConfigKey{"log.level", text, kNode, "info", "", "Least severity that is logged.", 0, 0, "debug|info|warn|error"},
    ConfigKey{"log.requests", boolean, kCluster, "false", "",
              "Whether the API process logs a line for each finished request: id, tokens, times; no text of it."},
    ConfigKey{"log.keep_generations", integer, kNode, "5", "generations",
              "How many generations of process logs are kept.", 1, 1000},
    ConfigKey{"log.max_bytes", bytes, kNode, "64MiB", "bytes",
              "A log file is rotated at this size; eight pieces are kept.", 64 * 1024, 1024 * kMiB},

    ConfigKey{"cluster.name", text, kCluster, "glm53", "", "Name of the cluster."},
    ConfigKey{"topology.ranks", list, kCluster, "head:0,worker:0", "",
              "Where each rank runs, as node:device, rank 0 first. Rank 0 must be on the head."},
    ConfigKey{"head.fabric_address", text, kCluster, "127.0.0.1", "",
              "Address of the head that ranks use among themselves."},
    ConfigKey{"worker.admin", text, kCluster, "", "",
              "Address and port of the worker's admin API, such as 10.0.0.2:8890; empty: a cluster of one node."},
    ConfigKey{"worker.token_file", text, kCluster, "", "",
              "File with the worker's admin token, where it is reached without TLS; empty: the head's own."},
    ConfigKey{"worker.fabric_address", text, kCluster, "127.0.0.2", "",
              "Address of the worker that ranks use among themselves."},
    ConfigKey{"ranks.port", integer, kCluster, "29521", "port", "Port on the head where ranks meet.", 1, 65535},
    ConfigKey{"ranks.ready_timeout", duration, kCluster, "3600s", "time", "Longest time from start to ready.", 1e3,
              24 * kHour},
    ConfigKey{"ranks.stall_timeout", duration, kCluster, "180s", "time",
              "Longest time without progress within a phase of the start.", 1e3, kHour},
    ConfigKey{"ranks.watchdog", duration, kCluster, "30s", "time",
              "A rank that is ready must turn its step loop within this time.", 1e3, kHour},
    ConfigKey{"ranks.collective_timeout", duration, kCluster, "20s", "time",
              "Longest wait for the peer within a collective.", 100, kHour},
    ConfigKey{"ranks.collectives", text, kCluster, "nccl", "",
              "How ranks on GPUs add up: nccl, each on a GPU of its own; host: through host memory, slow, for ranks "
              "that share one.",
              0, 0, "nccl|host"},
    ConfigKey{"ranks.orphan_timeout", duration, kCluster, "60s", "time",
              "A worker stops its ranks when the head has been silent this long.", 1e3, kHour},
    ConfigKey{"ranks.stop_grace", duration, kCluster, "20s", "time", "From SIGTERM to SIGKILL.", 0, kHour},
    ConfigKey{"ranks.max_restarts", integer, kCluster, "3", "per hour",
              "Automatic restarts within an hour before the cluster is failed.", 0, 1000},

    ConfigKey{"engine.path", text, kNode, "", "",
              "The engine program; empty: glm53-engine beside the agent's program."},
    ConfigKey{"engine.rank_path", text, kNode, "", "",
              "Another program that keeps the rank contract, started instead of the engine as a rank; for tests."},
    ConfigKey{"engine.backend", text, kCluster, "auto", "",
              "Where the model runs; auto: cuda when it is compiled in and a device is there.", 0, 0, "auto|cpu|cuda"},
    ConfigKey{"engine.dense", text, kCluster, "stored", "",
              "Format of the dense linears (KDA, MLA, shared expert, dense MLP), converted while loading: as stored, "
              "fp8 (8 bits a weight) or int4 (4.5 bits). What it costs in quality: docs/performance.md.",
              0, 0, "stored|fp8|int4"},
    ConfigKey{"engine.head", text, kCluster, "stored", "", "The same of the output head.", 0, 0, "stored|fp8|int4"},
    ConfigKey{"engine.threads", integer, kNode, "0", "threads",
              "Threads of a CPU rank; 0: cores divided by the ranks on this machine.", 0, 1024},
    ConfigKey{"model.path", text, kCluster, "", "",
              "Folder of the checkpoint, the same on every node; empty: model.repo names it."},
    ConfigKey{
        "model.repo", text, kCluster, "", "",
        "Repository of the checkpoint. A start downloads what a node's cache lacks; glm53ctl download does it before."},
    ConfigKey{
        "model.revision", text, kCluster, "", "",
        "Its commit (40 hex digits). glm53ctl download also takes a branch or tag; a start does not: branches move."},
    ConfigKey{"model.fallback_repo", text, kCluster, "", "",
              "Repository with the same bytes, used when model.repo cannot be had; empty: none."},
    ConfigKey{"model.fallback_revision", text, kCluster, "", "", "Its commit."},
    ConfigKey{"draft.path", text, kCluster, "", "",
              "Folder of the drafter's checkpoint; empty: draft.repo names it, or no drafter."},
    ConfigKey{"draft.repo", text, kCluster, "", "", "Repository of the drafter's checkpoint."},
    ConfigKey{"draft.revision", text, kCluster, "", "", "Its commit, branch or tag; empty: main."},
    ConfigKey{"draft.kind", text, kCluster, "auto", "",
              "Which drafter proposes tokens ahead: dflash2, of draft.path; mtp, the layer that checkpoints bring "
              "along; none; auto: dflash2 where one is named, else mtp where there is one. Text is the same with each.",
              0, 0, "auto|none|mtp|dflash2"},
    ConfigKey{"draft.fallback", boolean, kCluster, "false", "",
              "Serve without drafter when the one wanted cannot be used; else that ends the start."},
    ConfigKey{"draft.max_drafts", integer, kCluster, "7", "tokens",
              "Most drafts of the drafter for a sequence in a step; how many are used is decided by what they bring.",
              0, 15},
    ConfigKey{"draft.lookup", integer, kCluster, "15", "tokens",
              "Most drafts copied from a request's own text; 0: none.", 0, 15},
    ConfigKey{"draft.always", boolean, kCluster, "false", "",
              "Use as many drafts as there may be whatever they bring; for measurements."},

    ConfigKey{
        "hub.home", text, kNode, "", "",
        "Folder of the Hugging Face cache (its sub-folder hub holds the repositories); empty: folder huggingface in "
        "paths.state for the agent, HF_HOME or ~/.cache/huggingface for glm53ctl download."},
    ConfigKey{"hub.endpoint", text, kNode, "https://huggingface.co", "", "Where repositories are asked for."},
    ConfigKey{"hub.mirrors", list, kNode, "", "",
              "Further endpoints that hold the same repositories; they get no token unless hub.token_hosts says so."},
    ConfigKey{"hub.token_file", text, kNode, "", "",
              "File with the Hub's token; must be readable by its owner only. Empty: the file token in hub.home."},
    ConfigKey{"hub.token_hosts", list, kNode, "", "",
              "Hosts besides the endpoint's that may see the token, as host or host:port."},
    ConfigKey{"hub.ca_file", text, kNode, "", "", "Certificates to trust instead of the system's."},
    ConfigKey{"hub.offline", boolean, kNode, "false", "", "Never connect to the Hub; use what the cache holds."},
    ConfigKey{"hub.exclude", list, kNode,
              "runtime-results/**,src/**,runtime/**,scripts/**,docs/**,results/**,.materialization/**", "",
              "Globs of files that are not fetched. Configuration, tokenizer and shards always are."},
    ConfigKey{"hub.parallel_files", integer, kNode, "4", "files", "Files that are fetched at the same time.", 1, 32},
    ConfigKey{"hub.parallel_ranges", integer, kNode, "4", "connections", "Connections a file over 256 MiB.", 1, 32},
    ConfigKey{"hub.segment_bytes", bytes, kNode, "64MiB", "bytes", "Piece of a big file that one request fetches.",
              64 * 1024, 1024 * kMiB},
    ConfigKey{"hub.limit_rate", bytes, kNode, "0", "bytes a second", "Most that a download takes; 0: no limit.", 0,
              1e15},
    ConfigKey{"hub.disk_reserve", bytes, kNode, "5GiB", "bytes",
              "What a download leaves free, or 3 % of the disk if that is more; 0: nothing.", 0, 1e15},
    ConfigKey{"hub.keep_bad", boolean, kNode, "false", "",
              "Keep a file whose digest is wrong, as ETAG.bad-TIME, to look at."},
    ConfigKey{"hub.connect_timeout", duration, kNode, "10s", "time", "Longest time to connect.", 100, kHour},
    ConfigKey{"hub.first_byte_timeout", duration, kNode, "30s", "time", "Longest time to the first byte of an answer.",
              100, kHour},
    ConfigKey{"hub.stall_timeout", duration, kNode, "30s", "time",
              "A connection that brings less than 64 KB a second this long is replaced.", 100, kHour},
    ConfigKey{"hub.give_up_after", duration, kNode, "10m", "time", "Attempts go on this long without any progress.",
              100, 24 * kHour},
    ConfigKey{"hub.max_wait", duration, kNode, "15m", "time", "Longest wait that a rate limit may ask for.", 100,
              24 * kHour},

    ConfigKey{"sync.worker_source", text, kNode, "head", "",
              "On the head: where the worker gets a model that is named by repository, a copy of the head's or its own "
              "hub.*.",
              0, 0, "head|hub"},
    ConfigKey{"sync.streams", integer, kNode, "6", "connections", "On the head: connections of a copy to the worker.",
              1, 16},
    ConfigKey{"sync.limit_rate", bytes, kNode, "0", "bytes a second",
              "On the head: most that a copy takes; 0: no limit, but 200 MB/s while the cluster serves.", 0, 1e15},

    ConfigKey{"serve.max_context", integer, kCluster, "0", "tokens",
              "Longest prompt plus output; 0: what the model allows.", 0, 1048576},
    ConfigKey{"serve.max_seqs", integer, kCluster, "8", "sequences", "Sequences that run at the same time.", 1, 4096},
    ConfigKey{"serve.max_batched_tokens", integer, kCluster, "512", "tokens", "Rows of one step.", 64, 65536},
    ConfigKey{"serve.prefill_chunk", integer, kCluster, "256", "tokens", "Largest piece of a prompt; a multiple of 64.",
              64, 65536},
    ConfigKey{"serve.default_max_tokens", integer, kCluster, "0", "tokens",
              "Output limit of requests that name none; 0: what fits the context.", 0, 1048576},
    ConfigKey{"serve.kv_format", text, kCluster, "auto", "",
              "Storage of latents; auto: f32 on the CPU, fp8_c528 on CUDA.", 0, 0, "auto|f32|bf16|fp8_c528|int8_c528"},
    ConfigKey{"memory.kv_bytes", bytes, kCluster, "0", "bytes",
              "Size of the KV cache on each rank; 0: as many blocks as serve.max_seqs full contexts need, within what "
              "is free.",
              0, 1e15},
    ConfigKey{
        "memory.reserve", bytes, kCluster, "1GiB", "bytes",
        "Memory of the machine that stays free. The memory guard's thresholds follow it (docs/operating.md); 0: no "
        "guard.",
        0, 1e15},
    ConfigKey{"sched.max_queue", integer, kCluster, "1024", "requests", "Requests that may wait; beyond: 429.", 0, 1e6},
    ConfigKey{"sched.max_queue_tokens", integer, kCluster, "4000000", "tokens",
              "Prompt tokens that may wait; beyond: 429.", 1, 1e12},
    ConfigKey{"sched.prefill_share", real, kCluster, "0.4", "",
              "Part of the time that reading prompts may take while other requests generate.", 0.01, 0.99},
    ConfigKey{"sched.max_piece", duration, kCluster, "600ms", "time",
              "Longest piece of a prompt, in its own time through all layers, that is read while other requests "
              "generate; one chunk of 64 tokens at least.",
              1, kHour},
    ConfigKey{"sched.reserve_output", integer, kCluster, "256", "tokens",
              "A request starts when the KV cache has room for its prompt and so many tokens of output.", 1, 1048576},
    ConfigKey{"sched.aging", duration, kCluster, "60s", "time",
              "A waiting request gains one priority class each time it has waited this long.", 1, 24 * kHour},
    ConfigKey{"sched.patience", duration, kCluster, "120s", "time",
              "A request that has waited this long for room in the KV cache is not overtaken by smaller ones any more.",
              0, 24 * kHour},

    ConfigKey{"cache.enabled", boolean, kCluster, "true", "",
              "Whether the beginning of a prompt that was read before is reused (prefix cache)."},
    ConfigKey{
        "cache.snapshots", integer, kCluster, "0", "snapshots",
        "States that the prefix cache keeps; 0: 15% of the KV cache's size, at least 8 and two a sequence, at most 64, "
        "within what is free.",
        0, 100000},
    ConfigKey{"cache.interval", integer, kCluster, "8192", "tokens",
              "A long prompt's state is kept every so many tokens, besides where conversations branch; 0: only there.",
              0, 1048576},
    ConfigKey{
        "cache.reuse_output", text, kCluster, "idle", "",
        "Whether a later request finds an answer in the prefix cache; never: it is read again as part of that "
        "prompt; idle: it is read again ahead of time, while nothing else is to do; always: it is found as it was "
        "generated, whose rounding is not that of a prompt.",
        0, 0, "never|idle|always"},
    ConfigKey{"cache.spill_memory_bytes", bytes, kCluster, "0", "bytes",
              "Host memory of each rank for what the prefix cache evicts; 0: none.", 0, 1e15},
    ConfigKey{"cache.spill_disk_bytes", bytes, kCluster, "0", "bytes",
              "Disk space of each rank for what the prefix cache evicts; found again after a restart. 0: none.", 0,
              1e15},
    ConfigKey{"cache.spill_path", text, kCluster, "/var/lib/glm53/spill", "",
              "Folder for it on each machine, on a fast local disk; each rank has a folder of its own in it."},

    ConfigKey{"api.bind", text, kCluster, "127.0.0.1", "",
              "Address of the OpenAI-compatible API. Set api.key_file before opening it to a network."},
    ConfigKey{"api.port", integer, kCluster, "8888", "port", "Port of the OpenAI-compatible API.", 1, 65535},
    ConfigKey{"api.key_file", text, kCluster, "", "",
              "File with the API keys, one a line, optionally name:key; empty: no key is asked for."},
    ConfigKey{"api.model_name", text, kCluster, "", "",
              "Name under which the model is served; empty: the name of its folder."},
    ConfigKey{"api.aliases", list, kCluster, "", "", "Further names of the model."},
    ConfigKey{"api.metrics_open", boolean, kCluster, "false", "", "Whether /metrics answers without a key."},
    ConfigKey{"api.page", boolean, kCluster, "true", "",
              "Whether / answers with the built-in chat page. The page itself needs no key; what it asks does."},
    ConfigKey{"api.cors_origins", list, kCluster, "", "",
              "Origins that browsers may call from. This version sends no CORS headers: only empty is accepted."},
    ConfigKey{"api.max_body", bytes, kCluster, "64MiB", "bytes", "Largest request body.", 1024, 1024 * kMiB},
    ConfigKey{"api.max_connections", integer, kCluster, "20000", "connections", "Connections at the same time.", 1,
              1e6},
    ConfigKey{"api.keepalive", duration, kCluster, "15s", "time", "A stream that is silent this long gets a comment.",
              100, kHour},
    ConfigKey{"api.always_think", boolean, kCluster, "false", "",
              "Ignore requests to switch thinking off, as the stock template does."},
    ConfigKey{"api.escape_control_tokens", boolean, kCluster, "false", "",
              "Encode control tokens spelled in message content as ordinary text."},
};

}  // namespace

std::span<const ConfigKey> config_keys() {
  return kKeys;
}

}  // namespace glm53
