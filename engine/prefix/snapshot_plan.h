// Which positions of a prompt get a snapshot, and what a snapshot is worth. Pure functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

namespace glm53::prefix {

/// Time of the caller's choice, monotonic; only differences count.
using Time = std::chrono::milliseconds;

/// Why a snapshot was taken.
enum class SnapClass : uint8_t {
  head,        ///< end of system prompt and tools
  turn,        ///< end of the last message before the generation prompt
  output,      ///< end of a generation
  interval,    ///< every so many tokens; also of preempted requests
  divergence,  ///< where a prompt left what was cached, without a snapshot near
};

/// What a token saved by this class weighs: head 8, turn 2, interval 0.5, others 1. `passed`: the conversation went on
/// behind it and has a later snapshot; then no more than an interval's.
double class_weight(SnapClass cls, bool passed = false);

/// Half-life of the interest in a snapshot, as value() takes it.
inline constexpr Time kHalfLife = std::chrono::minutes(30);

/// `uses` halved every half_life.
double decayed(double uses, Time since_use, Time half_life = kHalfLife);

/// Tokens a snapshot is expected to save: class weight · uses, decayed since the last one · `saved`.
/// `uses` counts its creation as one; `saved` is the distance to the next shallower snapshot of its path (or to 0).
double value(SnapClass cls, double uses, Time since_use, int32_t saved, Time half_life = kHalfLife,
             bool passed = false);

struct ExportRequest {
  int32_t prompt = 0;                   ///< tokens
  std::span<const int32_t> boundaries;  ///< positions where conversations branch: the first of several is the head,
                                        ///< others are turns; those outside 1 … prompt are passed over
  int32_t hit = 0;                      ///< positions restored: nothing is exported up to here
  int32_t matched = 0;                  ///< positions whose tokens were found in the index
  int32_t interval = 8192;              ///< 0 = none
  int32_t divergence_gap = 1024;        ///< a divergence is worth a snapshot when more tokens than this lie behind hit
  int32_t align = 64;                   ///< positions are rounded down to multiples of it, so that a later hit starts
                                        ///< on the chunk grid and repeats the same arithmetic
};

struct Export {
  int32_t position = 0;
  SnapClass cls = SnapClass::interval;
  bool operator==(const Export&) const = default;
};

/// Positions to save the state at while the prompt is read, ascending, each once with its heaviest class.
/// Throws Error(internal) for negative sizes or align < 1.
std::vector<Export> plan_exports(const ExportRequest& request);

/// Those of `plan` in (begin, end], at most `most` of them: the heaviest classes, then the deepest; ascending.
std::vector<Export> exports_of_piece(std::span<const Export> plan, int32_t begin, int32_t end, size_t most = 2);

/// Thinning of interval snapshots: whether position is kept when the newest of its path is at `newest`. The newest two
/// stay, further back the spacing doubles. What is dropped once would be dropped for every later `newest` too.
bool keep_interval(int32_t position, int32_t newest, int32_t interval);

}  // namespace glm53::prefix
