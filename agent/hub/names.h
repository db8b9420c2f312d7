// Names of the Hub: repositories, revisions, files, and the URLs made of them. Everything a server or a user names is
// checked here before it becomes part of a path.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::hub {

/// Where files come from: a Hub, or a server that speaks its protocol.
struct Source {
  std::string endpoint;  ///< "https://huggingface.co", no slash at the end
  std::string repo;      ///< "org/name"
};

/// Throws Error(usage) for what is no repository id: optional "ns/", then 1–96 of [A-Za-z0-9_.-], no '-' or '.' at an
/// end, no "--", no "..", no ".git" at the end.
void check_repo_id(std::string_view repo);
/// "models--org--name".
std::string folder_name(std::string_view repo);
/// Throws Error(usage) for a revision that could leave its folder.
void check_revision(std::string_view revision);
/// Why a file name from a listing cannot be used below a folder (absolute, "..", NUL, backslash, …); nullopt when it
/// can.
std::optional<std::string> unsafe_path(std::string_view path);
/// A full commit: 40 hex digits in lower case.
bool is_commit(std::string_view text);
/// The name of a blob: git-sha1 (40 hex digits) or sha256 (64).
bool is_etag(std::string_view text);
/// `W/"abc"` -> `abc`.
std::string normal_etag(std::string_view header);

/// Percent-encodes; `keep_slash` leaves '/'.
std::string encode(std::string_view text, bool keep_slash);
/// Shell patterns as other clients read them: '*' also matches '/', '?', '[a-z]', '[!a]'; a pattern that ends with '/'
/// means everything below.
bool glob_match(std::string_view pattern, std::string_view path);
/// Small files that a model never works without; excludes do not reach them.
bool always_needed(std::string_view path);

/// A URL in pieces. Throws Error(unavailable) when it is none, or neither http nor https.
struct Url {
  std::string scheme, host, port;  ///< the port is always there
  std::string full;
  /// "host:port".
  std::string authority() const { return host + ":" + port; }
  /// For logs: no query, no user.
  std::string shown() const;
};
Url parse_url(const std::string& url);
/// `location` as seen from `base`.
Url resolve_url(const Url& base, const std::string& location);
/// Target of rel="next" of a Link header; "" when there is none.
std::string next_link(std::string_view header);

}  // namespace glm53::hub
