#include "common/file.h"

#include <cerrno>
#include <fcntl.h>
#include <filesystem>
#include <unistd.h>
#include <utility>

#include <doctest/doctest.h>
#include <sys/stat.h>

#include "common/error.h"
#include "tests/temp_dir.h"

using namespace glm53;

namespace {

/// Fails the n-th call of one kind.
class FailingOps : public FileOps {
 public:
  enum class Kind { open, write, fsync, rename };
  FailingOps(Kind kind, int nth, int error) : kind_(kind), left_(nth), error_(error) {}
  int open(const char* path, int flags, int mode) override {
    return fails(Kind::open) ? -1 : FileOps::open(path, flags, mode);
  }
  ssize_t write(int fd, const void* data, size_t n) override {
    if (fails(Kind::write)) return -1;
    return FileOps::write(fd, data, std::min<size_t>(n, 1000));  // the system may write less than asked
  }
  int fsync(int fd) override { return fails(Kind::fsync) ? -1 : FileOps::fsync(fd); }
  int rename(const char* from, const char* to) override { return fails(Kind::rename) ? -1 : FileOps::rename(from, to); }

 private:
  bool fails(Kind kind) {
    if (kind != kind_ || --left_ != 0) return false;
    errno = error_;
    return true;
  }
  Kind kind_;
  int left_, error_;
};

size_t files_in(const std::string& folder) {
  size_t n = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++n;
  return n;
}

int mode_of(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 ? static_cast<int>(info.st_mode & 07777) : -1;
}

}  // namespace

TEST_CASE("file: write, read, replace") {
  const test::TempDir folder;
  const std::string path = folder / "a";
  write_file(path, "one", 0640);
  CHECK(read_file(path) == "one");
  CHECK(mode_of(path) == 0640);
  write_file(path, std::string(100000, 'x'), 0600);
  CHECK(read_file(path).size() == 100000);
  CHECK(mode_of(path) == 0600);
  CHECK(files_in(folder.path()) == 1);
  CHECK_THROWS_AS(read_file(path, 99999), Error);
  CHECK_THROWS_WITH_AS(read_file(folder / "none"), doctest::Contains("none'"), Error);
  CHECK_THROWS_AS(read_file(folder.path()), Error);
  CHECK_THROWS_AS(write_file(folder / "no/such/folder", "x"), Error);
}

TEST_CASE("file: a failed write leaves the old file and nothing beside it") {
  const test::TempDir folder;
  const std::string path = folder / "a";
  write_file(path, "old");
  using Kind = FailingOps::Kind;
  struct Fault {
    Kind kind;
    int nth, error;
  };
  for (const auto& fault : {Fault{Kind::open, 1, ENOSPC}, Fault{Kind::write, 1, ENOSPC}, Fault{Kind::write, 3, EIO},
                            Fault{Kind::fsync, 1, EIO}, Fault{Kind::rename, 1, EXDEV}}) {
    FailingOps ops(fault.kind, fault.nth, fault.error);
    CHECK_THROWS_AS(write_file(path, std::string(5000, 'n'), 0644, ops), Error);
    CHECK(read_file(path) == "old");
    CHECK(files_in(folder.path()) == 1);
  }
  FailingOps interrupted(Kind::write, 1, EINTR);
  write_file(path, "new", 0644, interrupted);
  CHECK(read_file(path) == "new");
  // The folder could not be synced: the caller hears of it, the file is whole.
  FailingOps folder_sync(Kind::fsync, 2, EIO);
  CHECK_THROWS_AS(write_file(path, "newer", 0644, folder_sync), Error);
  CHECK(read_file(path) == "newer");
}

TEST_CASE("file: folders") {
  const test::TempDir folder;
  make_dirs(folder / "a/b//c/");
  make_dirs(folder / "a/b/c");
  CHECK(std::filesystem::is_directory(folder / "a/b/c"));
  write_file(folder / "file", "");
  CHECK_THROWS_AS(make_dirs(folder / "file/x"), Error);
  CHECK_THROWS_AS(make_dirs(folder / "file"), Error);
}

TEST_CASE("file: secrets must be private and not empty") {
  const test::TempDir folder;
  write_file(folder / "good", " key\n", 0600);
  CHECK(read_secret(folder / "good") == "key");
  write_file(folder / "open", "key", 0644);
  CHECK_THROWS_WITH_AS(read_secret(folder / "open"), doctest::Contains("can be read by other users"), Error);
  write_file(folder / "empty", "\n", 0600);
  CHECK_THROWS_AS(read_secret(folder / "empty"), Error);
  CHECK_THROWS_AS(read_secret(folder / "none"), Error);
}

TEST_CASE("file: memory maps") {
  const test::TempDir folder;
  write_file(folder / "a", "bytes");
  MappedFile map(folder / "a");
  MappedFile moved = std::move(map);
  REQUIRE(moved.bytes().size() == 5);
  CHECK(static_cast<char>(moved.bytes()[4]) == 's');
  map = std::move(moved);
  CHECK(map.bytes().size() == 5);
  write_file(folder / "empty", "");
  CHECK(MappedFile(folder / "empty").bytes().empty());
  CHECK_THROWS_AS(MappedFile(folder / "none"), Error);
  CHECK_THROWS_AS(MappedFile(folder.path()), Error);
}

TEST_CASE("file: a lock has one holder") {
  const test::TempDir folder;
  auto first = try_lock(folder / "lock");
  REQUIRE(first);
  CHECK_FALSE(try_lock(folder / "lock"));
  first.reset();
  CHECK(try_lock(folder / "lock"));
  CHECK_THROWS_AS(try_lock(folder / "no/lock"), Error);
}

TEST_CASE("file: descriptors are owned once") {
  UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const int number = fd.get();
  UniqueFd other = std::move(fd);
  CHECK_FALSE(fd);
  CHECK(other.get() == number);
  other.reset();
  CHECK(::fcntl(number, F_GETFD) == -1);
  // A rank whose configuration cannot be read ends with 64, as with a wrong one.
  try {
    read_all(number);
    FAIL_CHECK("a closed descriptor was read");
  } catch (const Error& e) {
    CHECK(e.code() == Code::config);
    CHECK(rank_exit(e.code()) == 64);
  }
}
