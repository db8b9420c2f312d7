// API process <-> rank 0: length-prefixed frames (u32 length, u8 kind, body) on a unix stream socket. The API process
// listens and is the journal: it keeps each unfinished request and resubmits it to the next generation of ranks. Every
// frame is versioned by Hello, bounds-checked and fuzzed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace glm53::wire {

inline constexpr uint32_t kProtocol = 6;
inline constexpr size_t kMaxFrame = 64u << 20;

struct SamplingParams {
  float temperature = 1, top_p = 1, min_p = 0, presence = 0, frequency = 0, repetition = 1;
  int32_t top_k = 0;  ///< 0 = off
  int32_t max_tokens = 0, min_tokens = 0;
  int32_t logprobs = -1;  ///< -1 none, else best N of each token
  bool ignore_eos = false;
  std::vector<int32_t> stop_ids;  ///< end tokens of the request, besides the model's
  std::vector<std::pair<int32_t, float>> bias;
  std::vector<int32_t> allowed;  ///< empty = all
  bool operator==(const SamplingParams&) const = default;
};

/// Rank 0 -> API: first frame of a connection.
struct Hello {
  uint32_t protocol = kProtocol;
  uint64_t generation = 0;
  std::string model_digest;  ///< checkpoint and formats; a replay needs the same
  int32_t vocab = 0, max_context = 0, max_seqs = 0;
  std::vector<int32_t> eos;
  bool operator==(const Hello&) const = default;
};
/// API -> rank 0. `emitted`: tokens already given to the client, when replayed after a restart; sampling continues
/// behind them.
struct Submit {
  uint64_t id = 0;
  std::vector<int32_t> prompt, emitted;
  uint64_t seed = 0;  ///< resolved: never "none"
  int32_t priority = 0;
  std::string salt, key;  ///< cache salt; fairness key
  bool cache_write = true;
  bool speculate = true;            ///< drafts may be verified for it; its text is the same either way
  std::vector<int32_t> boundaries;  ///< prompt positions where conversations branch
  SamplingParams sampling;
  std::string grammar;
  int64_t deadline_ms = 0;  ///< unix time in milliseconds, behind which the request ends with an error; 0 = none
  bool replayed = false;    ///< another generation of ranks had taken it: no limit on new requests holds
  bool operator==(const Submit&) const = default;
};
/// API -> rank 0: client gone, or stop string found (then so many tokens of the output were the answer: `keep_tokens`).
struct Cancel {
  uint64_t id = 0;
  std::optional<uint32_t> keep_tokens;
  bool operator==(const Cancel&) const = default;
};
struct TokenLogprobs {
  float logprob = 0;
  std::vector<std::pair<int32_t, float>> top;
  bool operator==(const TokenLogprobs&) const = default;
};
/// Rank 0 -> API. `index`: number of output tokens before these, so a replayed or repeated delta is recognised.
struct Delta {
  uint64_t id = 0;
  uint32_t index = 0;
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;  ///< empty, or one per token
  std::string finish;                   ///< empty while running; "stop", "length", "abort", "error"
  std::string error;                    ///< with finish "error": what went wrong
  int32_t error_code = 0;               ///< HTTP status for it
  int32_t stop_token = -1;              ///< with "stop": the token that ended it
  uint32_t cached_tokens = 0;           ///< prompt tokens served from the prefix cache
  uint32_t draft_tokens = 0;            ///< drafts verified for the request so far
  uint32_t draft_accepted = 0;          ///< of these, accepted
  uint32_t queue_ms = 0;                ///< from its Submit to its first step
  uint32_t retry_after_s = 0;           ///< with error_code 429 or 503: when to try again; 0 = unknown
  bool operator==(const Delta&) const = default;
};
/// What a step is made of, in the order of Stats::stage_us and stage_bytes: planning; sending the plan; states, blocks
/// and records put in place; proposing drafts; the forward pass; what the drafter reads of it; sampling and
/// verification; results to requests.
inline constexpr std::array<std::string_view, 8> kStages = {"plan",    "send",    "move",   "draft",
                                                            "forward", "observe", "sample", "complete"};
