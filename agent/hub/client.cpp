#include "agent/hub/client.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "agent/hub/blob_hash.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxPage = size_t{64} << 20;
constexpr int kMaxPages = 10000, kMaxHops = 3, kMaxRenames = 5;
constexpr int64_t kMaxFile = int64_t{1} << 46;

/// JSON of somebody else: neither syntax nor shape is a fault of our user.
Json read_json(std::string_view body, const std::string& where) {
  try {
    return parse_json(body, {.max_bytes = kMaxPage});
  } catch (const Error& e) {
    const std::string_view start = trim(body.substr(0, 256));
    if (start.starts_with('<')) {
      throw HubError(Action::retry, Error(Code::unavailable, cat("hub: ", where, ": a web page instead of an answer"),
                                          "a proxy or a login page may stand between: open the address in a browser"));
    }
    throw Error(Code::corrupt, cat("hub: ", where, ": ", e.what()));
  }
}

std::string text_of(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

int64_t size_of(const Json& object) {
  const auto found = object.find("size");
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : -1;
}

std::optional<FileEntry> parse_entry(const Json& item, const std::string& where) {
  if (!item.is_object()) throw Error(Code::corrupt, cat("hub: ", where, ": an entry is no object"));
  if (text_of(item, "type") != "file") return std::nullopt;
  FileEntry file{text_of(item, "path"), size_of(item), text_of(item, "oid")};
  if (const auto lfs = item.find("lfs"); lfs != item.end() && lfs->is_object()) {
    file.etag = text_of(*lfs, "oid");
    if (file.etag.starts_with("sha256:")) file.etag.erase(0, 7);
    if (size_of(*lfs) >= 0) file.size = size_of(*lfs);
    if (file.etag.size() != 64) file.etag.clear();
  } else if (file.etag.size() != 40) {
    file.etag.clear();
  }
  if (const auto why = unsafe_path(file.path)) {
    throw Error(Code::corrupt, cat("E613 hub: ", where, ": refusing a file name: ", *why),
                "this repository cannot be downloaded safely");
  }
  if (!is_etag(file.etag) || file.size < 0 || file.size > kMaxFile) {
    throw Error(Code::corrupt, cat("hub: ", where, ": ", file.path, " has no valid size and digest"));
  }
  return file;
}

/// A file and a folder of one name, or one name twice, cannot both be written.
void check_names(std::vector<FileEntry>& files, const std::string& where) {
  std::sort(files.begin(), files.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  std::set<std::string, std::less<>> names;
  for (const FileEntry& f : files) {
    if (!names.insert(f.path).second) throw Error(Code::corrupt, cat("hub: ", where, " lists ", f.path, " twice"));
  }
  for (const FileEntry& f : files) {
    for (size_t slash = f.path.find('/'); slash != std::string::npos; slash = f.path.find('/', slash + 1)) {
      if (names.contains(f.path.substr(0, slash))) {
        throw Error(Code::corrupt, cat("hub: ", where, " lists ", f.path.substr(0, slash), " as file and as folder"));
      }
    }
  }
}

bool is_redirect(int status) {
  return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

bool loopback(const std::string& host) {
  return host == "localhost" || host.starts_with("127.") || host == "[::1]";
}

/// The answer about a file must be about that file.
void check_identity(const Head& head, const std::string& commit, const FileEntry& file, const std::string& what) {
  const auto mismatch = [&](std::string_view name, std::string_view got, std::string_view want) {
    return HubError(Action::fallback, Error(Code::corrupt, cat("E612 hub: ", name, " of ", what, " is ",
                                                               got.substr(0, 80), ", the listing says ", want)));
  };
  const std::string_view seen = head.header("X-Repo-Commit");
  if (!seen.empty() && seen != commit) throw mismatch("the commit", seen, commit);
  std::string etag = normal_etag(head.header("X-Linked-Etag"));
  if (etag.empty() && head.status < 300) etag = normal_etag(head.header("ETag"));
  // A plain file server may have tags of its own; those of a Hub are digests.
  if (is_etag(etag) && etag != file.etag) throw mismatch("the etag", etag, file.etag);
  std::string_view size = head.header("X-Linked-Size");
  if (size.empty() && head.status < 300) size = head.header("Content-Length");
  if (!size.empty() && parse_int(size) != file.size) throw mismatch("the size", size, cat(file.size));
}

}  // namespace

std::vector<FileEntry> parse_tree(std::string_view body, const std::string& where) {
  const Json page = read_json(body, where);
  if (!page.is_array()) throw Error(Code::corrupt, cat("hub: ", where, ": no array of files"));
  std::vector<FileEntry> files;
  for (const Json& item : page) {
    if (auto file = parse_entry(item, where)) files.push_back(std::move(*file));
  }
  return files;
}

std::set<std::string> parse_index(std::string_view body, const std::string& where) {
  Json index;
  try {
    index = parse_json(body, {.max_bytes = kMaxPage});
  } catch (const Error& e) {
    throw Error(Code::corrupt, cat(where, ": ", e.what()));
  }
  const auto map = index.is_object() ? index.find("weight_map") : index.end();
  if (!index.is_object() || map == index.end() || !map->is_object() || map->empty()) {
    throw Error(Code::corrupt, cat(where, " has no weight_map"));
  }
  std::set<std::string> shards;
  for (const Json& shard : *map) {
    if (!shard.is_string() || unsafe_path(shard.get_ref<const std::string&>())) {
      throw Error(Code::corrupt, cat(where, ": weight_map names no valid file"));
    }
    shards.insert(shard.get<std::string>());
  }
  return shards;
}

Client::Client(Options options, Transport& transport) : options_(std::move(options)), transport_(transport) {}

std::string Client::token_for(const Url& url) const {
  if (options_.token.empty() || (url.scheme != "https" && !loopback(url.host))) return {};
  const bool allowed = std::any_of(options_.token_hosts.begin(), options_.token_hosts.end(), [&](const std::string& h) {
    return h == url.authority() || (h == url.host && url.scheme == "https");
  });
  return allowed ? options_.token : std::string();
}

Response Client::api(const Source& source, const Url& first, const std::string& what) {
  Retry attempts = retry();
  while (true) {
    try {
      Url url = first;
      for (int hop = 0; hop <= kMaxRenames; ++hop) {
        Response response = transport_.request({.url = url, .token = token_for(url)}, kMaxPage);
        if (response.head.status == 200) return response;
        if (!is_redirect(response.head.status)) throw refusal(response.head, response.body, source, what, true);
        url = resolve_url(url, std::string(response.head.header("Location")));
      }
      throw HubError(Action::fallback, Error(Code::unavailable, cat("E618 hub: too many redirects (", what, ")")));
    } catch (const Error& e) {
      attempts.after(e);
    }
  }
}

std::string Client::resolve(const Source& source, const std::string& revision) {
  check_repo_id(source.repo);
  check_revision(revision);
  const std::string what = cat(source.repo, "@", revision);
  const Url url = parse_url(cat(source.endpoint, "/api/models/", source.repo, "/revision/", encode(revision, false)));
  Retry attempts = retry();
  while (true) {
    try {
      const Json answer = read_json(api(source, url, what).body, what);
      const std::string sha = answer.is_object() ? text_of(answer, "sha") : std::string();
      if (!is_commit(sha)) throw Error(Code::corrupt, cat("hub: ", what, ": the answer names no commit"));
      if (is_commit(revision) && sha != revision) {
        throw Error(Code::corrupt, cat("E614 hub: ", what, ": the server answers with commit ", sha));
      }
      return sha;
    } catch (const HubError& e) {
      attempts.after(e);
    }
  }
}

std::vector<FileEntry> Client::tree(const Source& source, const std::string& commit) {
  const std::string what = cat("listing of ", source.repo, "@", commit);
  Url url =
      parse_url(cat(source.endpoint, "/api/models/", source.repo, "/tree/", commit, "?recursive=true&expand=false"));
  const std::string home = url.authority();
  std::vector<FileEntry> files;
  std::set<std::string> seen;
  Retry attempts = retry();
  while (true) {
    std::string next;
    try {
      const Response page = api(source, url, what);
      const auto entries = parse_tree(page.body, what);
      files.insert(files.end(), entries.begin(), entries.end());
      next = next_link(page.head.header("Link"));
    } catch (const HubError& e) {
      attempts.after(e);
      continue;
    }
    if (next.empty()) break;
    url = resolve_url(url, next);
    if (url.authority() != home || !seen.insert(url.full).second || seen.size() > kMaxPages) {
      throw Error(Code::corrupt, cat("E615 hub: ", what, ": the next page leads astray"));
    }
  }
  check_names(files, what);
  return files;
}

Location Client::locate(const Source& source, const std::string& commit, const FileEntry& file) {
  const std::string what = cat(source.repo, "/", file.path);
  Url url = parse_url(cat(source.endpoint, "/", source.repo, "/resolve/", commit, "/", encode(file.path, true)));
  int hops = 0, renames = 0;
  while (true) {
    const Head head = transport_.request({.method = "HEAD", .url = url, .token = token_for(url)}, 1 << 20).head;
    if (head.status >= 200 && head.status < 300) {
      check_identity(head, commit, file, what);
      return {url, token_for(url)};
    }
    if (!is_redirect(head.status)) throw refusal(head, {}, source, what, true);
    const std::string target(head.header("Location"));
    if (target.empty()) {
      throw HubError(Action::retry, Error(Code::unavailable, cat("E618 hub: a redirect to nowhere (", what, ")")));
    }
    const Url next = resolve_url(url, target);
    const bool elsewhere = next.authority() != url.authority();
    if (elsewhere && !head.header("X-Linked-Etag").empty()) {
      check_identity(head, commit, file, what);
      return {next, token_for(next)};
    }
    if ((elsewhere ? ++hops : ++renames) > (elsewhere ? kMaxHops : kMaxRenames)) {
      throw HubError(Action::fallback, Error(Code::unavailable,
                                             cat("E618 hub: ", url.authority(), " redirects in circles (", what, ")")));
    }
    url = next;
  }
}

std::string Client::small_file(const Source& source, const std::string& commit, const FileEntry& file) {
  Retry attempts = retry();
  bool damaged = false;
  while (true) {
    try {
      const Location at = locate(source, commit, file);
      const Response response = transport_.request({.url = at.url, .token = at.token}, kMaxPage);
      const std::string what = cat(source.repo, "/", file.path);
      if (response.head.status != 200) {
        throw refusal(response.head, response.body, source, what, !at.token.empty());
      }
      if (hash_of(response.body, file.etag.size()) == file.etag) return response.body;
      if (static_cast<int64_t>(response.body.size()) < file.size) {
        throw HubError(Action::retry,
                       Error(Code::unavailable, cat("E635 hub: ", at.url.authority(), " ended early within ", what)));
      }
      const Error wrong(Code::corrupt, cat("E610 hub: ", what, " does not match its digest ", file.etag));
      if (std::exchange(damaged, true)) throw HubError(Action::fallback, wrong);
      throw HubError(Action::retry, wrong);
    } catch (const Error& e) {
      attempts.after(e);
    }
  }
}

}  // namespace glm53::hub
