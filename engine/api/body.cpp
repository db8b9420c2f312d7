#include "engine/api/body.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <memory>
#include <zlib.h>

#include "common/strings.h"
#include "engine/api/errors.h"

namespace glm53::api {

namespace {

struct EndInflate {
  void operator()(z_stream* stream) const { inflateEnd(stream); }
};

constexpr int kZlibOrGzip = 15 + 32, kRaw = -15;

/// `window`: zlib's windowBits, which say what wraps the data. False when the data is something else.
bool inflate_all(std::string_view body, int window, size_t limit, std::string& out) {
  z_stream stream{};
  if (inflateInit2(&stream, window) != Z_OK) throw ApiError(500, "zlib cannot start");
  const std::unique_ptr<z_stream, EndInflate> guard(&stream);
  std::string input(body);  // zlib's pointer is not const
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  std::array<char, 1 << 16> piece;
  int state = Z_OK;
  while (state != Z_STREAM_END) {
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = piece.size();
    state = inflate(&stream, Z_NO_FLUSH);
    const size_t got = piece.size() - stream.avail_out;
    if (state != Z_OK && state != Z_STREAM_END) return false;
    if (got == 0 && state == Z_OK && stream.avail_in == 0) return false;  // it ends too early
    if (out.size() + got > limit) {
      throw ApiError(413, cat("the request body has more than ", limit, " bytes (api.max_body) when decompressed"));
    }
    out.append(piece.data(), got);
  }
  return stream.avail_in == 0;
}

}  // namespace

std::string decode_body(std::string body, std::string_view encoding, size_t limit) {
  std::string name(trim(encoding));
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (name.empty() || name == "identity") return body;
  if (name != "gzip" && name != "x-gzip" && name != "deflate") {
    throw ApiError(415, cat("Content-Encoding `", name, "` is not supported; known are gzip and deflate"));
  }
  std::string out;
  if (inflate_all(body, kZlibOrGzip, limit, out)) return out;
  out.clear();
  // Some clients send deflate without its zlib wrapper.
  if (name == "deflate" && inflate_all(body, kRaw, limit, out)) return out;
  throw ApiError(400, cat("the request body is not valid ", name));
}

}  // namespace glm53::api