/// Kinds of steps, in the order of Stats::step_us: nobody's prompt is read; both; nothing is generated.
inline constexpr std::array<std::string_view, 3> kStepKinds = {"decode", "mixed", "prefill"};
/// Upper bounds of the buckets of a step's time in seconds; one more has no bound.
inline constexpr std::array<double, 14> kStepBuckets = {0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05,
                                                        0.075, 0.1,   0.15,  0.25, 0.5,  1,    5};
inline constexpr size_t kStepCounts = kStepKinds.size() * (kStepBuckets.size() + 1);
/// Rank 0 -> API, about once a second and after changes: for /health, /load and /metrics.
struct Stats {
  uint64_t step = 0;
  uint32_t running = 0, waiting = 0;
  uint32_t blocks_used = 0, blocks_total = 0, slots_used = 0, slots_total = 0;
  uint64_t prompt_tokens = 0, generated_tokens = 0;
  uint32_t blocks_cached = 0;                     ///< held by the prefix cache; some are in blocks_used too
  uint32_t snaps_used = 0, snaps_total = 0;       ///< snapshots of the prefix cache
  uint64_t prefix_queries = 0, prefix_hits = 0;   ///< tokens of admitted prompts; of these, not computed again
  uint64_t snaps_written = 0, snaps_evicted = 0;  ///< snapshots registered; given up again
  uint64_t blocks_evicted = 0;
  uint64_t preemptions = 0;                               ///< requests put back to wait
  uint64_t spill_memory_bytes = 0, spill_disk_bytes = 0;  ///< of the spill tier of rank 0
  uint64_t spilled = 0, spill_dropped = 0;                ///< blocks and snapshots copied there; of these, not taken
  uint64_t restores = 0, restores_failed = 0;          ///< prompts whose beginning came back from there; or should have
  bool spill_disk_ok = false;                          ///< its files can be written
  uint64_t draft_steps = 0;                            ///< steps of sequences in which drafts were verified
  uint64_t draft_tokens = 0, draft_accepted = 0;       ///< drafts in them; of these, accepted
  std::vector<uint64_t> draft_accepted_at;             ///< accepted by position in the step
  bool drafter_paused = false;                         ///< its drafts were hardly ever accepted
  std::array<uint64_t, kStages.size()> stage_us{};     ///< microseconds of all steps, by stage
  std::array<uint64_t, kStages.size()> stage_bytes{};  ///< bytes of weights that they read on rank 0
  std::array<uint64_t, kStepKinds.size()> step_us{};   ///< microseconds of steps, by kind
  std::array<uint64_t, kStepCounts> step_counts{};     ///< steps by kind and bucket of their time, bucket by bucket
  uint32_t progress_age_ms = 0;                        ///< since the step loop last turned
  uint64_t memory_bytes = 0;                           ///< resident size of rank 0
  uint64_t memory_available = 0;                       ///< of rank 0's machine; 0 = not known yet
  uint32_t memory_level = 0;                           ///< MemoryLevel: 0 ok ... 3 critical, the worst of all ranks
  bool gate_open = false;                              ///< false: only requests with key "canary" are admitted
  bool peers_alive = true;
  bool operator==(const Stats&) const = default;
};

using Message = std::variant<Hello, Submit, Cancel, Delta, Stats>;

/// Body with its kind byte, without the length prefix.
std::vector<std::byte> encode(const Message& message);
/// Throws Error(corrupt).
Message decode(std::span<const std::byte> frame);

/// Frames on a connected stream socket. One writer thread and one reader thread at a time; throw Error(peer_lost) at
/// the end of the stream.
void send_frame(int fd, const Message& message);
Message receive_frame(int fd);

}  // namespace glm53::wire
