// The table of the recipe's variables; nothing but it.
#include <algorithm>
#include <array>
#include <cmath>

#include "cli/recipe.h"
#include "common/error.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

std::string seconds(const std::string& v) {
  return v.empty() ? v : v + "s";
}
std::string gigabytes(const std::string& v) {
  return v.empty() ? v : v + "GiB";
}
std::string first_word(const std::string& v) {
  return v.substr(0, v.find(' '));
}
/// The fraction of a GB10's memory that the recipe gives to vLLM leaves the rest free.
std::string rest_of_memory(const std::string& v) {
  constexpr double kGiB = 119;  // MemTotal of a GB10
  const auto share = parse_double(v);
  if (!share || *share <= 0 || *share > 1) throw Error(Code::usage, cat("'", v, "' is no share of the memory"));
  return cat(static_cast<int64_t>(std::lround((1 - *share) * kGiB * 1024)), "MiB");
}
std::string kv_format(const std::string& v) {
  if (v == "fp8" || v == "fp8_e4m3") return "fp8_c528";
  if (v == "bfloat16" || v == "bf16") return "bf16";
  if (v.empty() || v == "auto") return "auto";
  throw Error(Code::usage, cat("'", v, "' is no format of the KV cache"), "fp8, bfloat16 or auto");
}
/// Of vLLM's options the one that the recipe's newer templates use.
std::string kv_bytes(const std::string& v) {
  constexpr std::string_view kOption = "--kv-cache-memory-bytes";
  const auto words = split(v, ' ');
  std::vector<std::string> rest;
  std::string bytes;
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == kOption && i + 1 < words.size()) {
      bytes = words[++i];
    } else if (words[i].starts_with(kOption) && words[i].find('=') != std::string::npos) {
      bytes = words[i].substr(words[i].find('=') + 1);
    } else if (!words[i].empty()) {
      rest.push_back(words[i]);
    }
  }
  if (!rest.empty())
    throw Error(Code::usage, cat("vLLM's options have no meaning here: ", join(rest, " ")), "remove them");
  return bytes;
}

constexpr std::string_view kNoContainer =
    "no container and no image: programs and units are installed (docs/operating.md)";
constexpr std::string_view kNoJit = "nothing is compiled at run time";
constexpr std::string_view kFixed = "kernels are chosen by the device and the weights; a figure decides, no knob";
constexpr std::string_view kNccl =
    "set NCCL_… in the agent's environment (systemctl edit glm53-agent); it goes to the ranks";
constexpr std::string_view kPriced = "how many drafts are verified is chosen by what they bring (docs/speculation.md)";

/// auto takes the drafter that DFLASH_MODEL names.
std::string drafter_kind(const std::string& method) {
  return method == "mtp" || method == "none" ? method : "auto";
}
constexpr std::string_view kNoVision = "no vision in this version: images and video are refused";
constexpr std::string_view kNoAblit =
    "no edit of weights at load time in this version; name an edited checkpoint in model.repo";
constexpr std::string_view kFound = "found by itself from the fabric addresses; glm53ctl doctor shows it";
constexpr std::string_view kOnWorker = "the worker's agent knows its own folders: set hub.home in its file";
constexpr std::string_view kSched = "the scheduler splits prompts by time: sched.prefill_share and sched.max_piece";

