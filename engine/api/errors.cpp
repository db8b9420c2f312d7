#include "engine/api/errors.h"

#include <nlohmann/json.hpp>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::api {

std::string_view error_type(int status) {
  switch (status) {
    case 400:
      return "BadRequestError";
    case 401:
      return "Unauthorized";
    case 404:
      return "NotFoundError";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Payload Too Large";
    case 429:
      return "TooManyRequests";
    case 431:
      return "Request Header Fields Too Large";
    case 501:
      return "NotImplementedError";
    case 503:
      return "ServiceUnavailable";
    default:
      return status < 500 ? "BadRequestError" : "InternalServerError";
  }
}

Dialect dialect_of(std::string_view path) {
  return path == "/v1/messages" || path.starts_with("/v1/messages/") ? Dialect::anthropic : Dialect::openai;
}

namespace {

std::string_view anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status < 500 ? "invalid_request_error" : "api_error";
  }
}

}  // namespace

std::string error_body(int status, std::string_view message, std::string_view param, Dialect dialect) {
  if (dialect == Dialect::anthropic) {
    return dump({{"type", "error"}, {"error", {{"type", anthropic_type(status)}, {"message", message}}}});
  }
  nlohmann::ordered_json error;
  error["message"] = message;
  error["type"] = error_type(status);
  error["param"] = param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param);
  error["code"] = status;
  return dump({{"error", std::move(error)}});
}

HttpResponse error_response(int status, std::string_view message, std::string_view param, uint32_t retry_after_s,
                            Dialect dialect) {
  HttpResponse response;
  response.status = status;
  response.body = error_body(status, message, param, dialect);
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (status == 429 || status == 503) {
    const uint32_t usual = status == 429 ? 1 : 5;
    response.headers.emplace_back("Retry-After", cat(retry_after_s > 0 ? retry_after_s : usual));
  }
  return response;
}

HttpResponse error_response(const std::exception& error, Dialect dialect) {
  if (const auto* e = dynamic_cast<const ApiError*>(&error))
    return error_response(e->status(), e->what(), e->param(), e->retry_after_s(), dialect);
  if (const auto* e = dynamic_cast<const HttpError*>(&error))
    return error_response(e->status(), e->what(), {}, 0, dialect);
  if (const auto* e = dynamic_cast<const Error*>(&error)) {
    const int status = http_status(e->code());
    if (status >= 500) log::error(cat("request failed: ", e->line()));
    return error_response(status, e->line(), {}, 0, dialect);
  }
  log::error(cat("request failed: ", error.what()));
  return error_response(500, "internal error; the server's log says more", {}, 0, dialect);
}

}  // namespace glm53::api
