#include "agent/preflight/facts.h"

#include <algorithm>
#include <filesystem>
#include <sstream>
#include <system_error>

#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

namespace fs = std::filesystem;
constexpr size_t kMostBytes = 4u << 20;
constexpr int64_t kKiB = 1024;

/// "MemTotal:  131072 kB" -> bytes.
std::optional<int64_t> kib_line(const std::string& text, std::string_view key) {
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (!std::string_view(line).starts_with(key)) continue;
    std::istringstream fields(line.substr(key.size()));
    int64_t kib = 0;
    if (fields >> kib) return kib * kKiB;
  }
  return std::nullopt;
}

std::vector<std::string> words(const std::string& line) {
  std::istringstream in(line);
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

struct CgroupRoom {
  int64_t limit = 0, used = 0;
};

/// The tightest limit from this process's group upwards.
std::optional<CgroupRoom> cgroup_room(const FileRoot& root) {
  const auto groups = root.text("/proc/self/cgroup");
  if (!groups) return std::nullopt;
  std::optional<CgroupRoom> tightest;
  const auto look = [&](const std::string& base, std::string path, const char* limit_file, const char* used_file) {
    while (true) {
      const auto limit = root.number(cat(base, path, "/", std::string_view(limit_file)));
      const auto used = root.number(cat(base, path, "/", std::string_view(used_file)));
      if (limit && used && (!tightest || *limit - *used < tightest->limit - tightest->used)) {
        tightest = CgroupRoom{*limit, *used};
      }
      if (path.empty()) return;
      path = path.substr(0, path.find_last_of('/'));
    }
  };
  std::istringstream in(*groups);
  for (std::string line; std::getline(in, line);) {
    const auto fields = split(line, ':');
    if (fields.size() < 3) continue;
    std::string path = fields[2] == "/" ? "" : fields[2];
    if (fields[0] == "0" && fields[1].empty()) look("/sys/fs/cgroup", path, "memory.max", "memory.current");
    const auto controllers = split(fields[1], ',');
    if (std::find(controllers.begin(), controllers.end(), "memory") != controllers.end()) {
      look("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes");
    }
  }
  return tightest;
}

bool is_pid(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) { return c >= '0' && c <= '9'; });
}

/// "0100007F:22B8", the address in network byte order as a little-endian number; 0 for anything of IPv6.
struct Endpoint {
  uint32_t address = 0, port = 0;
};
std::optional<Endpoint> parse_endpoint(const std::string& text) {
  constexpr size_t kIpv4Digits = 8;
  const auto colon = text.find(':');
  Endpoint e;
  std::istringstream port(colon == std::string::npos ? "" : text.substr(colon + 1));
  if (!(port >> std::hex >> e.port)) return std::nullopt;
  if (colon != kIpv4Digits) return e;
  uint32_t reversed = 0;
  std::istringstream address(text.substr(0, colon));
  if (!(address >> std::hex >> reversed)) return std::nullopt;
  e.address = reversed << 24 | (reversed << 8 & 0xff0000) | (reversed >> 8 & 0xff00) | reversed >> 24;
  return e;
}

std::optional<uint64_t> listening_inode(const FileRoot& root, uint16_t port, uint32_t address) {
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    const auto text = root.text(table);
    if (!text) continue;
    std::istringstream in(*text);
    for (std::string line; std::getline(in, line);) {
      const auto f = words(line);
      constexpr const char* kListen = "0A";
      if (f.size() < 10 || f[3] != kListen) continue;
      const auto at = parse_endpoint(f[1]);
      if (!at || at->port != port) continue;
      if (at->address != 0 && address != 0 && at->address != address) continue;
      const auto inode = parse_int(f[9]);
      return inode && *inode > 0 ? static_cast<uint64_t>(*inode) : 0;
    }
  }
  return std::nullopt;
}