constexpr std::array kKnobs{
    // Nodes
    Knob{"HEAD_IP", "head.fabric_address", "also the host of admin.listen on the head"},
    Knob{"WORKER_IP", "worker.fabric_address", "also the host of worker.admin, and of admin.listen on the worker"},
    Knob{"WORKER_USER", "", "no SSH at run time: the agents speak TLS (glm53ctl cluster join)"},
    Knob{"WORKER_HOME", "", kOnWorker},
    Knob{"WORKER_SSH", "", "no SSH at run time: the agents speak TLS (glm53ctl cluster join)"},
    Knob{"CONTAINER_HEAD", "", kNoContainer},
    Knob{"CONTAINER_WORKER", "", kNoContainer},
    Knob{"CLUSTER_LOCK_WAIT", "", "a start that is at work is named at once; glm53ctl stop --preempt ends it"},
    // Fabric
    Knob{"HEAD_CX7_IF", "", kFound},
    Knob{"WORKER_CX7_IF", "", kFound},
    Knob{"HEAD_CX7_IB", "", kFound},
    Knob{"WORKER_CX7_IB", "", kFound},
    Knob{"NCCL_IB_GID_INDEX", "", kFound},
    Knob{"HEAD_GID", "", kFound},
    Knob{"WORKER_GID", "", kFound},
    Knob{"NCCL_CROSS_NIC", "", kNccl},
    Knob{"NCCL_NCHANNELS", "", kNccl},
    Knob{"NCCL_DEBUG", "", kNccl},
    Knob{"USE_HOST_NCCL", "", "NCCL is the one beside the engine"},
    Knob{"NCCL_HOST_DIR", "", "NCCL is the one beside the engine"},
    Knob{"WORKER_NCCL_HOST_DIR", "", "NCCL is the one beside the engine"},
    Knob{"NCCL_SO_NAME", "", "NCCL is the one beside the engine"},
    Knob{"MASTER_PORT", "ranks.port", ""},
    Knob{"TP", "", "topology.ranks names the ranks: [\"head:0\", \"worker:0\"]"},
    Knob{"NNODES", "", "topology.ranks names the ranks: [\"head:0\", \"worker:0\"]"},
    Knob{"NFS_SHARE", "", "each node has its own copy: a start brings it there (glm53ctl sync)"},
    // Weights
    Knob{"MODEL", "model.repo", ""},
    Knob{"MODEL_REVISION", "model.revision", "a commit; a branch is refused, because branches move"},
    Knob{"MODEL_FALLBACK", "model.fallback_repo", "set model.fallback_revision too"},
    Knob{"MODEL_CACHE_NAME", "", "folders follow from the repository; content is found by digest in any of them"},
    Knob{"MODEL_FALLBACK_CACHE_NAME", "",
         "folders follow from the repository; content is found by digest in any of them"},
    Knob{"DFLASH_CACHE_NAME", "", "folders follow from the repository; content is found by digest in any of them"},
    Knob{"EXPECTED_SHARDS", "", "the checkpoint's index says which shards there are, and every one is verified"},
    Knob{"GLM53_MODEL_PRESET", "", "name repository and commit in model.repo and model.revision"},
    Knob{"DFLASH_MODEL", "draft.repo", ""},
    Knob{"DFLASH_REVISION", "draft.revision", ""},
    Knob{"HF_HOME", "hub.home", "of the head; the worker's file has its own"},
    Knob{"HF_TOKEN", "", "write it to a file of mode 0600 and name that in hub.token_file", nullptr, true},
    Knob{"HF_BIN", "", "downloads need no other program"},
    Knob{"HF_DOWNLOAD_EXCLUDE", "hub.exclude", ""},
    Knob{"SKIP_DOWNLOAD", "", "what is complete is not downloaded; hub.offline = true opens no connection"},
    Knob{"REFRESH_WEIGHTS", "", "glm53ctl download --verify"},
    Knob{"SKIP_SYNC", "", "what the worker has is not copied"},
    Knob{"FORCE_SYNC", "", "glm53ctl sync; content is verified on both sides"},
    // Image
    Knob{"IMAGE", "", kNoContainer},
    Knob{"IMAGE_PLATFORM", "", kNoContainer},
    Knob{"GHCR_USER", "", kNoContainer},
    Knob{"GHCR_TOKEN", "", kNoContainer, nullptr, true},
    Knob{"BUILD", "", kNoContainer},
    Knob{"PULL", "", kNoContainer},
    Knob{"SKIP_PULL", "", kNoContainer},
    Knob{"SKIP_BUILD", "", kNoContainer},
    Knob{"SKIP_SHIP", "", kNoContainer},
    Knob{"SKIP_OVERLAY_VERIFY", "", "no overlay: the engine is one program"},
    Knob{"EXL3_OVERLAY_HOST", "", "no overlay: the engine is one program"},
    Knob{"CHAT_TEMPLATE_HOST", "", "the chat format is part of the engine"},
    Knob{"CHAT_TEMPLATE", "", "the chat format is part of the engine"},
    Knob{"GLM53_VALIDATE_PYTHON", "", "no Python"},
    // Serving
    Knob{"PORT", "api.port", ""},
    Knob{"SERVED_MODEL_NAME", "api.model_name", "the first name; further ones are api.aliases", first_word},
    Knob{"VLLM_API_KEY", "", "write it to a file of mode 0600 and name that in api.key_file", nullptr, true},
    Knob{"MAX_MODEL_LEN", "serve.max_context", ""},
    Knob{"MAX_NUM_SEQS", "serve.max_seqs", ""},
    Knob{"MAX_NUM_BATCHED_TOKENS", "serve.max_batched_tokens", ""},
    Knob{"LONG_PREFILL_TOKEN_THRESHOLD", "", kSched},
    Knob{"DEFAULT_MAX_NEW_TOKENS", "serve.default_max_tokens", "",
         [](const std::string& v) { return v.empty() ? "0" : v; }},
    Knob{"GPU_MEM_UTIL", "memory.reserve", "as the memory that stays free: (1 - value) of 119 GiB", rest_of_memory},
    Knob{"KV_CACHE_DTYPE", "serve.kv_format", "fp8 is fp8_c528, bfloat16 is bf16", kv_format},
    Knob{"EXTRA_ARGS", "memory.kv_bytes", "of --kv-cache-memory-bytes; other options of vLLM are refused", kv_bytes},
    Knob{"QUANTIZATION", "", "the format is read from the checkpoint"},
    Knob{"ENFORCE_EAGER", "", kFixed},
    Knob{"LOAD_FORMAT", "", "one loader"},
    Knob{"GLM53_LOAD_CLONE", "", "one loader"},
    Knob{"GLM53_LOAD_PREFETCH", "", "one loader"},
    Knob{"PREFIX_MATCH_UNIT", "", "the prefix cache works in blocks of 64 tokens"},
    Knob{"CG_ESTIMATE", "", "memory is measured, not estimated: the ledger in the rank's log"},
    Knob{"CACHE_ROOT", "", kNoJit},
    Knob{"WORKER_VLLM_CACHE", "", kNoJit},
    Knob{"TRITON_HOST_CACHE", "", kNoJit},
    Knob{"TILELANG_HOST_CACHE", "", kNoJit},
    Knob{"NV_HOST_CACHE", "", kNoJit},
    Knob{"WORKER_TRITON_CACHE", "", kNoJit},
    Knob{"WORKER_TILELANG_CACHE", "", kNoJit},
    Knob{"WORKER_NV_CACHE", "", kNoJit},
    // Speculation
    Knob{"SPEC_METHOD", "draft.kind", "", drafter_kind},
    Knob{"DFLASH_TOKENS", "draft.max_drafts", ""},
    Knob{"DFLASH_DRAFT_TP", "", "the drafter is divided as the model is"},
    Knob{"MTP_TOKENS", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K_SET", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K_ALPHA", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K_MARGIN", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K_MIN_STEPS", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K_SATURATE", "", kPriced},
    Knob{"GLM53_ADAPTIVE_K_HIST", "", kPriced},
    Knob{"GLM53_DRAFT_KV_COMPACT", "", "the drafter keeps its window only"},
    // Kernels
    Knob{"EXL3_FUSED_MOE", "", kFixed},
    Knob{"EXL3_MOE_ROW_TILE", "", kFixed},
    Knob{"EXL3_FAT_SORTED", "", kFixed},
    Knob{"EXL3_FAT_BATCHED", "", kFixed},
    Knob{"EXL3_FAT_KERNEL", "", kFixed},
    Knob{"EXL3_FAT_GROUPED", "", kFixed},
    Knob{"EXL3_TEMP_ROWS_FUSED", "", kFixed},
    Knob{"GLM53_EXL3_MOE_FAST", "", kFixed},
    Knob{"GLM53_DENSE_FP8", "", kFixed},
    Knob{"GLM53_KDA_BF16_LARGE_M", "", kFixed},
    Knob{"GLM53_DENSE_EXL3", "", kFixed},
    Knob{"GLM53_DENSE_EXL3_PREFILL_BF16", "", kFixed},
    Knob{"GLM53_COOP_GEOMETRY", "", kFixed},
    Knob{"GLM53_INDEXER_WORKSPACE", "", kFixed},
    Knob{"GLM53_SPINWAIT_MS", "", kFixed},
    // Scheduling
    Knob{"GLM53_MIXED_PREFILL_CHUNK", "", kSched},
    Knob{"GLM53_FAIR_PREFILL_CHUNK", "", kSched},
    Knob{"GLM53_FAIR_PREFILL_SHARE", "sched.prefill_share", ""},
    Knob{"GLM53_FAIR_PREFILL_MAX_INTERVAL_MS", "", kSched},
    Knob{"GLM53_FAIR_PREFILL_MAX_STEP_MS", "", kSched},
    Knob{"GLM53_FAIR_PREFILL_MAX_CHUNKS", "", kSched},
    Knob{"GLM53_MIXED_PREFILL_WARM_TOKENS", "", kSched},
    Knob{"GLM53_MIXED_PREFILL_MAX_WAIT_MS", "", kSched},
    Knob{"GLM53_MIXED_PREFILL_LATE_CAP", "", kSched},
    // Prefix cache
    Knob{"GLM53_APC_NO_STORE", "", "what is worth keeping is decided by value; cache.enabled = false keeps nothing"},
    Knob{"GLM53_APC_RETENTION_INTERVAL", "cache.interval", ""},
    Knob{"GLM53_APC_RETENTION_INTERVAL_SWA", "", kPriced},
    Knob{"GLM53_KV_CAPACITY_LOG", "", "always: the ledger in the rank's log, glm53ctl status, /metrics"},
    Knob{"GLM53_EXPOSE_CACHE_RESET", "", "the prefix cache is reset at the rank's admin socket only"},
    Knob{"GLM53_KV_OFFLOAD", "", "set cache.spill_memory_bytes or cache.spill_disk_bytes"},
    Knob{"GLM53_KV_OFFLOAD_DIR", "cache.spill_path", ""},
    Knob{"GLM53_KV_OFFLOAD_CPU_GB", "cache.spill_memory_bytes", "", gigabytes},
    Knob{"GLM53_KV_OFFLOAD_RESTORE", "", "what lies on the disk is found again after a restart"},
    Knob{"GLM53_KV_OFFLOAD_KEEP_BOUNDARIES", "", "what is worth keeping is decided by value"},
    // Vision
    Knob{"LANGUAGE_MODEL_ONLY", "", kNoVision},
    Knob{"SKIP_MM_PROFILING", "", kNoVision},
    Knob{"LIMIT_MM", "", kNoVision},
    Knob{"MM_IMAGE_TOKENS", "", kNoVision},
    Knob{"VIDEO_NUM_FRAMES", "", kNoVision},
    Knob{"MM_PROCESSOR_CACHE_GB", "", kNoVision},
    // Reasoning
    Knob{"GLM53_DEFAULT_REASONING_EFFORT", "", "a request says it (docs/api.md)"},
    Knob{"GLM53_SUPPRESS_STOPS_IN_REASONING", "", "always: stop strings count in the answer only"},
    // Abliteration
    Knob{"ABLIT", "", kNoAblit},
    Knob{"ABLIT_METHOD", "", kNoAblit},
    Knob{"ABLIT_DIRECTION", "", kNoAblit},
    Knob{"ABLIT_LAYERS", "", kNoAblit},
    Knob{"ABLIT_ALPHA", "", kNoAblit},
    Knob{"ABLIT_INCLUDE_MTP", "", kNoAblit},
    // Times and memory
    Knob{"READY_TIMEOUT", "ranks.ready_timeout", "", seconds},
    Knob{"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "", "nothing compiles within a step: ranks.watchdog is 30 s"},
    Knob{"GLM53_PREFLIGHT_MEMORY_HEADROOM_KIB", "", "the check adds up weights, KV cache and memory.reserve"},
    Knob{"GLM53_HOST_MEM_HYGIENE", "", "downloads and copies leave the page cache as it was"},
    Knob{"GLM53_BOOT_SHAPE_WARMUP", "", "nothing is compiled at run time; the canary runs before the gate opens"},
    Knob{"GLM53_WARMUP_REQ_TIMEOUT", "", "nothing is compiled at run time; the canary runs before the gate opens"},
    Knob{"GLM53_WARMUP_BURST_MAX", "", "nothing is compiled at run time; the canary runs before the gate opens"},
    Knob{"GLM53_WARMUP_CANARY", "", "always: the gate opens after the canary"},
    Knob{"TAIL", "", "glm53ctl logs -f"},
    Knob{"GLM53_EXTRA_ENV", "", kNccl},
};

}  // namespace

std::span<const Knob> knobs() {
  return kKnobs;
}

const Knob* find_knob(std::string_view name) {
  const auto* const it = std::find_if(kKnobs.begin(), kKnobs.end(), [&](const Knob& k) { return k.name == name; });
  return it == kKnobs.end() ? nullptr : it;
}

}  // namespace glm53::cli
