// What the Hub's refusals mean, and how long to go on trying.
#include <algorithm>
#include <random>
#include <thread>

#include "agent/hub/client.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

/// `key=value` of a structured header such as `"resolvers";r=0;t=57`.
std::optional<int64_t> member(std::string_view header, std::string_view key) {
  for (const std::string& part : split(header, ';')) {
    const std::string_view text = trim(part);
    if (text.size() > key.size() && text.starts_with(key) && text[key.size()] == '=') {
      return parse_int(text.substr(key.size() + 1));
    }
  }
  return std::nullopt;
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

HubError make(Action action, Code code, const std::string& text, std::string remedy = {}) {
  return {action, Error(code, text, std::move(remedy))};
}

HubError unauthorized(const Head& head, std::string_view message, const Source& source) {
  if (contains(message, "Invalid credentials") || contains(message, "nvalid user token")) {
    return make(Action::give_up, Code::denied, cat("E621 hub: ", source.endpoint, " rejects the token"),
                "make a new one and put it in HF_TOKEN or hub.token_file");
  }
  if (head.header("X-Error-Code") == "GatedRepo") {
    return make(Action::give_up, Code::denied, cat("E622 hub: ", source.repo, " is gated and no token was sent"),
                cat("open ", source.endpoint, "/", source.repo, ", accept, and set HF_TOKEN or hub.token_file"));
  }
  return make(Action::fallback, Code::not_found,
              cat("E620 hub: ", source.repo, " was not found or cannot be seen with this token"),
              "check the name, or set HF_TOKEN or hub.token_file");
}

HubError forbidden(const Head& head, std::string_view message, const Source& source) {
  if (contains(message, "disabled")) {
    return make(Action::fallback, Code::not_found, cat("E626 hub: access to ", source.repo, " is disabled"),
                "name another repository");
  }
  if (head.header("X-Error-Code") == "GatedRepo") {
    return make(Action::give_up, Code::denied, cat("E622 hub: ", source.repo, " is gated"),
                cat("open ", source.endpoint, "/", source.repo, " as the token's user and accept"));
  }
  return make(Action::give_up, Code::denied, cat("E623 hub: the token cannot read ", source.repo),
              "a fine-grained token needs read access to this repository");
}

HubError absent(const Head& head, std::string_view message, const Source& source, const std::string& what) {
  const std::string_view code = head.header("X-Error-Code");
  if (code == "RevisionNotFound" || contains(message, "nvalid rev id")) {
    return make(Action::fallback, Code::not_found, cat("E624 hub: ", source.repo, " has no revision for ", what),
                "check the commit: a branch that was rewritten loses its old ones");
  }
  if (code == "EntryNotFound") {
    return make(Action::fallback, Code::not_found, cat("E625 hub: ", source.repo, " has no file for ", what));
  }
  return make(Action::fallback, Code::not_found, cat("E620 hub: ", source.repo, " was not found (", what, ")"),
              "check the name, or set HF_TOKEN or hub.token_file");
}

}  // namespace

Action action_of(const Error& error) {
  if (const auto* const hub = dynamic_cast<const HubError*>(&error)) return hub->action();
  switch (error.code()) {
    case Code::unavailable:
    case Code::stalled:
      return Action::retry;
    default:
      return Action::give_up;
  }
}

Millis asked_wait(const Head& head) {
  const std::string_view limit = head.header("RateLimit");
  if (member(limit, "r") == 0) {
    if (const auto t = member(limit, "t"); t && *t >= 0 && *t < 86400) return Millis((*t + 1) * 1000);
  }
  if (const auto after = parse_int(trim(head.header("Retry-After"))); after && *after >= 0 && *after < 86400) {
    return Millis(*after * 1000);
  }
  return Millis(-1);
}

HubError refusal(const Head& head, std::string_view body, const Source& source, const std::string& what, bool api) {
  const std::string message = cat(head.header("X-Error-Message"), " ", body.substr(0, 4096));
  const int status = head.status;
  if (status == 429) {
    return {Action::wait, Error(Code::overloaded, cat("E627 hub: rate limit reached (", what, ")")), asked_wait(head)};
  }
  if (status == 408 || status >= 500) {
    return make(Action::retry, Code::unavailable, cat("E628 hub: the server answered ", status, " (", what, ")"));
  }
  if (!api && (status == 401 || status == 403)) {
    return make(Action::refetch, Code::unavailable,
                cat("E629 hub: the signed URL was refused with ", status, " (", what, ")"));
  }
  if (status == 401) return unauthorized(head, message, source);
  if (status == 403) return forbidden(head, message, source);
  if (status == 404 || status == 410) return absent(head, message, source, what);
  return make(Action::fallback, Code::unavailable, cat("E619 hub: unexpected answer ", status, " (", what, ")"));
}

void Retry::progress() {
  in_a_row_ = 0;
  last_progress_ = Clock::now();
}

void Retry::sleep(Millis time) const {
  const auto until = Clock::now() + time;
  while (Clock::now() < until) {
    if (cancelled_ != nullptr && cancelled_->load()) throw_cancelled();
    const auto rest = std::chrono::duration_cast<Millis>(until - Clock::now());
    std::this_thread::sleep_for(std::clamp(rest, Millis(1), Millis(50)));
  }
}

void Retry::after(const Error& error) {
  const auto* const hub = dynamic_cast<const HubError*>(&error);
  const Action action = action_of(error);
  if (action != Action::retry && action != Action::wait && action != Action::refetch) throw;
  ++count_;
  const Millis asked = hub != nullptr ? hub->wait() : Millis(-1);
  if (asked.count() >= 0) {
    if (asked > options_.max_wait) {
      throw Error(Code::overloaded, cat(error.what(), ": the server asks to wait ", asked.count() / 1000, " s"),
                  "try later, or sign in: limits are higher with a token");
    }
    report_(cat(error.what(), "; going on in ", asked.count() / 1000, " s"));
    sleep(asked);
    last_progress_ = Clock::now();  // waiting as told is no failure
    return;
  }
  if (Clock::now() - last_progress_ >= options_.give_up_after) throw;
  const auto step =
      static_cast<double>(std::min(options_.base.count() << std::min(in_a_row_, 20), options_.longest.count()));
  ++in_a_row_;
  thread_local std::minstd_rand random{std::random_device{}()};
  const auto pause = Millis(static_cast<int64_t>(std::uniform_real_distribution<double>(0, step)(random)));
  report_(cat(error.what(), "; trying again in ", pause.count(), " ms"));
  sleep(pause);
}

}  // namespace glm53::hub
