// Blocks of files read ahead by several threads, with bounded memory, past the page cache where the file system allows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/file.h"

namespace glm53 {

struct ReadOptions {
  int threads = 8;                   ///< reads in flight
  size_t block = size_t{4} << 20;    ///< bytes of one read at most
  size_t memory = size_t{64} << 20;  ///< of all buffers together; at least one block is held
  bool direct = true;                ///< O_DIRECT; a file whose file system refuses it is read plainly
};

/// Bytes [begin, end) of a file, by its place in the list of files.
struct FileBlock {
  size_t file = 0;
  uint64_t begin = 0, end = 0;
};

/// Cuts [begin, end) into blocks of at most options.block bytes that end on multiples of it.
void append_blocks(std::vector<FileBlock>& blocks, size_t file, uint64_t begin, uint64_t end,
                   const ReadOptions& options);

/// Gives blocks out in the order of the list while later ones are being read.
class BlockReader {
 public:
  /// Called on a reading thread with the number of a block and its bytes; what it throws, next() throws.
  using Check = std::function<void(size_t number, std::span<const std::byte> bytes)>;

  /// Throws Error(unavailable) naming a file that cannot be opened. `ops` outlives the reader.
  BlockReader(const std::vector<std::string>& files, std::vector<FileBlock> blocks, const ReadOptions& options,
              Check check = {}, FileOps& ops = FileOps::real());
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;
  ~BlockReader();

  /// The next block's bytes, valid until the following call. Throws Error(weights) where the file ends before the block
  /// does, Error(unavailable) where it cannot be read, Error(internal) behind the last block.
  std::span<const std::byte> next();
  /// Bytes of buffers, and files that are not read with O_DIRECT.
  size_t memory() const;
  size_t plain_files() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace glm53
