#include "agent/image/unpack.h"

#include <algorithm>
#include <archive.h>
#include <archive_entry.h>
#include <array>
#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <memory>
#include <unistd.h>
#include <vector>

#include <sys/stat.h>

#include "common/digest.h"
#include "common/error.h"
#include "common/strings.h"

namespace glm53::image {
namespace {

namespace fs = std::filesystem;
constexpr size_t kBuffer = size_t{256} << 10;
constexpr int64_t kFreeBytes = int64_t{64} << 20;

struct FreeArchive {
  void operator()(archive* a) const { archive_read_free(a); }
};
using Reader = std::unique_ptr<archive, FreeArchive>;

[[noreturn]] void hostile(const std::string& what) {
  throw Error(Code::corrupt, cat("E653 image: refusing to unpack: ", what), "do not use this image");
}

[[noreturn]] void disk(const std::string& what) {
  if (errno == ENOSPC || errno == EDQUOT) {
    throw Error(Code::unavailable, cat("E640 image: the disk is full (", what, ")"), "make room and do it again");
  }
  throw_errno(Code::unavailable, cat("image: cannot write ", what));
}

std::string text_of(const char* text) {
  return text == nullptr ? std::string() : std::string(text);
}

/// The uncompressed tar of a blob: counted, hashed, and bounded while the tar reader pulls it.
class Tar {
 public:
  Tar(const std::string& path, Packing packing, int64_t& total, const UnpackLimits& limits)
      : blob_(archive_read_new()), total_(total), most_(limits.bytes), buffer_(kBuffer) {
    if (!blob_) throw Error(Code::memory, "libarchive: out of memory");
    check(archive_read_support_format_raw(blob_.get()));
    // Only what the media type says: a layer does not choose its own decoder.
    if (packing == Packing::gzip) check(archive_read_support_filter_gzip(blob_.get()));
    if (packing == Packing::zstd) check(archive_read_support_filter_zstd(blob_.get()));
    check(archive_read_open_filename(blob_.get(), path.c_str(), kBuffer));
    archive_entry* entry = nullptr;
    check(archive_read_next_header(blob_.get(), &entry));
    // Data that is not packed as said would otherwise go through as a tar.
    if (packing != Packing::tar && archive_filter_count(blob_.get()) < 2) hostile("a layer is not packed as it says");
    std::error_code none;
    const auto size = static_cast<int64_t>(fs::file_size(path, none));
    largest_ = kFreeBytes + (none ? 0 : size) * limits.ratio;
  }

  /// The next piece, empty at the end.
  std::string_view next() {
    if (failed_) std::rethrow_exception(failed_);
    const la_ssize_t n = archive_read_data(blob_.get(), buffer_.data(), buffer_.size());
    if (n < 0) hostile(cat("a damaged layer: ", text_of(archive_error_string(blob_.get()))));
    read_ += n;
    total_ += n;
    if (total_ > most_) hostile(cat("more than ", human_bytes(most_), " come out of it"));
    if (read_ > largest_) hostile("a layer expands too much");
    const std::string_view piece(buffer_.data(), static_cast<size_t>(n));
    hash_.update(piece);
    return piece;
  }
  /// Reads what follows the end of the tar, too; the digest.
  std::string finish() {
    while (!next().empty()) {
    }
    return "sha256:" + hash_.hex();
  }
  /// What next() threw within libarchive.
  void rethrow() const {
    if (failed_) std::rethrow_exception(failed_);
  }
  static la_ssize_t read(archive* a, void* self, const void** data) {
    Tar& tar = *static_cast<Tar*>(self);
    try {
      const std::string_view piece = tar.next();
      *data = piece.data();
      return static_cast<la_ssize_t>(piece.size());
    } catch (...) {
      tar.failed_ = std::current_exception();
      archive_set_error(a, EIO, "the layer cannot be read");
      return -1;
    }
  }

