#include <fcntl.h>
#include <filesystem>
#include <unistd.h>

#include <doctest/doctest.h>

#include "fixture.h"

using namespace glm53;
using namespace glm53::hub;
using namespace glm53::test;
namespace fs = std::filesystem;

namespace {

constexpr const char* kBig = "model-00001-of-00002.safetensors";

std::vector<std::string> tree_of(const std::string& dir) {
  std::vector<std::string> out;
  for (const auto& e : fs::recursive_directory_iterator(dir)) {
    std::string line = e.path().lexically_relative(dir).string();
    if (e.is_symlink()) line += " -> " + fs::read_symlink(e.path()).string();
    if (e.is_symlink() || !e.is_directory()) out.push_back(line);
  }
  std::sort(out.begin(), out.end());
  return out;
}

/// A disk that fills up.
class FullDisk : public FileOps {
 public:
  std::atomic<int64_t> left{0};
  int error = ENOSPC;
  ssize_t pwrite(int fd, const void* data, size_t n, int64_t offset) override {
    if (left < static_cast<int64_t>(n)) {
      errno = error;
      return -1;
    }
    left -= static_cast<int64_t>(n);
    return FileOps::pwrite(fd, data, n, offset);
  }
};

}  // namespace

TEST_CASE("download: the cache has the documented layout, name for name") {
  Fixture f;
  f.hub.faults.bytes_per_s = 2000000;
  const DownloadResult r = f.run();
  CHECK(r.complete);
  CHECK(r.commit == FakeHub::commit());
  CHECK(r.snapshot == f.snapshot());
  CHECK(r.bytes_downloaded == f.payload());
  std::vector<std::string> expected{"refs/main"};
  for (const auto& [path, file] : f.hub.files(Fixture::kRepo)) {
    expected.push_back("blobs/" + file.etag);
    std::string up = "../../";
    for (const char c : path) {
      if (c == '/') up += "../";
    }
    expected.push_back(cat("snapshots/", FakeHub::commit(), "/", path, " -> ", up, "blobs/", file.etag));
  }
  std::sort(expected.begin(), expected.end());
  CHECK(join(tree_of(f.repo_dir()), "\n") == join(expected, "\n"));
  CHECK(read_file(f.repo_dir() + "/refs/main") == FakeHub::commit());
  CHECK(f.whole());
  CHECK((fs::status(cat(f.repo_dir(), "/blobs/", f.file(kBig).etag)).permissions() & fs::perms::others_read) !=
        fs::perms::none);
  CHECK(f.hub.max_parallel > 1);
  CHECK(f.last.bytes_done == f.payload());
  CHECK(f.last.files_done == 7);
}

TEST_CASE("download: again needs no byte; a pinned one that is complete no network") {
  Fixture f;
  f.run();
  const int64_t sent = f.hub.body_bytes;
  const DownloadResult again = f.run();
  CHECK(f.hub.body_bytes == sent);
  CHECK(again.bytes_downloaded == 0);
  CHECK(again.complete);
  f.request.revision = FakeHub::commit();
  const int asked = f.hub.api_requests;
  f.settings.endpoint = "http://127.0.0.1:1";
  const DownloadResult pinned = f.run();
  CHECK(pinned.source == "cache");
  CHECK(pinned.complete);
  CHECK(f.hub.api_requests == asked);
  f.settings.offline = true;
  CHECK(f.run().complete);
  f.request.revision = "main";
  CHECK(f.run().commit == FakeHub::commit());
}

TEST_CASE("download: a cache laid out by another client is adopted without a download") {
  Fixture f;
  for (const auto& [path, file] : f.hub.files(Fixture::kRepo)) {
    const std::string link = cat(f.snapshot(), "/", path);
    make_dirs(fs::path(link).parent_path().string());
    make_dirs(f.repo_dir() + "/blobs");
    write_file(cat(f.repo_dir(), "/blobs/", file.etag), file.content);
    std::string target = "../../blobs/" + file.etag;
    for (const char c : path) target = c == '/' ? "../" + target : target;
    fs::create_symlink(target, link);
  }
  const auto before = tree_of(f.repo_dir());
  const DownloadResult r = f.run();
  CHECK(f.hub.body_bytes == 0);
  CHECK(r.bytes_reused == f.payload());
  auto after = tree_of(f.repo_dir());
  std::erase(after, "refs/main");
  CHECK(after == before);
}

