// The Hub's protocol: revision, listing, where the bytes of a file are, and what its refusals mean.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "agent/hub/transport.h"
#include "common/error.h"

namespace glm53::hub {

/// What a failure calls for.
enum class Action {
  retry,     ///< transient: the same again, later
  wait,      ///< rate limit: the same again after `wait`
  refetch,   ///< the signed URL is used up: ask for a new one
  fallback,  ///< not to be had here: another source
  give_up,   ///< another source would not help
};
/// A failure together with what it calls for.
class HubError : public Error {
 public:
  HubError(Action action, const Error& error, Millis wait = Millis(-1)) : Error(error), action_(action), wait_(wait) {}
  Action action() const { return action_; }
  /// What the server asks for; negative when it names no time.
  Millis wait() const { return wait_; }

 private:
  Action action_;
  Millis wait_;
};
/// The action of any exception of this folder.
Action action_of(const Error& error);

/// What the refusal of a request means. `what` names the file or the repository; `api` says that the Hub itself
/// answered, not the host of a signed URL.
HubError refusal(const Head& head, std::string_view body, const Source& source, const std::string& what, bool api);
/// Seconds that a 429 asks for: of RateLimit with nothing left, else of Retry-After; negative when neither is there.
Millis asked_wait(const Head& head);

/// When to try again, and when to stop trying.
struct RetryOptions {
  Millis base{1000}, longest{60000};  ///< backoff: base, twice that, … with full jitter
  Millis give_up_after{600000};       ///< without any progress
  Millis max_wait{900000};            ///< longest wait that a rate limit may ask for
};
/// Counts the failures of one thing. The waits end early when `cancelled` becomes true.
class Retry {
 public:
  using Report = std::function<void(const std::string&)>;
  Retry(RetryOptions options, const std::atomic<bool>* cancelled, Report report)
      : options_(options), cancelled_(cancelled), report_(std::move(report)) {}
  /// Waits and returns, or throws on the exception being handled when it is not to be retried: call it in a handler.
  void after(const Error& error);
  /// Something arrived: patience starts afresh.
  void progress();
  int64_t count() const { return count_; }

 private:
  void sleep(Millis time) const;
  RetryOptions options_;
  const std::atomic<bool>* cancelled_;
  Report report_;
  int64_t count_ = 0;
  int in_a_row_ = 0;
  Clock::time_point last_progress_ = Clock::now();
};

struct FileEntry {
  std::string path;
  int64_t size = 0;
  std::string etag;  ///< sha256 of the content (64 digits), or git's sha1 of the blob (40)
  bool operator==(const FileEntry&) const = default;
};
/// Entries of one page of a listing. Throws Error(corrupt) for anything else, and for file names that could leave
/// their folder.
std::vector<FileEntry> parse_tree(std::string_view body, const std::string& where);
/// Distinct shard names of a model.safetensors.index.json. Throws Error(corrupt).
std::set<std::string> parse_index(std::string_view body, const std::string& where);

/// Where the bytes of a file are just now. Signed URLs are secrets: never logged, never stored.
struct Location {
  Url url;
  std::string token;  ///< only when the host may have it
};

class Client {
 public:
  struct Options {
    std::string token;                     ///< "" = none
    std::vector<std::string> token_hosts;  ///< "host" or "host:port"
    RetryOptions retry;
    Retry::Report report = [](const std::string&) {};
    const std::atomic<bool>* cancelled = nullptr;
  };
  Client(Options options, Transport& transport);

  /// Full commit of a branch, a tag or a commit.
  std::string resolve(const Source& source, const std::string& revision);
  /// Every file of a commit.
  std::vector<FileEntry> tree(const Source& source, const std::string& commit);
  /// One answer, no retry: where the file is. Throws HubError.
  Location locate(const Source& source, const std::string& commit, const FileEntry& file);
  /// A small file, whole, checked against its etag.
  std::string small_file(const Source& source, const std::string& commit, const FileEntry& file);
  Retry retry() const { return {options_.retry, options_.cancelled, options_.report}; }
  /// The token, if that host may see it.
  std::string token_for(const Url& url) const;

 private:
  Response api(const Source& source, const Url& url, const std::string& what);
  Options options_;
  Transport& transport_;
};

}  // namespace glm53::hub
