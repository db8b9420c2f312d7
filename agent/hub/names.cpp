#include "agent/hub/names.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>

#include <curl/curl.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

bool is_alnum(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool hex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool valid_part(std::string_view part) {
  if (part.empty() || part.size() > 96) return false;
  const auto edge = [](char c) { return c == '-' || c == '.'; };
  if (edge(part.front()) || edge(part.back())) return false;
  return std::all_of(part.begin(), part.end(), [](char c) { return is_alnum(c) || c == '_' || c == '.' || c == '-'; });
}

struct FreeUrl {
  void operator()(CURLU* url) const { curl_url_cleanup(url); }
};
using UrlHandle = std::unique_ptr<CURLU, FreeUrl>;

std::string part_of(CURLU* url, CURLUPart part, unsigned flags) {
  char* text = nullptr;
  if (curl_url_get(url, part, &text, flags) != CURLUE_OK || text == nullptr) return {};
  std::string copy(text);
  curl_free(text);
  return copy;
}

void set_url(CURLU* handle, const std::string& text) {
  if (text.size() > 16384 || curl_url_set(handle, CURLUPART_URL, text.c_str(), 0) != CURLUE_OK) {
    throw Error(Code::unavailable, cat("hub: '", text.substr(0, text.find('?')).substr(0, 200), "' is no URL"));
  }
}

UrlHandle new_url() {
  UrlHandle handle(curl_url());
  if (!handle) throw Error(Code::memory, "curl: out of memory");
  return handle;
}

Url take_apart(CURLU* handle) {
  Url url{part_of(handle, CURLUPART_SCHEME, 0), part_of(handle, CURLUPART_HOST, 0),
          part_of(handle, CURLUPART_PORT, CURLU_DEFAULT_PORT), part_of(handle, CURLUPART_URL, 0)};
  if (url.scheme != "https" && url.scheme != "http") {
    throw Error(Code::unavailable, cat("hub: refusing a URL of scheme '", url.scheme, "'"));
  }
  if (url.host.empty()) throw Error(Code::unavailable, "hub: a URL names no host");
  return url;
}

/// Position behind a matched '[…]' at `p`, or npos when it is no set; `hit` says whether `c` is in it.
size_t match_set(std::string_view pattern, size_t p, char c, bool& hit) {
  size_t i = p + 1;
  const bool negated = i < pattern.size() && pattern[i] == '!';
  if (negated) ++i;
  bool in = false;
  for (const size_t first = i; i < pattern.size(); ++i) {
    if (pattern[i] == ']' && i > first) {
      hit = in != negated;
      return i + 1;
    }
    if (i + 2 < pattern.size() && pattern[i + 1] == '-' && pattern[i + 2] != ']') {
      in = in || (pattern[i] <= c && c <= pattern[i + 2]);
      i += 2;
    } else {
      in = in || pattern[i] == c;
    }
  }
  return std::string_view::npos;
}

/// Position behind what matches one character at `p`, or npos.
size_t match_one(std::string_view pattern, size_t p, char c) {
  if (p >= pattern.size()) return std::string_view::npos;
  if (pattern[p] == '?') return p + 1;
  if (pattern[p] == '[') {
    bool hit = false;
    const size_t next = match_set(pattern, p, c, hit);
    if (next != std::string_view::npos) return hit ? next : std::string_view::npos;
  }
  return pattern[p] == c ? p + 1 : std::string_view::npos;
}

}  // namespace

void check_repo_id(std::string_view repo) {
  const size_t slash = repo.find('/');
  const bool ok = slash == std::string_view::npos
                      ? valid_part(repo)
                      : valid_part(repo.substr(0, slash)) && valid_part(repo.substr(slash + 1));
  if (!ok || repo.find("--") != std::string_view::npos || repo.find("..") != std::string_view::npos ||
      repo.ends_with(".git")) {
    throw Error(Code::usage, cat("'", repo.substr(0, 200), "' is no repository id"), "use organisation/name");
  }
}

std::string folder_name(std::string_view repo) {
  std::string out = "models--";
  for (const char c : repo) out += c == '/' ? std::string("--") : std::string(1, c);
  return out;
}