TEST_CASE("download: a blob of another repository's folder is used; a damaged one is not") {
  Fixture f;
  f.run();
  f.hub.add("org/copy", kBig, f.file(kBig).content, true);
  f.request.repo = "org/copy";
  int64_t sent = f.hub.body_bytes;
  f.run();
  CHECK(f.hub.body_bytes == sent);
  const std::string etag = f.file(kBig).etag;
  CHECK(read_file(f.dir / ("hub/models--org--copy/blobs/" + etag)) == f.file(kBig).content);

  std::string bad = f.file(kBig).content;
  bad[1000] ^= 1;
  fs::remove(f.dir / ("hub/models--org--copy/blobs/" + etag));
  write_file(cat(f.repo_dir(), "/blobs/", etag), bad);
  f.run();
  CHECK(f.hub.body_bytes > sent);
  CHECK(read_file(f.dir / ("hub/models--org--copy/blobs/" + etag)) == f.file(kBig).content);
  // The first repository notices that its own file changed.
  f.request.repo = Fixture::kRepo;
  f.run();
  CHECK(f.whole());
}

TEST_CASE("download: misbehaviour of the server ends in the right bytes") {
  Fixture f;
  const auto spoil = [&](const char* name, std::atomic<int>& fault, int times, const char* event) {
    CAPTURE(name);
    fs::remove_all(f.dir / "hub");
    f.events.clear();
    fault = times;
    const DownloadResult r = f.run();
    CHECK(r.complete);
    CHECK(f.whole());
    CHECK(fault <= 0);
    fault = 0;
    for (const std::string& e : f.events) CAPTURE(e);
    if (event[0] != '\0') CHECK(f.event(event));
    for (const std::string& e : f.events) CHECK(e.find("SECRET") == std::string::npos);
    for (const auto& path : tree_of(f.repo_dir())) CHECK(path.find("incomplete") == std::string::npos);
  };
  auto& x = f.hub.faults;
  SUBCASE("cut") {
    spoil("cut", x.cut, 7, "");
  }
  SUBCASE("truncated") {
    spoil("truncate", x.truncate, 5, "");
  }
  SUBCASE("ignores ranges") {
    spoil("ignore_range", x.ignore_range, -1, "");
  }
  SUBCASE("ignores some ranges") {
    spoil("ignore_range", x.ignore_range, 2, "");
  }
  SUBCASE("wrong range") {
    spoil("wrong_range", x.wrong_range, 1, "E616");
  }
  SUBCASE("limited") {
    spoil("limited", x.limited, 1, "E627");
  }
  SUBCASE("503") {
    spoil("broken", x.broken, 6, "E628");
  }
  SUBCASE("signed URL expired") {
    spoil("expired", x.expired, 1, "E629");
  }
  SUBCASE("web page") {
    spoil("html", x.html, 1, "E616");
  }
  SUBCASE("flipped byte") {
    spoil("flip", x.flip, 1, "E610");
  }
}

TEST_CASE("download: ignored ranges and cuts together do not go on for ever") {
  Fixture f;
  f.settings.retry.give_up_after = Millis(200);
  f.hub.faults.ignore_range = -1;
  f.hub.faults.cut = -1;
  f.hub.faults.cut_after = 70000;
  CHECK(error_of([&] { f.run(); }).code() == Code::unavailable);
}

TEST_CASE("download: lasting damage ends with both digests, exit 7, and nothing in the cache") {
  Fixture f;
  f.hub.faults.flip = -1;
  f.request.include = {kBig};
  // The index is fetched first; it must not be what fails here.
  f.hub.remove(Fixture::kRepo, "model.safetensors.index.json");
  f.hub.remove(Fixture::kRepo, "config.json");
  const Error e = error_of([&] { f.run(); });
  CHECK(e.code() == Code::corrupt);
  CHECK(ctl_exit(e.code()) == 7);
  CHECK(has(e, "E610"));
  CHECK(has(e, f.file(kBig).etag));
  for (const auto& path : tree_of(f.repo_dir())) CHECK(path.find(f.file(kBig).etag) == std::string::npos);
  SUBCASE("kept on request") {
    f.settings.keep_bad = true;
    CHECK(error_of([&] { f.run(); }).code() == Code::corrupt);
    bool kept = false;
    for (const auto& path : tree_of(f.repo_dir())) kept = kept || path.find(".bad-") != std::string::npos;
    CHECK(kept);
  }
}

