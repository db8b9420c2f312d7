// Log files of child processes: one a process and generation, `dir`/NAME/gen-N.log, with rotated pieces .1 (newest) to
// .8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/file.h"

namespace glm53::supervise {

inline constexpr int kLogPieces = 8;

std::string log_path(const std::string& dir, std::string_view process, uint64_t generation);
/// For appending, by a child. Throws Error(unavailable).
UniqueFd open_log(const std::string& path);
/// Size of the live file; 0 when it is missing.
uint64_t log_size(const std::string& path);
/// Copies the live file to piece 1 (older pieces move up, the oldest goes) and truncates it, when it is larger than
/// `max_bytes`. True if it did. The writer keeps its descriptor. Throws Error(unavailable); the live file is then as it
/// was.
bool rotate_log(const std::string& path, uint64_t max_bytes);
/// Generations that have a log, ascending.
std::vector<uint64_t> log_generations(const std::string& dir, std::string_view process);
/// Removes all but the newest `keep` generations of a process.
void prune_logs(const std::string& dir, std::string_view process, int keep);

/// Reads a log that may grow and be rotated meanwhile. Whole lines only.
class LogReader {
 public:
  explicit LogReader(std::string path) : path_(std::move(path)) {}
  /// The last `lines` lines, through the rotated pieces if need be; then read_new() continues behind them.
  std::string tail(int lines);
  /// Lines written since; empty when there are none.
  std::string read_new();

 private:
  std::string path_;
  uint64_t offset_ = 0;
  std::string piece_;  ///< which file piece 1 was: another one means that the log was rotated
};

}  // namespace glm53::supervise
