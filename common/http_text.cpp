#include "common/http_text.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <ctime>
#include <optional>

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53 {

namespace {

bool equal_ignoring_case(std::string_view a, std::string_view b) {
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](char x, char y) { return lower(x) == lower(y); });
}

}  // namespace

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (equal_ignoring_case(key, name)) return value;
  }
  return {};
}

namespace http {

namespace {

std::optional<int> hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return std::nullopt;
}

std::string percent_decode(std::string_view text, bool plus_is_space) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (c == '%') {
      const auto high = i + 2 < text.size() ? hex_digit(text[i + 1]) : std::nullopt;
      const auto low = i + 2 < text.size() ? hex_digit(text[i + 2]) : std::nullopt;
      if (!high || !low) throw HttpError(400, "invalid percent-encoding in the request target");
      c = static_cast<char>(*high * 16 + *low);
      i += 2;
    } else if (c == '+' && plus_is_space) {
      c = ' ';
    }
    if (c == '\0') throw HttpError(400, "NUL in the request target");
    out += c;
  }
  return out;
}

/// "http://host/path" (absolute form) as "/path".
std::string_view without_authority(std::string_view target) {
  if (!target.starts_with("http://") && !target.starts_with("https://")) return target;
  const size_t slash = target.find('/', target.find("//") + 2);
  return slash == std::string_view::npos ? "/" : target.substr(slash);
}

std::vector<std::string> pattern_segments(std::string_view path) {
  if (path.starts_with('/')) path.remove_prefix(1);
  return split(path, '/');
}

/// A header cannot be used to smuggle in another one.
void append_value(std::string& out, std::string_view value) {
  for (const char c : value) out += c == '\r' || c == '\n' || c == '\0' ? ' ' : c;
}

std::string date_now() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  static constexpr std::array<const char*, 7> days = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr std::array<const char*, 12> months = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                         "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  std::array<char, 64> text;  // not strftime: names must not follow the locale
  std::snprintf(text.data(), text.size(), "%s, %02d %s %04d %02d:%02d:%02d GMT",
                days.at(static_cast<size_t>(utc.tm_wday)), utc.tm_mday, months.at(static_cast<size_t>(utc.tm_mon)),
                utc.tm_year + 1900, utc.tm_hour, utc.tm_min, utc.tm_sec);
  return text.data();
}

struct Reason {
  int status;
  std::string_view text;
};

constexpr Reason kReasons[] = {{100, "Continue"},
                               {200, "OK"},
                               {201, "Created"},
                               {202, "Accepted"},
                               {204, "No Content"},
                               {206, "Partial Content"},
                               {301, "Moved Permanently"},
                               {302, "Found"},
                               {303, "See Other"},
                               {304, "Not Modified"},
                               {307, "Temporary Redirect"},
                               {308, "Permanent Redirect"},
                               {400, "Bad Request"},
                               {401, "Unauthorized"},
                               {403, "Forbidden"},
                               {404, "Not Found"},
                               {405, "Method Not Allowed"},
                               {406, "Not Acceptable"},
                               {408, "Request Timeout"},
                               {409, "Conflict"},
                               {410, "Gone"},
                               {411, "Length Required"},
                               {412, "Precondition Failed"},
                               {413, "Payload Too Large"},
                               {414, "URI Too Long"},
                               {415, "Unsupported Media Type"},
                               {417, "Expectation Failed"},
                               {422, "Unprocessable Content"},
                               {424, "Failed Dependency"},
                               {429, "Too Many Requests"},
                               {431, "Request Header Fields Too Large"},
                               {500, "Internal Server Error"},
                               {501, "Not Implemented"},
                               {502, "Bad Gateway"},
                               {503, "Service Unavailable"},
                               {504, "Gateway Timeout"},
                               {505, "HTTP Version Not Supported"},
                               {507, "Insufficient Storage"},
                               {529, "Overloaded"}};

}  // namespace

Target parse_target(std::string_view target) {
  target = without_authority(target);
  target = target.substr(0, target.find('#'));
  const size_t question = target.find('?');
  const std::string_view path = target.substr(0, question);
  Target out;
  out.path = percent_decode(path, false);
  for (const auto& segment : pattern_segments(path)) out.segments.push_back(percent_decode(segment, false));
  if (question == std::string_view::npos) return out;
  for (const auto& pair : split(target.substr(question + 1), '&')) {
    if (pair.empty()) continue;
    const size_t equals = pair.find('=');
    const std::string_view view = pair;
    const std::string_view value = equals == std::string::npos ? std::string_view() : view.substr(equals + 1);
    out.query[percent_decode(view.substr(0, equals), true)] = percent_decode(value, true);
  }
  return out;
}