 private:
  void check(int code) {
    if (code == ARCHIVE_OK) return;
    hostile(cat("a damaged layer: ", text_of(archive_error_string(blob_.get()))));
  }
  Reader blob_;
  int64_t& total_;
  const int64_t most_;
  int64_t largest_ = 0, read_ = 0;
  std::vector<char> buffer_;
  Sha256 hash_;
  std::exception_ptr failed_;
};

std::pair<std::string, std::string> split_path(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::pair{std::string(), path}
                                    : std::pair{path.substr(0, slash), path.substr(slash + 1)};
}

}  // namespace

struct Unpacker::Entry {
  std::string path;
  archive* reader;
  archive_entry* info;
  const std::function<void()>& fail;  ///< throws what the reader has to say
};

std::string unsafe_entry(std::string& name) {
  if (name == "./") name = ".";  // the root itself, as tar writes it
  while (name.starts_with("./")) name.erase(0, 2);
  while (name.size() > 1 && name.ends_with('/')) name.pop_back();
  if (name.empty()) return "an empty name";
  if (name == ".") return {};
  if (name.size() > 1024) return "a name of more than 1024 bytes";
  if (name.front() == '/') return "an absolute name";
  if (!valid_utf8(name)) return "a name that is no UTF-8";
  if (std::any_of(name.begin(), name.end(), [](char c) { return static_cast<unsigned char>(c) < 32 || c == 127; })) {
    return "a name with control characters";
  }
  if (name.find('\\') != std::string::npos) return "a name with a backslash";
  for (const std::string& part : split(name, '/')) {
    if (part.empty() || part == "." || part == "..") return "a name with '..', '.' or nothing between slashes";
    if (part.size() > 255) return "a part of a name of more than 255 bytes";
  }
  return {};
}

bool link_stays_inside(const std::string& path, const std::string& target) {
  if (target.empty() || target.size() > 1024 || target.front() == '/' || target.find('\0') != std::string::npos) {
    return false;
  }
  auto left = std::count(path.begin(), path.end(), '/');
  bool down = false;
  for (const std::string& part : split(target, '/')) {
    if (part.empty() || part == ".") continue;
    if (part != "..") {
      down = true;
      continue;
    }
    // After a step down the folder may be a link's, and its parent anywhere.
    if (down || left == 0) return false;
    --left;
  }
  return true;
}

Unpacker::Unpacker(std::string root, UnpackLimits limits, std::function<void()> check)
    : root_(std::move(root)), limits_(limits), check_(std::move(check)) {
  fd_ = UniqueFd(::open(root_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd_) throw_errno(Code::unavailable, cat("image: cannot open ", root_));
}

UniqueFd Unpacker::parent_of(const std::string& path, bool create) const {
  UniqueFd at(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!at) disk(root_);
  const auto parts = split(path, '/');
  for (size_t i = 0; i + 1 < parts.size(); ++i) {
    if (create && ::mkdirat(at.get(), parts[i].c_str(), 0755) != 0 && errno != EEXIST) disk(path);
    UniqueFd next(::openat(at.get(), parts[i].c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!next) {
      if (!create && errno == ENOENT) return {};
      if (errno == ELOOP || errno == ENOTDIR) hostile(cat("'", path, "' goes through a link or a file"));
      disk(path);
    }
    at = std::move(next);
  }
  return at;
}

void Unpacker::make_room(int parent, const std::string& name, const std::string& path, bool folder) {
  struct stat info {};
  if (::fstatat(parent, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return;
    disk(path);
  }
  if (S_ISDIR(info.st_mode)) {
    if (folder) return;
    hostile(cat("'", path, "' would replace a folder"));
  }
  if (fresh_.contains(path)) hostile(cat("'", path, "' is there twice"));
  if (::unlinkat(parent, name.c_str(), 0) != 0) disk(path);
}

void Unpacker::whiteout(const std::string& path) {
  const auto [folder, marker] = split_path(path);
  const std::string name = marker.substr(4);
  const UniqueFd parent = parent_of(path, false);
  if (!parent) return;
  std::vector<std::string> gone;
  if (name == ".wh..opq") {
    for (const auto& item : fs::directory_iterator(root_ + "/" + folder))
      gone.push_back(item.path().filename().string());
  } else {
    if (name.empty() || name == "." || name == "..") hostile(cat("the whiteout '", path, "'"));
    gone.push_back(name);
  }
  for (const std::string& item : gone) {
    const std::string whole = folder.empty() ? item : folder + "/" + item;
    const auto own = fresh_.lower_bound(whole);
    if (own != fresh_.end() && (*own == whole || own->starts_with(whole + "/"))) continue;
    std::error_code failed;
    fs::remove_all(root_ + "/" + whole, failed);  // its parents are folders, as parent_of() saw
    if (failed) throw Error(Code::unavailable, cat("image: cannot remove ", whole, ": ", failed.message()));
  }
}

void Unpacker::extract(const Entry& e) {
  const auto [folder, name] = split_path(e.path);
  const auto type = archive_entry_filetype(e.info);
  const auto mode = archive_entry_mode(e.info);
  if ((mode & (S_ISUID | S_ISGID)) != 0 && type != AE_IFDIR) hostile(cat("'", e.path, "' is setuid or setgid"));
  const UniqueFd parent = parent_of(e.path, true);
  if (const char* const to = archive_entry_hardlink(e.info); to != nullptr) {
    std::string target(to);
    if (const std::string why = unsafe_entry(target); !why.empty() || target == ".") {
      hostile(cat("'", e.path, "' links to ", why.empty() ? "its root" : why));
    }
    const UniqueFd from = parent_of(target, false);
    struct stat info {};
    const std::string last = split_path(target).second;
    if (!from || ::fstatat(from.get(), last.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)) {
      hostile(cat("'", e.path, "' links to '", target, "', which is no file before it"));
    }
    if (target == e.path) hostile(cat("'", e.path, "' links to itself"));
    make_room(parent.get(), name, e.path, false);
    if (::linkat(from.get(), last.c_str(), parent.get(), name.c_str(), 0) != 0) disk(e.path);
  } else if (type == AE_IFDIR) {
    make_room(parent.get(), name, e.path, true);
    if (::mkdirat(parent.get(), name.c_str(), 0755) != 0 && errno != EEXIST) disk(e.path);
  } else if (type == AE_IFLNK) {
    const std::string target = text_of(archive_entry_symlink(e.info));
    if (!link_stays_inside(e.path, target)) hostile(cat("the link '", e.path, "' leaves its folder"));
    make_room(parent.get(), name, e.path, false);
    if (::symlinkat(target.c_str(), parent.get(), name.c_str()) != 0) disk(e.path);
  } else if (type == AE_IFREG) {
    make_room(parent.get(), name, e.path, false);
    const int bits = (mode & 0111) != 0 ? 0755 : 0644;
    const UniqueFd file(
        ::openat(parent.get(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, bits));
    if (!file) disk(e.path);
    const void* data = nullptr;
    size_t size = 0;
    la_int64_t offset = 0;
    int code = ARCHIVE_OK;
    while ((code = archive_read_data_block(e.reader, &data, &size, &offset)) == ARCHIVE_OK) {
      check_();
      size_t done = 0;
      while (done < size) {
        const ssize_t n = ::pwrite(file.get(), static_cast<const char*>(data) + done, size - done,
                                   static_cast<off_t>(offset) + static_cast<off_t>(done));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) disk(e.path);
        done += static_cast<size_t>(n);
      }
    }
    if (code != ARCHIVE_EOF) e.fail();
    const la_int64_t whole = archive_entry_size(e.info);
    if (offset > whole || whole > limits_.bytes) hostile(cat("'", e.path, "' is larger than allowed"));
    if (::ftruncate(file.get(), static_cast<off_t>(whole)) != 0 || ::fchmod(file.get(), bits) != 0 ||
        ::fsync(file.get()) != 0) {
      disk(e.path);
    }
  } else {
    hostile(cat("'", e.path, "' is neither file, folder nor link"));
  }
  fresh_.insert(e.path);
}

std::string Unpacker::layer(const std::string& path, Packing packing) {
  fresh_.clear();
  Tar tar(path, packing, bytes_, limits_);
  const Reader reader(archive_read_new());
  if (!reader) throw Error(Code::memory, "libarchive: out of memory");
  const std::function<void()> fail = [&] {
    tar.rethrow();
    hostile(cat("a damaged tar: ", text_of(archive_error_string(reader.get()))));
  };
  if (archive_read_support_format_tar(reader.get()) != ARCHIVE_OK ||
      archive_read_support_format_empty(reader.get()) != ARCHIVE_OK ||
      archive_read_open(reader.get(), &tar, nullptr, &Tar::read, nullptr) != ARCHIVE_OK) {
    fail();
  }
  archive_entry* entry = nullptr;
  int code = ARCHIVE_OK;
  while ((code = archive_read_next_header(reader.get(), &entry)) == ARCHIVE_OK) {
    check_();
    if (++entries_ > limits_.entries) hostile(cat("more than ", limits_.entries, " entries"));
    Entry e{text_of(archive_entry_pathname(entry)), reader.get(), entry, fail};
    if (const std::string why = unsafe_entry(e.path); !why.empty()) hostile(why);
    if (e.path == ".") continue;
    if (archive_entry_sparse_count(entry) > 0) hostile(cat("'", e.path, "' is a sparse file"));
    if (split_path(e.path).second.starts_with(".wh.")) {
      whiteout(e.path);
      continue;
    }
    extract(e);
  }
  if (code != ARCHIVE_EOF) fail();
  return tar.finish();
}

void Unpacker::sync() const {
  std::vector<std::string> folders{root_};
  for (const auto& item : fs::recursive_directory_iterator(root_)) {
    if (item.is_directory() && !item.is_symlink()) folders.push_back(item.path().string());
  }
  for (auto folder = folders.rbegin(); folder != folders.rend(); ++folder) {
    const UniqueFd fd(::open(folder->c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd || ::fsync(fd.get()) != 0) disk(*folder);
  }
}

}  // namespace glm53::image
