#include "cli/terminal.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <ctime>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <sys/ioctl.h>

#include "common/error.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

constexpr int kInterrupted = 130;

std::string_view escape(Colour colour) {
  switch (colour) {
    case Colour::red:
      return "\033[31m";
    case Colour::yellow:
      return "\033[33m";
    case Colour::green:
      return "\033[32m";
    case Colour::bold:
      return "\033[1m";
    case Colour::dim:
      return "\033[2m";
    case Colour::none:
      return "";
  }
  return "";
}

/// Cells a text takes: code points without colour escapes.
size_t cells_of(std::string_view text) {
  size_t cells = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {
      while (i < text.size() && text[i] != 'm') ++i;
    } else if ((static_cast<unsigned char>(text[i]) & 0xC0u) != 0x80u) {
      ++cells;
    }
  }
  return cells;
}

sigset_t interrupts() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

std::string paint(std::string_view text, Colour colour, bool on) {
  if (!on || colour == Colour::none) return std::string(text);
  return cat(escape(colour), text, "\033[0m");
}

bool stdout_is_terminal() {
  return ::isatty(STDOUT_FILENO) == 1;
}

bool colours_wanted() {
  return stdout_is_terminal() && !environment("NO_COLOR");
}

int terminal_width() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 100;
  return size.ws_col;
}

std::string render_table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], cells_of(row[i]));
  }
  std::string out;
  for (const auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - cells_of(row[i]) + 2, ' ');
    }
    out += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::string render_bar(double share, int cells) {
  const int full = static_cast<int>(std::clamp(share, 0.0, 1.0) * cells);
  return cat("[", std::string(static_cast<size_t>(full), '#'), std::string(static_cast<size_t>(cells - full), '-'),
             "]");
}

std::string fixed(double value, int digits) {
  const double scale = std::pow(10, digits);
  const auto units = static_cast<int64_t>(std::llround(std::abs(value) * scale));
  const auto one = static_cast<int64_t>(scale);
  std::string text = cat(value < 0 && units > 0 ? "-" : "", units / one);
  if (digits == 0) return text;
  const std::string fraction = cat(units % one);
  return cat(text, ".", std::string(static_cast<size_t>(digits) - fraction.size(), '0'), fraction);
}

std::string human_time(int64_t milliseconds) {
  const int64_t s = std::max<int64_t>(milliseconds, 0) / 1000;
  if (s < 60) return cat(s, " s");
  if (s < 3600) return cat(s / 60, " min ", s % 60, " s");
  if (s < 86400) return cat(s / 3600, " h ", s % 3600 / 60, " min");
  return cat(s / 86400, " d ", s % 86400 / 3600, " h");
}

void print(std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, "standard output");
    text.remove_prefix(static_cast<size_t>(n));
  }
}

void print_line(std::string_view text) {
  print(cat(text, "\n"));
}

InterruptGuard::InterruptGuard(const std::string& last_words) {
  const sigset_t set = interrupts();
  if (::pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) throw_errno(Code::internal, "pthread_sigmask");
  watcher_ = std::jthread([set, words = cat("\n", last_words, "\n")](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      const timespec tick{0, 50'000'000};
      if (::sigtimedwait(&set, nullptr, &tick) <= 0) continue;
      if (::write(STDERR_FILENO, words.data(), words.size()) < 0) ::_exit(kInterrupted);
      ::_exit(kInterrupted);
    }
  });
}

InterruptGuard::~InterruptGuard() {
  watcher_.request_stop();
  watcher_.join();
  const sigset_t set = interrupts();
  ::pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

}  // namespace glm53::cli
