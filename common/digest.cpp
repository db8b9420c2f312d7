#include "common/digest.h"

#include <array>
#include <cerrno>
#include <vector>
#include <xxhash.h>

#include <openssl/evp.h>
#include <sys/random.h>

#include "common/error.h"

namespace glm53 {

namespace {

std::string to_hex(std::span<const unsigned char> bytes) {
  static constexpr std::string_view digits = "0123456789abcdef";
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const unsigned char b : bytes) {
    out += digits[b >> 4];
    out += digits[b & 15];
  }
  return out;
}

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

void check(int ok) {
  if (ok != 1) throw Error(Code::internal, "OpenSSL cannot compute SHA-256");
}

}  // namespace

struct Sha256::Impl {
  std::unique_ptr<EVP_MD_CTX, FreeContext> context{EVP_MD_CTX_new()};
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  check(impl_->context != nullptr ? 1 : 0);
  check(EVP_DigestInit_ex(impl_->context.get(), EVP_sha256(), nullptr));
}

Sha256::~Sha256() = default;

void Sha256::update(std::string_view data) {
  check(EVP_DigestUpdate(impl_->context.get(), data.data(), data.size()));
}

std::string Sha256::hex() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned int size = 0;
  check(EVP_DigestFinal_ex(impl_->context.get(), digest.data(), &size));
  return to_hex({digest.data(), size});
}

std::string sha256_hex(std::string_view data) {
  Sha256 sha;
  sha.update(data);
  return sha.hex();
}

uint64_t xxh64(std::span<const std::byte> data) {
  return XXH3_64bits(data.data(), data.size());
}

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> random(bytes);
  size_t filled = 0;
  while (filled < bytes) {
    const ssize_t n = ::getrandom(random.data() + filled, bytes - filled, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      throw_errno(Code::internal, "the system gives no random bytes");
    }
    filled += static_cast<size_t>(n);
  }
  return to_hex(random);
}

}  // namespace glm53
