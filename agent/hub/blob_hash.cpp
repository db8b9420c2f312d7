#include "agent/hub/blob_hash.h"

#include <array>

#include <openssl/evp.h>

#include "common/error.h"
#include "common/strings.h"

namespace glm53::hub {
namespace {

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

void check(int ok) {
  if (ok != 1) throw Error(Code::internal, "OpenSSL cannot compute the digest of a blob");
}

}  // namespace

struct BlobHash::Impl {
  std::unique_ptr<EVP_MD_CTX, FreeContext> context{EVP_MD_CTX_new()};
};

BlobHash::BlobHash(size_t digits, int64_t size) : impl_(std::make_unique<Impl>()) {
  check(impl_->context != nullptr ? 1 : 0);
  check(EVP_DigestInit_ex(impl_->context.get(), digits == 40 ? EVP_sha1() : EVP_sha256(), nullptr));
  if (digits == 40) {
    const std::string head = cat("blob ", size);
    update({head.c_str(), head.size() + 1});  // with the NUL
  }
}

BlobHash::~BlobHash() = default;

void BlobHash::update(std::string_view data) {
  check(EVP_DigestUpdate(impl_->context.get(), data.data(), data.size()));
}

std::string BlobHash::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned int size = 0;
  check(EVP_DigestFinal_ex(impl_->context.get(), digest.data(), &size));
  static constexpr std::string_view digits = "0123456789abcdef";
  std::string out;
  for (unsigned int i = 0; i < size; ++i) {
    out += digits[digest.at(i) >> 4];
    out += digits[digest.at(i) & 15];
  }
  return out;
}

std::string hash_of(std::string_view content, size_t digits) {
  BlobHash hash(digits, static_cast<int64_t>(content.size()));
  hash.update(content);
  return hash.hex();
}

}  // namespace glm53::hub
