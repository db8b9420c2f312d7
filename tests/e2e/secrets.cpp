#include "tests/e2e/secrets.h"

#include <algorithm>
#include <filesystem>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"

namespace glm53::e2e {
namespace {

namespace fs = std::filesystem;

/// A file that may vanish, or be a process that ends.
std::string text_of(const fs::path& path) {
  try {
    return read_file(path.string(), size_t{64} << 20);
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

SecretWatch::SecretWatch(std::chrono::milliseconds period) {
  thread_ = std::thread([this, period] {
    while (!stop_) {
      look();
      std::this_thread::sleep_for(period);
    }
  });
}

SecretWatch::~SecretWatch() {
  stop_ = true;
  thread_.join();
}

void SecretWatch::add(const std::string& name, const std::string& text) {
  if (text.size() < 8) throw Error(Code::usage, cat("the secret '", name, "' is too short to look for"));
  const std::lock_guard lock(mutex_);
  secrets_[text] = name;
}

void SecretWatch::add_key(const std::string& name, const std::string& file) {
  bool inside = false;
  for (const std::string& line : split(read_file(file), '\n')) {
    if (line.starts_with("-----")) {
      inside = line.find("BEGIN") != std::string::npos && line.find("PRIVATE KEY") != std::string::npos;
      continue;
    }
    // The first line of an OpenSSH key is the same in all of them; its second has the public half.
    if (inside && line.size() > 20 && !line.starts_with("b3BlbnNzaC1rZXk")) add(name, line);
  }
}

std::vector<std::string> SecretWatch::in_text(const std::string& what, const std::string& text) const {
  std::vector<std::string> found;
  const std::lock_guard lock(mutex_);
  for (const auto& [secret, name] : secrets_) {
    if (text.find(secret) != std::string::npos) found.push_back(cat(name, " in ", what));
  }
  return found;
}

std::vector<std::string> SecretWatch::in_files(const std::string& folder, const std::set<std::string>& keepers) const {
  std::vector<std::string> found;
  std::error_code ignored;
  for (auto it = fs::recursive_directory_iterator(folder, ignored); it != fs::recursive_directory_iterator();
       it.increment(ignored)) {
    const std::string path = it->path().string();
    if (!it->is_regular_file(ignored) || it->is_symlink(ignored) || keepers.contains(path)) continue;
    const auto here = in_text(path, text_of(it->path()));
    found.insert(found.end(), here.begin(), here.end());
  }
  return found;
}

std::set<std::string> SecretWatch::in_processes() const {
  const std::lock_guard lock(mutex_);
  return found_;
}

void SecretWatch::look() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator("/proc", ignored)) {
    if (!parse_int(entry.path().filename().string())) continue;
    for (const char* file : {"cmdline", "environ"}) {
      const std::string text = text_of(entry.path() / file);
      if (text.empty()) continue;
      const auto here = in_text(cat("the ", std::string_view(file), " of ", text_of(entry.path() / "comm")), text);
      const std::lock_guard lock(mutex_);
      found_.insert(here.begin(), here.end());
    }
  }
  ++rounds_;
}

}  // namespace glm53::e2e
