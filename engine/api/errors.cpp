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

std::string error_body(int status, std::string_view message, std::string_view param) {
  nlohmann::ordered_json error;
  error["message"] = message;
  error["type"] = error_type(status);
  error["param"] = param.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(param);
  error["code"] = status;
  return dump({{"error", std::move(error)}});
}

HttpResponse error_response(int status, std::string_view message, std::string_view param, uint32_t retry_after_s) {
  HttpResponse response;
  response.status = status;
  response.body = error_body(status, message, param);
  if (status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  if (status == 429 || status == 503) {
    const uint32_t usual = status == 429 ? 1 : 5;
    response.headers.emplace_back("Retry-After", cat(retry_after_s > 0 ? retry_after_s : usual));
  }
  return response;
}

HttpResponse error_response(const std::exception& error) {
  if (const auto* e = dynamic_cast<const ApiError*>(&error))
    return error_response(e->status(), e->what(), e->param(), e->retry_after_s());
  if (const auto* e = dynamic_cast<const HttpError*>(&error)) return error_response(e->status(), e->what());
  if (const auto* e = dynamic_cast<const Error*>(&error)) {
    const int status = http_status(e->code());
    if (status >= 500) log::error(cat("request failed: ", e->line()));
    return error_response(status, e->line());
  }
  log::error(cat("request failed: ", error.what()));
  return error_response(500, "internal error; the server's log says more");
}

}  // namespace glm53::api
