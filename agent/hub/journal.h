// What is known about downloads, in SQLite: plans, verified blobs, and how far each partial file is on the disk.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/hub/cache.h"
#include "agent/hub/client.h"
#include "agent/state/database.h"

namespace glm53::hub {

/// How much of each segment of a partial file is on the disk, from its start.
struct Segments {
  int64_t size = 0;           ///< bytes a segment; the last one may be shorter
  std::vector<int64_t> done;  ///< one a segment
};

/// Several processes may use one journal at the same time.
class Journal {
 public:
  /// Opens `dir`/state.db.
  explicit Journal(const std::string& dir);

  /// Where a journal is when no agent keeps one: XDG_STATE_HOME/glm53/hub or ~/.local/state/glm53/hub.
  static std::string default_dir();

  /// Plan of a commit; `folder` is the repository's folder within a cache.
  void save_plan(const std::string& folder, const Source& source, const std::string& commit,
                 const std::vector<FileEntry>& files);
  std::vector<FileEntry> plan(const std::string& folder, const std::string& commit);

  /// A blob whose content was verified; its identity says whether it is still that file.
  void verified(const std::string& folder, const std::string& etag, const FileId& id);
  bool is_verified(const std::string& folder, const std::string& etag, const FileId& id);

  /// Progress of a partial file. Only what was made durable before may be saved.
  void save_segments(const std::string& folder, const FileEntry& file, const std::string& partial,
                     const Segments& segments);
  /// nullopt when nothing is known about a partial file of that name and size.
  std::optional<Segments> segments(const std::string& folder, const FileEntry& file, const std::string& partial);
  void forget(const std::string& folder, const std::string& etag);

  void save_download(const std::string& folder, const std::string& commit, const std::string& source, int64_t total,
                     int64_t done, const std::string& state, const std::string& error);

 private:
  int64_t repo(const std::string& folder);
  std::unique_ptr<state::Database> db_;
};

}  // namespace glm53::hub
