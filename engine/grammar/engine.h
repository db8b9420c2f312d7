// Runs a grammar over tokens: which may come next, and where the grammar stands behind them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/grammar/grammar.h"
#include "engine/grammar/vocabulary.h"

namespace glm53::grammar {

/// Where a grammar stands is a set of stacks of automaton states. Sets and stacks are numbered when they first occur
/// and never change, so a position is one number: keeping it is a snapshot, and going back is forgetting a number.
/// Steps between positions and the tokens allowed at each are remembered. Thread-safe. Two engines of the same grammar
/// and vocabulary allow the same tokens.
class Engine {
 public:
  using Position = uint32_t;
  static constexpr Position kDead = 0;  ///< nothing may come; never complete

  Engine(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const Vocabulary> vocabulary);

  Position start() const { return start_; }
  /// Behind a token: kDead when it may not come.
  Position after(Position at, int32_t token);
  /// Behind bytes.
  Position after(Position at, std::string_view bytes);
  /// The text so far is a text of the grammar: end tokens may come.
  bool complete(Position at) const;
  /// Only an end token may come.
  bool finished(Position at) const;
  /// Sets the bits of the tokens that may come (id / 32, id % 32) and clears all others.
  void mask(Position at, std::span<uint32_t> bits);
  /// The bytes that must come, up to where there is a choice or the text may end; at most `limit`.
  std::string forced(Position at, size_t limit);
  /// Forced bytes as tokens. The last ones are left out where the byte behind them could join them in another token.
  std::vector<int32_t> forced_tokens(Position at, size_t limit);

  const Vocabulary& vocabulary() const { return *vocabulary_; }
  /// Has remembered so much that a position should move on to fresh().
  bool full() const;
  std::shared_ptr<Engine> fresh() const { return std::make_shared<Engine>(grammar_, vocabulary_); }
  /// The position `at` of another engine of the same grammar.
  Position import(const Engine& other, Position at);

  struct Counts {
    size_t stacks = 0, positions = 0, masks = 0, frames = 0;
    uint64_t walked = 0;  ///< trie nodes looked at
  };
  Counts counts() const;

 private:
  struct Stack {
    uint32_t state = 0, parent = 0, depth = 0;
  };
  struct Set {
    std::vector<uint32_t> stacks;  ///< sorted
    bool complete = false;         ///< one of the stacks is empty
    bool open = false;             ///< one left the frame that a partial position begins with
    std::vector<Position> next;    ///< by byte class; filled on demand
  };
  /// What a state reaches within its rule without reading.
  struct Reach {
    std::vector<uint32_t> reading;
    std::vector<Grammar::Call> calls;
    bool final = false;
  };
  /// Tokens allowed whatever the frames below, and trie nodes behind which these decide.
  struct Frame {
    std::vector<int32_t> few;
    std::vector<uint32_t> bits;  ///< instead, when they are many
    std::vector<uint32_t> leaving;
  };
  class Closure;

  const Reach& reach(uint32_t state);
  uint32_t push(uint32_t state, uint32_t parent);
  Position intern(Set set);
  Position step(Position at, uint32_t letter);
  const Frame& frame(Position open);
  template <class Take>
  void walk(uint32_t from, Position at, const Take& take, std::vector<uint32_t>* leaving);
  void set_bits(Position at, std::span<uint32_t> bits);
  Position bytes_after(Position at, std::string_view bytes);
  std::string forced_bytes(Position at, size_t limit);

  const std::shared_ptr<const Grammar> grammar_;
  const std::shared_ptr<const Vocabulary> vocabulary_;
  mutable std::mutex mutex_;
  std::vector<uint16_t> class_of_;   ///< by letter
  std::vector<uint16_t> letter_of_;  ///< one of each class
  std::unordered_map<int32_t, uint32_t> symbol_of_;
  std::vector<std::unique_ptr<Reach>> reach_;
  std::vector<Stack> stacks_;
  std::unordered_map<uint64_t, uint32_t> stack_ids_;
  std::vector<std::unique_ptr<Set>> sets_;
  std::unordered_multimap<uint64_t, Position> set_ids_;
  std::unordered_map<Position, std::unique_ptr<Frame>> frames_;
  std::unordered_map<Position, std::vector<uint32_t>> masks_;
  uint64_t walked_ = 0;
  Position start_ = kDead;
};

}  // namespace glm53::grammar
