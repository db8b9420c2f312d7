#include "common/pki.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <ctime>

#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include "common/error.h"
#include "common/openssl.h"
#include "common/strings.h"

namespace glm53::openssl {

namespace {

Bio memory(const std::string& text) {
  Bio bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
  if (!bio) fail("BIO_new_mem_buf");
  return bio;
}

/// PEM keys may be encrypted; nobody is here to ask.
int no_password(char*, int, int, void*) {
  return -1;
}

}  // namespace

Key read_key(const std::string& pem) {
  const Bio bio = memory(pem);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  if (!key) throw Error(Code::config, cat("this is no private key in PEM (", reason(), ")"));
  return key;
}

Cert read_cert(const std::string& pem) {
  const Bio bio = memory(pem);
  Cert cert(PEM_read_bio_X509(bio.get(), nullptr, no_password, nullptr));
  if (!cert) throw Error(Code::usage, cat("this is no certificate in PEM (", reason(), ")"));
  return cert;
}

}  // namespace glm53::openssl

namespace glm53::pki {

using namespace openssl;

namespace {

constexpr long kVersion3 = 2;
constexpr std::string_view kScheme = "glm53://";
constexpr std::array<std::string_view, 4> kRoles{"head", "node", "operator", "reader"};

std::string text_of(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return size > 0 ? std::string(data, static_cast<size_t>(size)) : std::string();
}

template <class Write>
std::string to_pem(const Write& write) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (!bio) fail("BIO_new");
  check(write(bio.get()), "writing PEM");
  return text_of(bio.get());
}

std::string pem_of(X509* cert) {
  return to_pem([cert](BIO* bio) { return PEM_write_bio_X509(bio, cert); });
}

void set_time(ASN1_TIME* field, int64_t seconds) {
  if (ASN1_TIME_set(field, static_cast<time_t>(seconds)) == nullptr) fail("ASN1_TIME_set");
}

int64_t seconds_of(const ASN1_TIME* field) {
  std::tm parts{};
  check(ASN1_TIME_to_tm(field, &parts), "reading a time");
  return ::timegm(&parts);
}

void set_serial(X509* cert) {
  std::array<unsigned char, 16> bytes{};
  check(RAND_bytes(bytes.data(), bytes.size()), "RAND_bytes");
  bytes[0] &= 0x7F;  // positive
  bytes[0] |= 0x01;
  const std::unique_ptr<BIGNUM, Free<BN_free>> number(BN_bin2bn(bytes.data(), bytes.size(), nullptr));
  if (!number || BN_to_ASN1_INTEGER(number.get(), X509_get_serialNumber(cert)) == nullptr) fail("a serial number");
}

void set_name(X509_NAME* name, const char* field, const std::string& value) {
  check(X509_NAME_add_entry_by_txt(name, field, MBSTRING_UTF8, reinterpret_cast<const unsigned char*>(value.data()),
                                   static_cast<int>(value.size()), -1, 0),
        "a certificate's name");
}

void extend(X509* cert, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, cert, nullptr, nullptr, 0);
  const std::unique_ptr<X509_EXTENSION, Free<X509_EXTENSION_free>> extension(
      X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  if (!extension) fail("a certificate's extension");
  check(X509_add_ext(cert, extension.get(), -1), "a certificate's extension");
}

Cert blank(Validity validity) {
  Cert cert(X509_new());
  if (!cert) fail("X509_new");
  check(X509_set_version(cert.get(), kVersion3), "X509_set_version");
  set_serial(cert.get());
  set_time(X509_getm_notBefore(cert.get()), validity.from);
  set_time(X509_getm_notAfter(cert.get()), validity.until);
  return cert;
}

/// Of "glm53://cluster/role/name"; empty when it is none.
Identity parse_identity(std::string_view uri) {
  if (!uri.starts_with(kScheme)) return {};
  const auto parts = split(uri.substr(kScheme.size()), '/');
  if (parts.size() != 3 || std::find(kRoles.begin(), kRoles.end(), parts[1]) == kRoles.end()) return {};
  return {parts[0], parts[1], parts[2]};
}

Identity identity_of(X509* cert) {
  const std::unique_ptr<GENERAL_NAMES, Free<GENERAL_NAMES_free>> names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(cert, NID_subject_alt_name, nullptr, nullptr)));
  Identity found;
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const entry = sk_GENERAL_NAME_value(names.get(), i);
    if (entry->type != GEN_URI) continue;
    const ASN1_IA5STRING* const uri = entry->d.uniformResourceIdentifier;
    const Identity one = parse_identity(
        {reinterpret_cast<const char*>(ASN1_STRING_get0_data(uri)), static_cast<size_t>(ASN1_STRING_length(uri))});
    if (one.role.empty()) continue;
    if (!found.role.empty()) return {};  // two of them: nobody
    found = one;
  }
  return found;
}

std::string fingerprint_of(X509* cert) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned int size = 0;
  check(X509_digest(cert, EVP_sha256(), bytes.data(), &size), "X509_digest");
  std::string hex;
  for (unsigned int i = 0; i < size; ++i) {
    hex += "0123456789abcdef"[bytes[i] >> 4];
    hex += "0123456789abcdef"[bytes[i] & 15];
  }
  return hex;
}

}  // namespace

