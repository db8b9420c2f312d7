// Two ranks in one process: a Communicator between threads that sums in rank order, and a way to run both.
#pragma once

#include <barrier>
#include <cstring>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "common/error.h"
#include "engine/comm/communicator.h"

namespace glm53::golden {

/// Host tensors only. Every call meets the other rank twice: when all inputs are visible, and when all are done
/// reading.
class ThreadGroup {
 public:
  explicit ThreadGroup(int size) : size_(size), parts_(static_cast<size_t>(size)), barrier_(size) {}

  class Member final : public Communicator {
   public:
    Member(ThreadGroup& group, int rank) : group_(group), rank_(rank) {}
    Shard shard() const override { return {rank_, group_.size_}; }
    void all_reduce(Tensor io) override {
      std::vector<float> sum(static_cast<size_t>(io.elements()), 0.0f);
      meet(io, [&] {
        for (const Tensor& part : group_.parts_)
          for (size_t i = 0; i < sum.size(); ++i) sum[i] += part.as<const float>()[i];
      });
      std::memcpy(io.data, sum.data(), sum.size() * sizeof(float));
      ++reduced;
    }
    void gather(Tensor in, Tensor out) override {
      meet(in, [&] {
        if (rank_ == 0) join(out);
      });
    }
    void all_gather(Tensor in, Tensor out) override {
      meet(in, [&] { join(out); });
    }
    void broadcast(Tensor io, int root) override {
      meet(io, [&] {
        if (rank_ != root) std::memcpy(io.data, group_.parts_[static_cast<size_t>(root)].data, io.bytes());
      });
    }
    void abort() noexcept override {}
    int reduced = 0;

   private:
    template <class Body>
    void meet(const Tensor& mine, const Body& body) {
      if (!mine.contiguous()) throw Error(Code::internal, "collective on a strided tensor");
      group_.parts_[static_cast<size_t>(rank_)] = mine;
      group_.barrier_.arrive_and_wait();
      body();
      group_.barrier_.arrive_and_wait();
    }
    void join(const Tensor& out) const {
      for (size_t r = 0; r < group_.parts_.size(); ++r) {
        const Tensor& part = group_.parts_[r];
        for (int64_t row = 0; row < part.dim(0); ++row)
          std::memcpy(out.as<float>() + row * out.stride[0] + static_cast<int64_t>(r) * part.dim(1),
                      part.as<float>() + row * part.dim(1), static_cast<size_t>(part.dim(1)) * sizeof(float));
      }
    }

    ThreadGroup& group_;
    int rank_;
  };

 private:
  int size_;
  std::vector<Tensor> parts_;
  std::barrier<> barrier_;
};

/// body(member) on a thread a rank. An exception ends the whole process's test: the other rank would wait for ever.
inline void run_ranks(int size, const std::function<void(ThreadGroup::Member&)>& body) {
  ThreadGroup group(size);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&group, &body, rank] {
      ThreadGroup::Member member(group, rank);
      body(member);
    });
}

}  // namespace glm53::golden