/// mountinfo writes a space as \040.
std::string unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto octal = [&](size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
    if (text[i] == '\\' && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

}  // namespace

std::string FileRoot::at(std::string_view path) const {
  if (root_ == "/") return std::string(path);
  return cat(root_, path.starts_with('/') ? "" : "/", path);
}

std::optional<std::string> FileRoot::text(const std::string& path) const {
  try {
    return std::string(trim(read_file(at(path), kMostBytes)));
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::optional<int64_t> FileRoot::number(const std::string& path) const {
  const auto content = text(path);
  return content ? parse_int(*content) : std::nullopt;
}

std::vector<std::string> FileRoot::list(const std::string& path) const {
  std::vector<std::string> names;
  std::error_code ec;
  for (fs::directory_iterator it(at(path), ec), end; !ec && it != end; it.increment(ec)) {
    names.push_back(it->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

bool FileRoot::exists(const std::string& path) const {
  std::error_code ec;
  return fs::exists(at(path), ec);
}

std::optional<std::string> FileRoot::link(const std::string& path) const {
  std::error_code ec;
  const auto target = fs::read_symlink(at(path), ec);
  return ec ? std::nullopt : std::optional(target.string());
}

std::optional<Memory> memory(const FileRoot& root) {
  const auto text = root.text("/proc/meminfo");
  if (!text) return std::nullopt;
  const auto total = kib_line(*text, "MemTotal:"), available = kib_line(*text, "MemAvailable:");
  if (!total || !available) return std::nullopt;
  Memory m{*total, *available, false};
  if (const auto room = cgroup_room(root); room && room->limit < m.total) {
    m.total = room->limit;
    m.available = std::min(m.available, std::max<int64_t>(0, room->limit - room->used));
    m.limited = true;
  }
  return m;
}

std::vector<Consumer> biggest_consumers(const FileRoot& root, size_t count) {
  std::vector<Consumer> all;
  for (const std::string& entry : root.list("/proc")) {
    if (!is_pid(entry)) continue;
    const auto status = root.text(cat("/proc/", entry, "/status"));
    const auto pid = parse_int(entry);
    if (!status || !pid) continue;
    all.push_back(
        {*pid, root.text(cat("/proc/", entry, "/comm")).value_or("?"), kib_line(*status, "VmRSS:").value_or(0)});
  }
  std::sort(all.begin(), all.end(), [](const Consumer& a, const Consumer& b) { return a.resident > b.resident; });
  if (all.size() > count) all.resize(count);
  return all;
}

std::optional<Listener> listener_of(const FileRoot& root, uint16_t port, uint32_t address) {
  const auto inode = listening_inode(root, port, address);
  if (!inode) return std::nullopt;
  Listener listener{*inode, std::nullopt, {}};
  const std::string wanted = cat("socket:[", *inode, "]");
  for (const std::string& entry : root.list("/proc")) {
    if (!is_pid(entry)) continue;
    const std::string folder = cat("/proc/", entry, "/fd");
    for (const std::string& fd : root.list(folder)) {
      if (root.link(cat(folder, "/", fd)) != wanted) continue;
      listener.pid = parse_int(entry);
      listener.name = root.text(cat("/proc/", entry, "/comm")).value_or("?");
      return listener;
    }
  }
  return listener;
}

std::optional<Mount> mount_of(const FileRoot& root, const std::string& path) {
  const auto text = root.text("/proc/self/mountinfo");
  if (!text) return std::nullopt;
  std::optional<Mount> best;
  std::istringstream in(*text);
  for (std::string line; std::getline(in, line);) {
    const auto f = words(line);
    const auto dash = std::find(f.begin(), f.end(), "-");
    if (f.size() < 7 || dash == f.end() || dash + 1 == f.end()) continue;
    const std::string point = unescape(f[4]);
    const bool inside = point == "/" || path == point || path.starts_with(point + "/");
    // Of two mounts on one point the later one is seen.
    if (inside && (!best || point.size() >= best->point.size())) best = Mount{point, *(dash + 1)};
  }
  return best;
}

std::optional<int64_t> limit_of(const FileRoot& root, std::string_view name) {
  const auto text = root.text("/proc/self/limits");
  if (!text) return std::nullopt;
  std::istringstream in(*text);
  for (std::string line; std::getline(in, line);) {
    if (!std::string_view(line).starts_with(name)) continue;
    const auto f = words(line.substr(name.size()));
    if (f.empty()) return std::nullopt;
    return f[0] == "unlimited" ? std::optional<int64_t>(-1) : parse_int(f[0]);
  }
  return std::nullopt;
}

std::optional<std::vector<std::string>> xid_lines(const FileRoot& root) {
  for (const char* log : {"/var/log/dmesg", "/var/log/kern.log"}) {
    const auto text = root.text(log);
    if (!text) continue;
    std::vector<std::string> found;
    std::istringstream in(*text);
    for (std::string line; std::getline(in, line);) {
      if (line.find("NVRM: Xid") != std::string::npos) found.push_back(line);
    }
    return found;
  }
  return std::nullopt;
}

}  // namespace glm53::preflight