TEST_CASE("download: a lasting refusal of signed URLs, wrong etags and redirect loops end with the reason") {
  Fixture f;
  f.settings.retry.give_up_after = Millis(100);
  SUBCASE("403") {
    f.hub.faults.expired = -1;
    const Error e = error_of([&] { f.run(); });
    CHECK(has(e, "E629"));
    CHECK(has(e, f.hub.cdn()));
    CHECK_FALSE(has(e, "SECRET"));
  }
  SUBCASE("etag") {
    f.hub.faults.wrong_etag = -1;
    CHECK(error_of([&] { f.run(); }).code() == Code::corrupt);
  }
  SUBCASE("loop") {
    f.hub.faults.loop = -1;
    CHECK(has(error_of([&] { f.run(); }), "E618"));
  }
  SUBCASE("web page for ever") {
    f.hub.faults.html = -1;
    CHECK(error_of([&] { f.run(); }).code() != Code::ok);
  }
  CHECK_FALSE(fs::exists(f.repo_dir() + "/refs/main"));
}

TEST_CASE("download: hostile names end the download before anything is written") {
  const std::vector<std::string> names{
      "../../../evil",         "/evil",         "a\\..\\evil", std::string("e\0vil", 5),
      "docs/../../../../evil", "config.json/x", "config.json"};
  for (const std::string& name : names) {
    CAPTURE(name);
    Fixture f;
    f.hub.add(Fixture::kRepo, "zzz", "evil", false);
    f.hub.list_as(Fixture::kRepo, "zzz", name);
    CHECK(error_of([&] { f.run(); }).code() == Code::corrupt);
    CHECK_FALSE(fs::exists(f.dir / "hub"));
  }
  Fixture f;
  f.request.repo = "../../evil";
  CHECK(error_of([&] { f.run(); }).code() == Code::usage);
  f.request.repo = Fixture::kRepo;
  f.request.revision = "../../x";
  CHECK(error_of([&] { f.run(); }).code() == Code::usage);
}

TEST_CASE("download: an interrupted one goes on at the byte") {
  Fixture f(2000000);
  f.settings.retry.give_up_after = Millis(0);
  f.settings.parallel_files = f.settings.parallel_ranges = 1;
  f.request.include = {kBig};
  f.hub.faults.cut = -1;
  f.hub.faults.cut_after = 50000;  // each connection; the second one brings no progress of its own kind
  int64_t got = 0;
  int runs = 0;
  while (runs < 200) {
    ++runs;
    try {
      const DownloadResult r = f.run();
      got += r.bytes_downloaded;
      break;
    } catch (const Error&) {
      got += f.last.bytes_downloaded;
    }
  }
  CHECK(read_file(cat(f.snapshot(), "/", kBig)) == f.file(kBig).content);
  // Nothing is fetched twice but the index.
  CHECK(f.hub.body_bytes <= static_cast<int64_t>(f.file(kBig).content.size()) + int64_t{runs} * 400);
}

TEST_CASE("download: a partial file that is not ours is not written through") {
  Fixture f;
  make_dirs(f.repo_dir() + "/blobs");
  write_file(f.dir / "victim", "untouched");
  fs::create_symlink(f.dir / "victim", cat(f.repo_dir(), "/blobs/", f.file(kBig).etag, ".glm53.incomplete"));
  write_file(cat(f.repo_dir(), "/blobs/", f.file("README.md").etag, ".incomplete"), "another client's");
  f.run();
  CHECK(f.whole());
  CHECK(read_file(f.dir / "victim") == "untouched");
  CHECK(read_file(cat(f.repo_dir(), "/blobs/", f.file("README.md").etag, ".incomplete")) == "another client's");
}

TEST_CASE("download: a full disk or quota ends it with one line, and it goes on later") {
  Fixture f;
  FullDisk disk;
  SUBCASE("disk") {}
  SUBCASE("quota") {
    disk.error = EDQUOT;
  }
  disk.left = 200000;
  Downloader first(f.settings, disk);
  const Error e = error_of([&] { first.run(f.request); });
  CHECK(has(e, "E640"));
  CHECK(e.code() == Code::unavailable);
  CHECK_FALSE(fs::exists(f.repo_dir() + "/refs/main"));
  const int64_t sent = f.hub.body_bytes;
  f.run();
  CHECK(f.whole());
  CHECK(f.hub.body_bytes - sent < f.payload());
}