void check_name(std::string_view name, std::string_view what) {
  const auto plain = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  const bool good =
      !name.empty() && name.size() <= 63 && plain(name.front()) &&
      std::all_of(name.begin(), name.end(), [&](char c) { return plain(c) || c == '.' || c == '-' || c == '_'; });
  if (!good) {
    throw Error(Code::usage, cat("'", name, "' cannot be the name of ", what),
                "letters, digits, dots, dashes and underscores, 63 at most, a letter or digit first");
  }
}

std::string make_key() {
  const Key key(EVP_EC_gen("P-256"));
  if (!key) fail("making a key");
  return to_pem(
      [&](BIO* bio) { return PEM_write_bio_PKCS8PrivateKey(bio, key.get(), nullptr, nullptr, 0, nullptr, nullptr); });
}

std::string make_ca(const std::string& key_pem, const std::string& cluster, Validity validity) {
  check_name(cluster, "a cluster");
  const Key key = read_key(key_pem);
  const Cert cert = blank(validity);
  X509_NAME* const name = X509_get_subject_name(cert.get());
  set_name(name, "O", cluster);
  set_name(name, "CN", "glm53 cluster CA");
  check(X509_set_issuer_name(cert.get(), name), "X509_set_issuer_name");
  check(X509_set_pubkey(cert.get(), key.get()), "X509_set_pubkey");
  extend(cert.get(), cert.get(), NID_basic_constraints, "critical,CA:TRUE,pathlen:0");
  extend(cert.get(), cert.get(), NID_key_usage, "critical,keyCertSign,cRLSign");
  extend(cert.get(), cert.get(), NID_subject_key_identifier, "hash");
  if (X509_sign(cert.get(), key.get(), EVP_sha256()) == 0) fail("signing");
  return pem_of(cert.get());
}

std::string make_request(const std::string& key_pem) {
  const Key key = read_key(key_pem);
  const Request request(X509_REQ_new());
  if (!request) fail("X509_REQ_new");
  check(X509_REQ_set_pubkey(request.get(), key.get()), "X509_REQ_set_pubkey");
  if (X509_REQ_sign(request.get(), key.get(), EVP_sha256()) == 0) fail("signing");
  return to_pem([&](BIO* bio) { return PEM_write_bio_X509_REQ(bio, request.get()); });
}

std::string sign(const std::string& ca_key, const std::string& ca_pem, const std::string& request_pem,
                 const Identity& identity, Validity validity) {
  check_name(identity.cluster, "a cluster");
  check_name(identity.name, cat("a ", identity.role));
  const Bio bio(BIO_new_mem_buf(request_pem.data(), static_cast<int>(request_pem.size())));
  const Request request(bio ? PEM_read_bio_X509_REQ(bio.get(), nullptr, nullptr, nullptr) : nullptr);
  EVP_PKEY* const subject = request ? X509_REQ_get0_pubkey(request.get()) : nullptr;
  if (subject == nullptr || X509_REQ_verify(request.get(), subject) != 1) {
    throw Error(Code::usage, cat("this is no request for a certificate (", reason(), ")"));
  }
  const Key key = read_key(ca_key);
  const Cert ca = read_cert(ca_pem);
  const Cert cert = blank(validity);
  X509_NAME* const name = X509_get_subject_name(cert.get());
  set_name(name, "O", identity.cluster);
  set_name(name, "OU", identity.role);
  set_name(name, "CN", identity.name);
  check(X509_set_issuer_name(cert.get(), X509_get_subject_name(ca.get())), "X509_set_issuer_name");
  check(X509_set_pubkey(cert.get(), subject), "X509_set_pubkey");
  const bool serves = identity.role == "head" || identity.role == "node";
  extend(cert.get(), ca.get(), NID_basic_constraints, "critical,CA:FALSE");
  extend(cert.get(), ca.get(), NID_key_usage, "critical,digitalSignature");
  extend(cert.get(), ca.get(), NID_ext_key_usage, serves ? "serverAuth,clientAuth" : "clientAuth");
  extend(cert.get(), ca.get(), NID_subject_key_identifier, "hash");
  extend(cert.get(), ca.get(), NID_authority_key_identifier, "keyid");
  extend(cert.get(), ca.get(), NID_subject_alt_name,
         cat("URI:", kScheme, identity.cluster, "/", identity.role, "/", identity.name));
  if (X509_sign(cert.get(), key.get(), EVP_sha256()) == 0) fail("signing");
  return pem_of(cert.get());
}

Certificate read_certificate(const std::string& pem) {
  const Cert cert = read_cert(pem);
  Certificate out;
  out.identity = identity_of(cert.get());
  out.fingerprint = fingerprint_of(cert.get());
  out.validity = {seconds_of(X509_get0_notBefore(cert.get())), seconds_of(X509_get0_notAfter(cert.get()))};
  out.is_ca = X509_check_ca(cert.get()) == 1;
  return out;
}

bool belongs(const std::string& key_pem, const std::string& certificate) {
  const Key key = read_key(key_pem);
  const Cert cert = read_cert(certificate);
  const bool same = X509_check_private_key(cert.get(), key.get()) == 1;
  ERR_clear_error();
  return same;
}

std::string time_text(int64_t seconds) {
  const std::time_t at = static_cast<std::time_t>(seconds);
  std::tm parts{};
  std::array<char, 64> text{};
  if (::gmtime_r(&at, &parts) == nullptr) return cat(seconds, " s");
  return {text.data(), std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M:%S UTC", &parts)};
}

}  // namespace glm53::pki