void check_revision(std::string_view revision) {
  if (const auto why = unsafe_path(revision)) {
    throw Error(Code::usage, cat("'", revision.substr(0, 200), "' is no revision: ", *why),
                "use a branch, a tag or a commit");
  }
}

std::optional<std::string> unsafe_path(std::string_view path) {
  if (path.empty()) return "it is empty";
  if (path.size() > 1024) return "it is longer than 1024 bytes";
  if (path.front() == '/') return "it is absolute";
  if (!valid_utf8(path)) return "it is not UTF-8";
  for (const char c : path) {
    if (c == '\\') return "it has a backslash";
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return "it has a control character";
  }
  for (const std::string& part : split(path, '/')) {
    if (part.empty()) return "it has an empty part";
    if (part == "." || part == "..") return cat("it has a part '", part, "'");
    if (part.front() == '-') return "a part begins with '-'";  // would be an option to somebody's command
    if (part.size() > 255) return "a part is longer than 255 bytes";
  }
  return std::nullopt;
}

bool is_commit(std::string_view text) {
  return hex(text, 40);
}

bool is_etag(std::string_view text) {
  return hex(text, 40) || hex(text, 64);
}

std::string normal_etag(std::string_view header) {
  header = trim(header);
  if (header.starts_with("W/")) header.remove_prefix(2);
  if (header.size() >= 2 && header.front() == '"' && header.back() == '"') {
    header = header.substr(1, header.size() - 2);
  }
  return std::string(header);
}

std::string encode(std::string_view text, bool keep_slash) {
  static constexpr std::string_view digits = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (is_alnum(c) || c == '-' || c == '_' || c == '.' || c == '~' || (keep_slash && c == '/')) {
      out += c;
    } else {
      out += '%';
      out += digits[byte >> 4];
      out += digits[byte & 15];
    }
  }
  return out;
}

bool glob_match(std::string_view pattern, std::string_view path) {
  std::string everything_below;
  if (pattern.ends_with('/')) {
    everything_below = cat(pattern, "*");
    pattern = everything_below;
  }
  size_t p = 0, s = 0, star = std::string_view::npos, star_s = 0;
  while (s < path.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = ++p;
      star_s = s;
      continue;
    }
    const size_t next = match_one(pattern, p, path[s]);
    if (next != std::string_view::npos) {
      p = next;
      ++s;
    } else if (star != std::string_view::npos) {
      p = star;
      s = ++star_s;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

bool always_needed(std::string_view path) {
  static constexpr std::array patterns{
      "config.json", "generation_config.json", "*.index.json",  "tokenizer*", "special_tokens_map.json", "vocab.*",
      "merges.txt",  "chat_template*",         "preprocessor*", "processor*"};
  if (path.find('/') != std::string_view::npos) return false;
  return std::any_of(patterns.begin(), patterns.end(), [&](const char* p) { return glob_match(p, path); });
}

std::string Url::shown() const {
  const size_t begin = full.find("//");
  const size_t path = begin == std::string::npos ? std::string::npos : full.find('/', begin + 2);
  if (path == std::string::npos) return cat(scheme, "://", authority());
  return cat(scheme, "://", authority(), full.substr(path, full.find_first_of("?#", path) - path));
}

Url parse_url(const std::string& url) {
  const UrlHandle handle = new_url();
  set_url(handle.get(), url);
  return take_apart(handle.get());
}

Url resolve_url(const Url& base, const std::string& location) {
  const UrlHandle handle = new_url();
  set_url(handle.get(), base.full);
  set_url(handle.get(), location);
  return take_apart(handle.get());
}

std::string next_link(std::string_view header) {
  // Commas also occur within <…>, so the list cannot simply be split.
  size_t at = 0;
  while ((at = header.find('<', at)) != std::string_view::npos) {
    const size_t end = header.find('>', at);
    if (end == std::string_view::npos) return {};
    const std::string_view rest = header.substr(end, header.find('<', end) - end);
    if (rest.find("rel=\"next\"") != std::string_view::npos || rest.find("rel=next") != std::string_view::npos) {
      return std::string(header.substr(at + 1, end - at - 1));
    }
    at = end;
  }
  return {};
}

}  // namespace glm53::hub