TEST_CASE("download: a listed file that the server does not have is marked as absent") {
  Fixture f;
  f.hub.faults.missing = -1;
  f.settings.retry.give_up_after = Millis(50);
  const Error e = error_of([&] { f.run(); });
  CHECK(e.code() == Code::not_found);
  CHECK(has(e, "E625"));
  CHECK(has(e, kBig));
  CHECK(fs::exists(cat(f.repo_dir(), "/.no_exist/", FakeHub::commit(), "/", kBig)));
}

TEST_CASE("download: too little space is said before the first byte") {
  Fixture f;
  f.settings.disk_reserve = int64_t{1} << 60;
  const Error e = error_of([&] { f.run(); });
  CHECK(has(e, "E640"));
  CHECK(has(e, f.dir / "hub"));
  CHECK(f.hub.gets <= 1);  // the index
}

TEST_CASE("download: offline opens no connection and names what is missing") {
  Fixture f;
  f.settings.offline = true;
  CHECK(error_of([&] { f.run(); }).code() == Code::not_found);
  CHECK(f.hub.api_requests + f.hub.heads + f.hub.gets == 0);
  f.settings.offline = false;
  f.run();
  fs::remove(cat(f.snapshot(), "/", kBig));
  f.settings.offline = true;
  const int before = f.hub.api_requests;
  const Error e = error_of([&] { f.run(); });
  CHECK(e.code() == Code::not_found);
  CHECK(has(e, kBig));
  CHECK(f.hub.api_requests == before);
}

TEST_CASE("download: include, exclude, and what is always needed") {
  Fixture f;
  f.request.exclude = {"docs/**", "*.safetensors", "config.json"};
  f.run();
  CHECK(fs::exists(f.snapshot() + "/config.json"));
  CHECK(fs::exists(cat(f.snapshot(), "/", kBig)));  // named by the index
  CHECK_FALSE(fs::exists(f.snapshot() + "/docs"));
  Fixture g;
  g.request.include = {"README.md"};
  CHECK_FALSE(g.run().complete);
  CHECK(fs::exists(g.snapshot() + "/README.md"));
  CHECK_FALSE(fs::exists(cat(g.snapshot(), "/", kBig)));
  g.request.include = {"nothing-like-this"};
  g.hub.remove(Fixture::kRepo, "config.json");
  g.hub.remove(Fixture::kRepo, "model.safetensors.index.json");
  CHECK(error_of([&] { g.run(); }).code() == Code::usage);
}

TEST_CASE("download: a repository without all its shards is refused before the weights") {
  Fixture f;
  f.hub.remove(Fixture::kRepo, kBig);
  const Error e = error_of([&] { f.run(); });
  CHECK(e.code() == Code::weights);
  CHECK(has(e, "E617"));
  CHECK(has(e, kBig));
  CHECK(f.hub.gets == 1);
}

TEST_CASE("download: a dry run only plans") {
  Fixture f;
  f.request.dry_run = true;
  const DownloadResult r = f.run();
  CHECK(r.bytes == f.payload());
  CHECK(r.files == 7);
  CHECK_FALSE(fs::exists(f.dir / "hub"));
}

TEST_CASE("download: the token goes to the Hub only") {
  Fixture f;
  f.hub.set_token("hf_secrettoken");
  CHECK(has(error_of([&] { f.run(); }), "E620"));
  f.settings.token = "hf_secrettoken";
  f.run();
  CHECK(f.whole());
  CHECK_FALSE(f.hub.token_leaked);
  for (const auto& entry : fs::recursive_directory_iterator(f.dir.path())) {
    if (!entry.is_regular_file()) continue;
    const std::string content = read_file(entry.path().string());
    CHECK(content.find("hf_secrettoken") == std::string::npos);
    CHECK(content.find("SECRETSIGNATURE") == std::string::npos);
  }
}

TEST_CASE("download: mirrors take over, without the token") {
  Fixture f;
  FakeHub mirror;
  for (const auto& [path, file] : f.hub.files(Fixture::kRepo)) mirror.add(Fixture::kRepo, path, file.content, file.lfs);
  f.settings.mirrors = {mirror.endpoint()};
  f.settings.token = "hf_secrettoken";
  SUBCASE("the Hub refuses its signed URLs") {
    f.hub.faults.expired = -1;
  }
  SUBCASE("the Hub sends damaged bytes") {
    f.hub.faults.flip = -1;
  }
  SUBCASE("the Hub does not know it") {
    f.hub.set_token("another");
  }
  f.settings.retry.give_up_after = Millis(50);
  const DownloadResult r = f.run();
  CHECK(r.complete);
  for (const auto& [path, file] : mirror.files(Fixture::kRepo))
    CHECK(read_file(cat(f.snapshot(), "/", path)) == file.content);
}

