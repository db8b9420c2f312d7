// Errors as OpenAI clients expect them.
#pragma once

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/http_server.h"

namespace glm53::api {

/// A request that is answered with an error object {"error":{message,type,param,code}}.
class ApiError : public std::runtime_error {
 public:
  ApiError(int status, const std::string& message, std::string param = {}, uint32_t retry_after_s = 0)
      : std::runtime_error(message), status_(status), param_(std::move(param)), retry_after_s_(retry_after_s) {}
  int status() const { return status_; }
  /// Member of the request that is wrong; "" = none.
  const std::string& param() const { return param_; }
  /// Of 429 and 503: seconds after which to try again; 0 = the default of the status.
  uint32_t retry_after_s() const { return retry_after_s_; }

 private:
  int status_;
  std::string param_;
  uint32_t retry_after_s_;
};

/// Whose error objects a client understands.
enum class Dialect { openai, anthropic };
/// Anthropic's for /v1/messages and below, OpenAI's for everything else.
Dialect dialect_of(std::string_view path);

/// "BadRequestError" for 400, …
std::string_view error_type(int status);
/// {"error":{…}} or {"type":"error","error":{…}}, one line.
std::string error_body(int status, std::string_view message, std::string_view param = {},
                       Dialect dialect = Dialect::openai);
/// With WWW-Authenticate on 401, Retry-After on 429 and 503 (0 = 1 and 5 seconds).
HttpResponse error_response(int status, std::string_view message, std::string_view param = {},
                            uint32_t retry_after_s = 0, Dialect dialect = Dialect::openai);
/// The answer to whatever a handler threw: ApiError, HttpError, Error, or anything else (500 without its text, which is
/// logged).
HttpResponse error_response(const std::exception& error, Dialect dialect = Dialect::openai);

}  // namespace glm53::api
