// What people see: tables, bars, colours, and the end of a wait by Ctrl-C.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace glm53::cli {

enum class Colour { none, red, yellow, green, bold, dim };
/// `text` in a colour, or as it is when `on` is false.
std::string paint(std::string_view text, Colour colour, bool on);
/// True when standard output is a terminal and NO_COLOR is not set.
bool colours_wanted();
bool stdout_is_terminal();
/// Columns of the terminal; 100 when there is none.
int terminal_width();

/// Columns padded to their widest cell, two spaces between; the last column is not padded.
std::string render_table(const std::vector<std::vector<std::string>>& rows);
/// "[#######-----]" of that many cells.
std::string render_bar(double share, int cells);
/// A number with so many digits behind the point.
std::string fixed(double value, int digits);
/// "3 s", "4 min 10 s", "2 h 5 min", "3 d 4 h".
std::string human_time(int64_t milliseconds);

/// Writes to standard output and flushes; an Error(unavailable) when nobody reads it any more.
void print(std::string_view text);
void print_line(std::string_view text);

/// While it lives, Ctrl-C (SIGINT, SIGTERM) prints the line and ends the program with status 130. Make it before other
/// threads.
class InterruptGuard {
 public:
  explicit InterruptGuard(const std::string& last_words);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  std::jthread watcher_;
};

}  // namespace glm53::cli
