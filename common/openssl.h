// OpenSSL's objects as owners, for the few files that speak to it.
#pragma once

#include <memory>
#include <string>

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::openssl {

template <auto free_function>
struct Free {
  template <class T>
  void operator()(T* object) const {
    free_function(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY_free>>;
using Cert = std::unique_ptr<X509, Free<X509_free>>;
using Request = std::unique_ptr<X509_REQ, Free<X509_REQ_free>>;
using Bio = std::unique_ptr<BIO, Free<BIO_free_all>>;
using Store = std::unique_ptr<X509_STORE, Free<X509_STORE_free>>;
using StoreContext = std::unique_ptr<X509_STORE_CTX, Free<X509_STORE_CTX_free>>;
using Context = std::unique_ptr<SSL_CTX, Free<SSL_CTX_free>>;
using Ssl = std::unique_ptr<SSL, Free<SSL_free>>;

/// The newest reason of this thread, and forgets all.
inline std::string reason() {
  const unsigned long code = ERR_peek_last_error();
  const char* const text = code == 0 ? nullptr : ERR_reason_error_string(code);
  ERR_clear_error();
  return text == nullptr ? "unknown reason" : text;
}
[[noreturn]] inline void fail(std::string_view what) {
  throw Error(Code::internal, cat(what, " failed: ", reason()));
}
/// For calls that answer 1 when they went well.
inline void check(long result, std::string_view what) {
  if (result != 1) fail(what);
}

Key read_key(const std::string& pem);
Cert read_cert(const std::string& pem);

}  // namespace glm53::openssl