std::string_view reason(int status) {
  for (const auto& r : kReasons) {
    if (r.status == status) return r.text;
  }
  return "Unknown";
}

std::string format_head(const Head& head, const std::vector<std::pair<std::string, std::string>>& headers) {
  std::string out = cat(head.http11 ? "HTTP/1.1 " : "HTTP/1.0 ", head.status, " ", reason(head.status), "\r\n");
  if (!head.content_type.empty()) {
    out += "Content-Type: ";
    append_value(out, head.content_type);
    out += "\r\n";
  }
  for (const auto& [key, value] : headers) {
    append_value(out, key);
    out += ": ";
    append_value(out, value);
    out += "\r\n";
  }
  out += cat("Date: ", date_now(), "\r\n");
  if (head.chunked) out += "Transfer-Encoding: chunked\r\n";
  if (head.has_length) out += cat("Content-Length: ", head.length, "\r\n");
  if (!head.keep_alive) {
    out += "Connection: close\r\n";
  } else if (!head.http11) {
    out += "Connection: keep-alive\r\n";
  }
  out += "\r\n";
  return out;
}

std::string frame_chunk(std::string_view data) {
  if (data.empty()) return {};
  std::array<char, 16> size;
  const auto end = std::to_chars(size.data(), size.data() + size.size(), data.size(), 16).ptr;
  std::string out;
  out.reserve(data.size() + 20);
  out.append(size.data(), end);
  out += "\r\n";
  out += data;
  out += "\r\n";
  return out;
}

int error_status(const std::exception& e) {
  if (const auto* http = dynamic_cast<const HttpError*>(&e)) return http->status();
  if (const auto* error = dynamic_cast<const Error*>(&e)) return http_status(error->code());
  return 500;
}

HttpResponse default_error(const std::exception& e) {
  HttpResponse response;
  response.status = error_status(e);
  const auto* error = dynamic_cast<const Error*>(&e);
  nlohmann::ordered_json body;
  body["error"]["message"] = error != nullptr ? error->line() : std::string(e.what());
  body["error"]["code"] = error != nullptr ? name(error->code()) : reason(response.status);
  response.body = dump(body);
  return response;
}

void RouteTable::add(const std::string& method, const std::string& pattern, HttpHandler handler) {
  Route route;
  route.method = method;
  route.any = pattern == "*";
  if (!route.any) route.segments = pattern_segments(pattern);
  route.params = static_cast<size_t>(std::count_if(route.segments.begin(), route.segments.end(),
                                                   [](const std::string& s) { return s.starts_with('{'); }));
  route.handler = std::move(handler);
  routes_.push_back(std::move(route));
}

const RouteTable::Route* RouteTable::best(const std::string& method, const std::vector<std::string>& segments) const {
  const Route* found = nullptr;
  for (const auto& route : routes_) {
    if (route.any || route.method != method || route.segments.size() != segments.size()) continue;
    bool fits = true;
    for (size_t i = 0; i < segments.size() && fits; ++i) {
      fits = route.segments[i] == segments[i] || (route.segments[i].starts_with('{') && !segments[i].empty());
    }
    if (fits && (found == nullptr || route.params < found->params)) found = &route;
  }
  return found;
}

RouteTable::Match RouteTable::find(const std::string& method, const std::vector<std::string>& segments) const {
  Match match;
  const Route* route = best(method, segments);
  if (route == nullptr && method == "HEAD") route = best("GET", segments);
  if (route != nullptr) {
    match.handler = &route->handler;
    for (size_t i = 0; i < segments.size(); ++i) {
      const std::string& name = route->segments[i];
      if (name.starts_with('{')) match.params[name.substr(1, name.size() - 2)] = segments[i];
    }
    return match;
  }
  for (const auto& other : routes_) {
    if (other.any && other.method == method) {
      match.handler = &other.handler;
      return match;
    }
    const auto known = std::find(match.allowed.begin(), match.allowed.end(), other.method);
    if (!other.any && known == match.allowed.end() && best(other.method, segments) != nullptr) {
      match.allowed.push_back(other.method);
    }
  }
  return match;
}

}  // namespace http
}  // namespace glm53
