// A source cache with one snapshot, an empty cache to fill, and a peer within this process that misbehaves on command.
#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "agent/hub/blob_hash.h"
#include "agent/hub/cache.h"
#include "agent/sync/sender.h"
#include "common/error.h"
#include "common/file.h"
#include "common/strings.h"
#include "tests/temp_dir.h"

namespace glm53::test {

inline constexpr const char* kRepo = "org/model";
inline const std::string kCommit(40, 'c');

inline std::string noise(size_t n, unsigned seed) {
  std::minstd_rand random(seed);
  std::string out(n, '\0');
  for (char& c : out) c = static_cast<char>(random() >> 8);
  return out;
}

using Files = std::vector<std::pair<std::string, std::string>>;  ///< path, content

/// Large files have sha256 names, small ones git's.
inline std::string etag_of(const std::string& content) {
  return hub::hash_of(content, content.size() > 1000 ? 64 : 40);
}

/// A snapshot laid out by the rules of the cache.
inline void lay_out(const std::string& hub, const Files& files) {
  const hub::Cache cache(hub);
  cache.prepare(kRepo);
  for (const auto& [path, content] : files) {
    write_file(cache.blob_path(kRepo, etag_of(content)), content);
    cache.link(kRepo, kCommit, path, etag_of(content));
  }
  cache.write_ref(kRepo, "main", kCommit);
}

inline Files some_files() {
  return {{"config.json", "{}"},
          {"model-1.safetensors", noise(5'300'000, 1)},
          {"model-2.safetensors", noise(2'000'001, 2)},
          {"sub/folder/copy.safetensors", noise(2'000'001, 2)},
          {"tokenizer.json", noise(70'000, 3)},
          {"empty.txt", ""}};
}

struct SyncWorld {
  TempDir dir;
  Files files = some_files();
  sync::ReceiverSettings to;
  sync::SenderSettings from;
  FileOps* ops = &FileOps::real();
  std::vector<std::string> events;
  std::unique_ptr<sync::Receiver> receiver;  ///< lives over connections, as in an agent
  std::mutex mutex;
  // What goes wrong: counters count down with each piece.
  std::atomic<int> lose{0};    ///< the piece arrives, its answer does not
  std::atomic<int> cut{0};     ///< the piece does not arrive
  std::atomic<int> damage{0};  ///< a byte flips on the way
  std::atomic<int> forget{0};  ///< the receiver's agent is started again
  std::atomic<int64_t> pieces{0}, bytes{0};
  std::atomic<int64_t>* sent = nullptr;  ///< where others count too: bytes before they are taken

  SyncWorld() {
    lay_out(source(), files);
    from.cache = source();
    from.journal_dir = dir / "from-journal";
    from.streams = 3;
    from.pause = std::chrono::milliseconds(1);
    from.give_up_after = std::chrono::milliseconds(200);
    to.cache = dir / "to/hub";
    to.journal_dir = dir / "to-journal";
    to.segment_bytes = 1'500'000;
    to.ranges_above = 3'000'000;
    to.disk_reserve = 0;
    to.journal_period = std::chrono::milliseconds(0);
  }
  std::string source() const { return dir / "from/hub"; }
  sync::Manifest manifest() const { return sync::manifest_of(hub::Cache(source()), kRepo, kCommit); }

  class LocalPeer final : public sync::Peer {
   public:
    explicit LocalPeer(SyncWorld& w) : w_(w) {}
    sync::Have open(const sync::Manifest& manifest) override {
      const std::lock_guard lock(w_.mutex);
      w_.receiver.reset();
      // Over the wire it is text.
      w_.receiver = std::make_unique<sync::Receiver>(w_.to, sync::parse_manifest(to_json(manifest)), *w_.ops);
      return w_.receiver->have();
    }
    void send(const std::string& etag, int64_t offset, std::string_view data, uint64_t checksum) override {
      ++w_.pieces;
      if (use(w_.cut)) throw Error(Code::peer_lost, "the connection was cut");
      if (use(w_.forget)) throw Error(Code::not_found, "there is no copy under way");
      std::string sent(data);
      if (!sent.empty() && use(w_.damage)) sent[sent.size() / 2] = static_cast<char>(sent[sent.size() / 2] ^ 1);
      if (w_.sent != nullptr) *w_.sent += static_cast<int64_t>(data.size());
      w_.receiver->take(etag, offset, sent, checksum);
      w_.bytes += static_cast<int64_t>(data.size());
      if (use(w_.lose)) throw Error(Code::stalled, "no answer");
    }
    void commit(const std::string& digest) override {
      if (digest != w_.receiver->digest()) throw Error(Code::busy, "another copy");
      w_.receiver->commit();
    }

   private:
    static bool use(std::atomic<int>& counter) {
      int n = counter;
      while (n > 0) {
        if (counter.compare_exchange_weak(n, n - 1)) return true;
      }
      return n < 0;
    }
    SyncWorld& w_;
  };

  sync::SendResult copy() {
    sync::Sender sender(from, [this] { return std::make_unique<LocalPeer>(*this); });
    return sender.run(
        manifest(), [](const sync::SendProgress&) {},
        [this](const std::string& e) {
          const std::lock_guard lock(mutex);
          events.push_back(e);
        });
  }
  std::string target(const std::string& path) const {
    return cat(to.cache, "/models--org--model/snapshots/", kCommit, "/", path);
  }
  /// Every file is there, byte for byte, as a link to its blob; nothing else is left in the cache.
  bool whole() const {
    const hub::Cache cache(to.cache);
    size_t blobs = 0;
    for (const auto& [path, content] : files) {
      try {
        if (read_file(target(path)) != content || cache.etag_in_snapshot(kRepo, kCommit, path) != etag_of(content))
          return false;
      } catch (const Error&) {
        return false;
      }
    }
    for (const auto& entry : std::filesystem::directory_iterator(cat(to.cache, "/models--org--model/blobs"))) {
      if (entry.path().filename().string().find("incomplete") != std::string::npos) return false;
      ++blobs;
    }
    return blobs == files.size() - 1 && cache.read_ref(kRepo, "main") == kCommit;  // two files are one blob
  }
};

/// The error of a call; Error(ok) when there is none.
template <class F>
Error error_of(F&& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return {Code::ok, ""};
}

}  // namespace glm53::test
