// OCI image layouts in one tar: how bundles travel without a registry.
#include <algorithm>
#include <archive.h>
#include <archive_entry.h>
#include <cerrno>
#include <fcntl.h>
#include <memory>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "agent/image/store.h"
#include "common/digest.h"
#include "common/error.h"
#include "common/json.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

using Json = nlohmann::ordered_json;

struct FreeReader {
  void operator()(archive* a) const { archive_read_free(a); }
};
struct FreeWriter {
  void operator()(archive* a) const { archive_write_free(a); }
};
struct FreeEntry {
  void operator()(archive_entry* e) const { archive_entry_free(e); }
};

std::string reason(archive* a) {
  const char* const text = archive_error_string(a);
  return text == nullptr ? "unknown reason" : text;
}

void check(archive* a, la_ssize_t code, const std::string& file) {
  if (code < ARCHIVE_OK) throw Error(Code::unavailable, cat("image: cannot write ", file, ": ", reason(a)));
}

/// One file of the tar; its content comes in pieces.
void add_head(archive* a, const std::string& name, int64_t size, const std::string& file) {
  const std::unique_ptr<archive_entry, FreeEntry> entry(archive_entry_new());
  if (!entry) throw Error(Code::memory, "libarchive: out of memory");
  archive_entry_set_pathname(entry.get(), name.c_str());
  archive_entry_set_size(entry.get(), size);
  archive_entry_set_filetype(entry.get(), AE_IFREG);
  archive_entry_set_perm(entry.get(), 0644);
  archive_entry_set_mtime(entry.get(), 0, 0);
  check(a, archive_write_header(a, entry.get()), file);
}

void add_text(archive* a, const std::string& name, const std::string& text, const std::string& file) {
  add_head(a, name, static_cast<int64_t>(text.size()), file);
  check(a, archive_write_data(a, text.data(), text.size()), file);
}

void add_blob(archive* a, const std::string& from, const std::string& digest, int64_t size, const std::string& file) {
  const UniqueFd fd(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) throw_errno(Code::corrupt, cat("E650 image: the blob ", digest, " is not there"));
  add_head(a, cat("blobs/sha256/", hex_of(digest)), size, file);
  Sha256 hash;
  std::string buffer(size_t{1} << 20, '\0');
  while (true) {
    const ssize_t n = ::read(fd.get(), buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(Code::unavailable, cat("image: cannot read ", from));
    if (n == 0) break;
    hash.update({buffer.data(), static_cast<size_t>(n)});
    check(a, archive_write_data(a, buffer.data(), static_cast<size_t>(n)), file);
  }
  if ("sha256:" + hash.hex() != digest) {
    throw Error(Code::corrupt, cat("E650 image: ", from, " does not match its digest"), "install the image again");
  }
}

/// Stores a file of the tar as a blob. Throws Error(corrupt) when it is not what its name says.
void take_blob(archive* a, const std::string& path, const std::string& digest, const StoreOptions& options) {
  const std::string partial = path + ".import";
  const UniqueFd fd(::open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) throw_errno(Code::unavailable, cat("image: cannot write ", partial));
  Sha256 hash;
  std::string buffer(size_t{1} << 20, '\0');
  while (true) {
    options.check();
    const la_ssize_t n = archive_read_data(a, buffer.data(), buffer.size());
    if (n < 0) throw Error(Code::corrupt, cat("E653 image: a damaged tar: ", reason(a)));
    if (n == 0) break;
    hash.update({buffer.data(), static_cast<size_t>(n)});
    for (size_t done = 0; done < static_cast<size_t>(n);) {
      const ssize_t w = ::write(fd.get(), buffer.data() + done, static_cast<size_t>(n) - done);
      if (w < 0 && errno == EINTR) continue;
      if (w <= 0) throw_errno(Code::unavailable, cat("E640 image: cannot write ", partial));
      done += static_cast<size_t>(w);
    }
  }
  if ("sha256:" + hash.hex() != digest) {
    (void)::unlink(partial.c_str());
    throw Error(Code::corrupt, cat("E650 image: blobs/sha256/", hex_of(digest), " does not match its digest"));
  }
  if (::fsync(fd.get()) != 0 || ::rename(partial.c_str(), path.c_str()) != 0) {
    throw_errno(Code::unavailable, cat("image: cannot write ", path));
  }
}

std::string take_text(archive* a) {
  std::string text(kMaxDocument + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const la_ssize_t n = archive_read_data(a, text.data() + size, text.size() - size);
    if (n < 0) throw Error(Code::corrupt, cat("E653 image: a damaged tar: ", reason(a)));
    if (n == 0) break;
    size += static_cast<size_t>(n);
  }
  text.resize(size);
  return text;
}

}  // namespace

