// The files of the spill tier. All numbers little-endian.
//
// A segment, `segment-<sequence, 16 hex digits>.spill`, is a header of 96 bytes and records, appended one behind the
// other. Segments are written one at a time, never reopened for writing after a restart, and removed whole, oldest
// (lowest sequence) first. Of several records of one name the one written last counts.
//
//   segment header        0  u8[8]   "GLM53SPL"
//                         8  u32     version, 1
//                        12  u32     0
//                        16  u8[64]  namespace: SHA-256, lower-case hex, of everything that decides the bytes of a
//                                    payload (model, formats, rank, sizes); a segment of another one is never read
//                        80  u64     sequence
//                        88  u64     XXH64 of bytes 0 … 87
//   record header         0  u32     0x31435253 ("SRC1")
//                         4  u8      kind: 0 block, 1 snapshot
//                         5  u8      class of a snapshot (prefix::SnapClass); 0 of a block
//                         6  u16     0
//                         8  i32     position: tokens of the whole prefix
//                        12  u32     0
//                        16  u8[16]  chain hash of the prefix
//                        32  u64     bytes of the payload
//                        40  u64     XXH64 of the payload
//                        48  i32[64] the last 64 tokens of the prefix
//                       304  u64     XXH64 of bytes 0 … 303
//   payload             312  the bytes as they lie in the pool
//
// A reader takes records from the front until one is cut off or does not fit its checksum, and ignores what follows.
// The checksum of a payload is looked at when it is read.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace glm53::spill {

inline constexpr int kTokens = 64;  ///< of a block, and of a record's header
inline constexpr size_t kSegmentHeader = 96, kRecordHeader = 312;

enum class Kind : uint8_t { block = 0, snapshot = 1 };

/// What a record holds. Names are chain hashes: equal names, equal prefixes.
struct Name {
  Kind kind = Kind::block;
  std::array<uint8_t, 16> hash{};
  auto operator<=>(const Name&) const = default;
};
struct NameHash {
  size_t operator()(const Name& n) const;
};

struct Meta {
  Name name;
  uint8_t cls = 0;
  int32_t position = 0;
  std::array<int32_t, kTokens> tokens{};
  bool operator==(const Meta&) const = default;
};

struct RecordHeader {
  Meta meta;
  uint64_t bytes = 0, checksum = 0;
};

std::vector<std::byte> encode_segment_header(std::string_view name_space, uint64_t sequence);
/// The sequence; nullopt when it is damaged, of another version or of another namespace.
std::optional<uint64_t> decode_segment_header(std::span<const std::byte> bytes, std::string_view name_space);

std::vector<std::byte> encode_record_header(const RecordHeader& header);
/// nullopt when it is damaged or of a kind that this version does not know.
std::optional<RecordHeader> decode_record_header(std::span<const std::byte> bytes);

std::string segment_name(uint64_t sequence);
/// nullopt for a name that segment_name() does not give.
std::optional<uint64_t> segment_sequence(std::string_view file_name);

}  // namespace glm53::spill
