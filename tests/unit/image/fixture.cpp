#include "tests/unit/image/fixture.h"

#include <archive.h>
#include <archive_entry.h>
#include <cstdio>
#include <memory>
#include <stdexcept>

#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::image::test {
namespace {

using Json = nlohmann::ordered_json;

void field(std::string& header, size_t at, const std::string& value) {
  header.replace(at, value.size(), value);
}

std::string octal(uint64_t value, int digits) {
  std::string text(static_cast<size_t>(digits), '0');
  for (size_t i = text.size(); i > 0; --i, value /= 8) text[i - 1] = static_cast<char>('0' + value % 8);
  return text;
}

}  // namespace

std::string make_tar(const std::vector<Member>& members, bool end) {
  std::string tar;
  for (const Member& m : members) {
    std::string header(512, '\0');
    field(header, 0, m.name.substr(0, 100));
    field(header, 100, octal(static_cast<uint64_t>(m.mode), 7));
    field(header, 108, octal(0, 7));
    field(header, 116, octal(0, 7));
    field(header, 124, octal(m.content.size(), 11));
    field(header, 136, octal(0, 11));
    field(header, 148, "        ");
    header[156] = m.type;
    field(header, 157, m.target.substr(0, 100));
    field(header, 257, "ustar");
    field(header, 263, "00");
    uint64_t sum = 0;
    for (const char c : header) sum += static_cast<unsigned char>(c);
    field(header, 148, octal(sum, 6) + std::string(1, '\0'));
    tar += header + m.content;
    tar.append((512 - m.content.size() % 512) % 512, '\0');
  }
  if (end) tar.append(1024, '\0');
  return tar;
}

std::string gzip(const std::string& bytes) {
  std::string out(bytes.size() + 65536, '\0');
  size_t used = 0;
  const auto free_writer = [](archive* a) { archive_write_free(a); };
  const std::unique_ptr<archive, decltype(free_writer)> a(archive_write_new(), free_writer);
  const auto free_entry = [](archive_entry* e) { archive_entry_free(e); };
  const std::unique_ptr<archive_entry, decltype(free_entry)> entry(archive_entry_new(), free_entry);
  archive_entry_set_pathname(entry.get(), "layer");
  archive_entry_set_filetype(entry.get(), AE_IFREG);
  archive_entry_set_size(entry.get(), static_cast<int64_t>(bytes.size()));
  if (archive_write_set_format_raw(a.get()) != ARCHIVE_OK || archive_write_add_filter_gzip(a.get()) != ARCHIVE_OK ||
      archive_write_set_bytes_in_last_block(a.get(), 1) != ARCHIVE_OK ||
      archive_write_open_memory(a.get(), out.data(), out.size(), &used) != ARCHIVE_OK ||
      archive_write_header(a.get(), entry.get()) != ARCHIVE_OK ||
      archive_write_data(a.get(), bytes.data(), bytes.size()) != static_cast<la_ssize_t>(bytes.size()) ||
      archive_write_close(a.get()) != ARCHIVE_OK) {
    throw std::runtime_error("gzip failed");
  }
  out.resize(used);
  return out;
}

Made make_image(const std::vector<std::string>& tars, bool packed, const std::string& architecture) {
  Made made;
  const auto add = [&](const std::string& bytes, const std::string& type) {
    made.blobs.emplace_back(digest_of(bytes), bytes);
    return Json{{"mediaType", type}, {"digest", digest_of(bytes)}, {"size", bytes.size()}};
  };
  Json layers = Json::array(), ids = Json::array();
  for (const std::string& tar : tars) {
    ids.push_back(digest_of(tar));
    layers.push_back(
        add(packed ? gzip(tar) : tar, cat("application/vnd.oci.image.layer.v1.tar", packed ? "+gzip" : "")));
  }
  const Json config{{"architecture", architecture.empty() ? own_platform().architecture : architecture},
                    {"os", "linux"},
                    {"rootfs", {{"type", "layers"}, {"diff_ids", ids}}}};
  const Json manifest{{"schemaVersion", 2},
                      {"mediaType", kManifestType},
                      {"config", add(dump(config), "application/vnd.oci.image.config.v1+json")},
                      {"layers", layers}};
  made.digest = digest_of(dump(manifest));
  made.blobs.emplace_back(made.digest, dump(manifest));
  return made;
}

std::string engine_tar(const std::string& version) {
  return make_tar({{"glm53-engine", cat("#!/bin/sh\necho '{\"version\":\"", version, "\"}'\n"), '0', {}, 0755},
                   {"lib", {}, '5', {}, 0755},
                   {"lib/libx.so.1", "content of " + version},
                   {"lib/libx.so", {}, '2', "libx.so.1"},
                   {"lib/again", {}, '1', "lib/libx.so.1"}});
}

void put(const Store& store, const Made& image) {
  for (const auto& [digest, bytes] : image.blobs) write_file(store.blob_path(digest), bytes);
}

}  // namespace glm53::image::test