void Store::export_tar(std::string_view name, const std::string& file) const {
  const Bundle bundle = find(name);
  const Manifest manifest = image_of(bundle.digest).second;
  const std::string bytes = document(bundle.digest), partial = file + ".partial";
  try {
    const std::unique_ptr<archive, FreeWriter> owner(archive_write_new());
    archive* const a = owner.get();
    if (a == nullptr) throw Error(Code::memory, "libarchive: out of memory");
    check(a, archive_write_set_format_pax_restricted(a), file);
    check(a, archive_write_open_filename(a, partial.c_str()), file);
    add_text(a, "oci-layout", R"({"imageLayoutVersion":"1.0.0"})", file);
    const Json entry{{"mediaType", kManifestType},
                     {"digest", bundle.digest},
                     {"size", bytes.size()},
                     {"platform", {{"architecture", options_.platform.architecture}, {"os", options_.platform.os}}}};
    add_text(a, "index.json",
             dump(Json{{"schemaVersion", 2}, {"mediaType", kIndexType}, {"manifests", Json::array({entry})}}), file);
    add_text(a, cat("blobs/sha256/", hex_of(bundle.digest)), bytes, file);
    std::vector<Descriptor> blobs{manifest.config};
    for (const Descriptor& layer : manifest.layers) {
      const auto same = [&](const Descriptor& d) { return d.digest == layer.digest; };
      if (std::none_of(blobs.begin(), blobs.end(), same)) blobs.push_back(layer);
    }
    for (const Descriptor& blob : blobs) {
      options_.check();
      add_blob(a, blob_path(blob.digest), blob.digest, blob.size, file);
    }
    check(a, archive_write_close(a), file);
    const UniqueFd fd(::open(partial.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd || ::fsync(fd.get()) != 0 || ::rename(partial.c_str(), file.c_str()) != 0) {
      throw_errno(Code::unavailable, cat("image: cannot write ", file));
    }
  } catch (...) {
    (void)::unlink(partial.c_str());
    throw;
  }
}

std::string Store::import_tar(const std::string& file) {
  const std::unique_ptr<archive, FreeReader> owner(archive_read_new());
  archive* const a = owner.get();
  if (a == nullptr) throw Error(Code::memory, "libarchive: out of memory");
  if (archive_read_support_format_tar(a) != ARCHIVE_OK ||
      archive_read_open_filename(a, file.c_str(), size_t{1} << 20) != ARCHIVE_OK) {
    throw Error(Code::not_found, cat("image: cannot read ", file, ": ", reason(a)), "name a tar with an OCI layout");
  }
  std::string index;
  archive_entry* entry = nullptr;
  int code = ARCHIVE_OK;
  while ((code = archive_read_next_header(a, &entry)) == ARCHIVE_OK) {
    const char* const raw = archive_entry_pathname(entry);
    std::string name = raw == nullptr ? "" : raw;
    if (name.starts_with("./")) name.erase(0, 2);
    constexpr std::string_view kBlobs = "blobs/sha256/";
    if (archive_entry_filetype(entry) != AE_IFREG) continue;
    if (name == "index.json") {
      index = take_text(a);
    } else if (name.starts_with(kBlobs)) {
      const std::string digest = "sha256:" + name.substr(kBlobs.size());
      if (!is_digest(digest))
        throw Error(Code::corrupt, cat("E653 image: ", file, ": a blob without a digest for a name"));
      take_blob(a, blob_path(digest), digest, options_);
    }
  }
  if (code != ARCHIVE_EOF) throw Error(Code::corrupt, cat("E653 image: ", file, " is no whole tar: ", reason(a)));
  if (index.empty()) throw Error(Code::corrupt, cat("E651 image: ", file, " has no index.json"), "it is no OCI layout");
  const Document d = parse_document(index, file + ": index.json");
  if (d.index.empty()) throw Error(Code::corrupt, cat("E651 image: ", file, ": index.json is no index"));
  if (d.index.size() == 1) return d.index.front().descriptor.digest;
  return choose(d.index, options_.platform, file).descriptor.digest;
}

}  // namespace glm53::image