TEST_CASE("download: a fallback repository fills the first one's folder, if it is pinned or known to agree") {
  Fixture f;
  for (const auto& [path, file] : f.hub.files(Fixture::kRepo)) f.hub.add("other/copy", path, file.content, file.lfs);
  f.request.repo = "org/gone";
  f.request.fallback_repo = "other/copy";
  const Error e = error_of([&] { f.run(); });
  CHECK(e.code() == Code::not_found);
  CHECK_FALSE(fs::exists(f.dir / "hub"));
  f.request.fallback_revision = FakeHub::commit();
  const DownloadResult r = f.run();
  CHECK(r.complete);
  CHECK(r.source.ends_with("other/copy"));
  CHECK(fs::exists(f.dir / ("hub/models--org--gone/snapshots/" + FakeHub::commit() + "/config.json")));
  CHECK_FALSE(fs::exists(f.dir / "hub/models--other--copy"));
}

TEST_CASE("download: a listing that differs from what was known of a commit is refused") {
  Fixture f;
  f.run();
  f.hub.add(Fixture::kRepo, "config.json", "{\"model_type\":\"other\"}", false);
  fs::remove(f.snapshot() + "/config.json");
  const Error e = error_of([&] { f.run(); });
  CHECK(e.code() == Code::corrupt);
  CHECK(has(e, "E611"));
}

TEST_CASE("download: refs move only when a branch was asked for") {
  Fixture f;
  f.request.revision = FakeHub::commit();
  f.run();
  CHECK_FALSE(fs::exists(f.repo_dir() + "/refs/main"));
  f.request.configured = true;
  f.request.verify = true;
  f.run();
  CHECK(read_file(f.repo_dir() + "/refs/main") == FakeHub::commit());
  const std::string newer(40, 'd');
  write_file(f.repo_dir() + "/refs/main", newer);
  f.run();
  CHECK(read_file(f.repo_dir() + "/refs/main") == newer);
}

TEST_CASE("download: a blob whose file changed is hashed again and replaced") {
  Fixture f;
  f.run();
  const std::string blob = cat(f.repo_dir(), "/blobs/", f.file(kBig).etag);
  std::string bad = f.file(kBig).content;
  bad[5000] ^= 1;
  write_file(blob, bad);
  f.run();
  CHECK(f.event("E610"));
  CHECK(read_file(blob) == f.file(kBig).content);
}

TEST_CASE("download: it can be cancelled while bytes come slowly, and a limit slows it down") {
  Fixture f;
  f.hub.faults.bytes_per_s = 20000;
  Downloader downloader(f.settings);
  int asked = 0;
  const Error e = error_of([&] {
    downloader.run(f.request, [&](const Progress& p) {
      if (p.bytes_downloaded > 0 && ++asked == 2) downloader.cancel();
    });
  });
  CHECK(e.code() == Code::cancelled);
  f.hub.faults.bytes_per_s = 0;
  f.settings.limit_rate = 1500000;
  f.run();
  CHECK(f.whole());
}

TEST_CASE("download: a stalled connection is replaced") {
  Fixture f;
  f.settings.transport.stall_window = Millis(150);
  f.settings.parallel_files = f.settings.parallel_ranges = 1;
  f.hub.faults.freeze = 2;
  f.run();
  CHECK(f.whole());
  CHECK(f.event("E634"));
  CHECK(f.event(f.hub.cdn()));
}

TEST_CASE("download: waits for another client's lock and takes what it brought") {
  Fixture f;
  const HubFile& file = f.file("README.md");
  const Cache cache(f.settings.cache);
  cache.prepare(Fixture::kRepo);
  auto lock = cache.lock(Fixture::kRepo, file.etag, [](int64_t) { return false; });
  REQUIRE(lock);
  std::atomic<bool> brought{false};
  Downloader downloader(f.settings);
  downloader.run(f.request, [&](const Progress& p) {
    if (p.phase == "transferring" && p.files_done == 6 && !brought.exchange(true)) {
      write_file(cache.blob_path(Fixture::kRepo, file.etag), file.content);
    }
  });
  CHECK(brought);
  CHECK(f.whole());
}
