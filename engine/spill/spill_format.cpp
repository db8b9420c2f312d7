#include "engine/spill/spill_format.h"

#include <algorithm>
#include <cstring>

#include "common/bytes.h"
#include "common/digest.h"

namespace glm53::spill {
namespace {

constexpr std::string_view kMagic = "GLM53SPL", kPrefix = "segment-", kSuffix = ".spill";
constexpr uint32_t kVersion = 1, kRecordMagic = 0x31435253;
constexpr size_t kNamespace = 64, kDigits = 16;

void seal(std::vector<std::byte>& bytes) {
  ByteWriter w;
  w.put(xxh64(bytes));
  const std::vector<std::byte> sum = w.take();
  bytes.insert(bytes.end(), sum.begin(), sum.end());
}

bool sealed(std::span<const std::byte> bytes) {
  uint64_t sum = 0;
  std::memcpy(&sum, bytes.data() + bytes.size() - sizeof sum, sizeof sum);
  return xxh64(bytes.first(bytes.size() - sizeof sum)) == sum;
}

}  // namespace

size_t NameHash::operator()(const Name& n) const {
  size_t out = 0;  // the name is a cryptographic hash: any part of it will do
  std::memcpy(&out, n.hash.data(), sizeof out);
  return out ^ static_cast<size_t>(n.kind);
}

std::vector<std::byte> encode_segment_header(std::string_view name_space, uint64_t sequence) {
  if (name_space.size() != kNamespace) throw Error(Code::internal, "spill: a namespace is 64 hex digits");
  ByteWriter w;
  for (const char c : kMagic) w.put(c);
  w.put(kVersion);
  w.put(uint32_t{0});
  for (const char c : name_space) w.put(c);
  w.put(sequence);
  std::vector<std::byte> out = w.take();
  seal(out);
  return out;
}

std::optional<uint64_t> decode_segment_header(std::span<const std::byte> bytes, std::string_view name_space) {
  if (bytes.size() < kSegmentHeader || !sealed(bytes.first(kSegmentHeader))) return std::nullopt;
  uint64_t sequence = 0;
  std::memcpy(&sequence, bytes.data() + 80, sizeof sequence);
  const std::vector<std::byte> mine = encode_segment_header(name_space, sequence);
  return std::equal(mine.begin(), mine.end(), bytes.begin()) ? std::optional(sequence) : std::nullopt;
}

std::vector<std::byte> encode_record_header(const RecordHeader& header) {
  const Meta& m = header.meta;
  ByteWriter w;
  w.put(kRecordMagic);
  w.put(m.name.kind);
  w.put(m.cls);
  w.put(uint16_t{0});
  w.put(m.position);
  w.put(uint32_t{0});
  for (const uint8_t b : m.name.hash) w.put(b);
  w.put(header.bytes);
  w.put(header.checksum);
  for (const int32_t t : m.tokens) w.put(t);
  std::vector<std::byte> out = w.take();
  seal(out);
  return out;
}

std::optional<RecordHeader> decode_record_header(std::span<const std::byte> bytes) {
  if (bytes.size() < kRecordHeader || !sealed(bytes.first(kRecordHeader))) return std::nullopt;
  ByteReader r(bytes);
  if (r.get<uint32_t>() != kRecordMagic) return std::nullopt;
  RecordHeader h;
  h.meta.name.kind = r.get<Kind>();
  if (h.meta.name.kind != Kind::block && h.meta.name.kind != Kind::snapshot) return std::nullopt;
  h.meta.cls = r.get<uint8_t>();
  r.get<uint16_t>();
  h.meta.position = r.get<int32_t>();
  r.get<uint32_t>();
  for (uint8_t& b : h.meta.name.hash) b = r.get<uint8_t>();
  h.bytes = r.get<uint64_t>();
  h.checksum = r.get<uint64_t>();
  for (int32_t& t : h.meta.tokens) t = r.get<int32_t>();
  return h;
}

std::string segment_name(uint64_t sequence) {
  static constexpr std::string_view kHex = "0123456789abcdef";
  std::string out(kPrefix);
  for (size_t i = kDigits; i-- > 0;) out += kHex[sequence >> (4 * i) & 15];
  return out.append(kSuffix);
}

std::optional<uint64_t> segment_sequence(std::string_view file_name) {
  if (file_name.size() != kPrefix.size() + kDigits + kSuffix.size() || !file_name.starts_with(kPrefix) ||
      !file_name.ends_with(kSuffix))
    return std::nullopt;
  uint64_t sequence = 0;
  for (const char c : file_name.substr(kPrefix.size(), kDigits)) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'a' || c > 'f')) return std::nullopt;
    sequence = sequence << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  return sequence;
}

}  // namespace glm53::spill
