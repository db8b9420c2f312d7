// Does an unpacked bundle run here?
#include <chrono>
#include <filesystem>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "agent/image/store.h"
#include "common/error.h"
#include "common/json.h"
#include "common/process.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

constexpr std::chrono::seconds kTime{60};
constexpr size_t kMostOutput = size_t{1} << 20;

[[noreturn]] void fail(const std::string& what) {
  throw Error(Code::unavailable, cat("E654 image: the bundle does not run here: ", what),
              "nothing was activated; install an image made for this machine");
}

}  // namespace

std::string run_self_check(const std::string& folder) {
  const std::string program = folder + "/glm53-engine";
  std::error_code none;
  if (!std::filesystem::exists(program, none)) fail("it has no glm53-engine at its top");
  SpawnOptions spec;
  spec.argv = {program, "describe"};
  spec.env = {{"PATH", "/usr/bin:/bin"}, {"LC_ALL", "C.UTF-8"}};
  spec.die_with_parent = true;
  std::string output;
  std::optional<ExitStatus> end;
  try {
    Child child = spawn(spec);
    const auto deadline = std::chrono::steady_clock::now() + kTime;
    bool open = true;
    while (open && std::chrono::steady_clock::now() < deadline && output.size() < kMostOutput) {
      pollfd p{child.output.get(), POLLIN, 0};
      if (::poll(&p, 1, 100) <= 0) continue;
      char buffer[4096];
      const ssize_t n = ::read(child.output.get(), buffer, sizeof buffer);
      if (n > 0) output.append(buffer, static_cast<size_t>(n));
      open = n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
    }
    end = wait_until(child.id.pid, deadline);
    if (!end) {
      (void)signal_group(child.id, SIGKILL);
      (void)wait_until(child.id.pid, std::chrono::steady_clock::now() + std::chrono::seconds(5));
    }
  } catch (const Error& e) {
    fail(e.what());
  }
  if (!end) fail(cat("no answer within ", kTime.count(), " s"));
  if (end->code != 0 || end->signal != 0) {
    fail(cat("glm53-engine describe ended with ", end->signal != 0 ? "signal " : "",
             end->signal != 0 ? end->signal : end->code, ": ", trim(output).substr(0, 300)));
  }
  try {
    const auto answer = parse_json(output);
    const auto version = answer.is_object() ? answer.find("version") : answer.end();
    if (answer.is_object() && version != answer.end() && version->is_string()) return version->get<std::string>();
  } catch (const Error&) {
    // Said below.
  }
  fail("glm53-engine describe does not answer with its version");
}

}  // namespace glm53::image
