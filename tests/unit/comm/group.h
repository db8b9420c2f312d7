// A group of ranks in threads, for tests.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "common/socket.h"
#include "engine/comm/communicator.h"
#include "engine/comm/control_link.h"

namespace glm53::test {

inline constexpr std::chrono::milliseconds kWait{20000};
inline const char* const kLoopback = "127.0.0.1";

inline uint16_t free_port() {
  const UniqueFd listener = listen_tcp(kLoopback, 0);
  return local_port(listener.get());
}

inline Hello hello_of(int rank, int size) {
  Hello h;
  h.generation = 7;
  h.rank = rank;
  h.size = size;
  h.config_hash = "c0ffee";
  h.model_digest = "d16e57";
  h.build = "test";
  return h;
}

struct Member {
  std::vector<std::unique_ptr<ControlLink>> links;
  std::unique_ptr<Communicator> comm;
};

inline Member join_group(int rank, int size, uint16_t port, std::chrono::milliseconds timeout = kWait) {
  Member m;
  if (rank == 0)
    m.links = accept_ranks(kLoopback, port, hello_of(0, size), kWait);
  else
    m.links.push_back(join_rank0(kLoopback, port, hello_of(rank, size), kWait));
  std::vector<ControlLink*> views;
  for (const auto& link : m.links) views.push_back(link.get());
  m.comm = make_gloo_communicator({rank, size}, kLoopback, views, timeout);
  return m;
}

/// Runs `body` as every rank, each in a thread; the first exception comes out. No rank leaves before all are done.
inline void run_group(int size, const std::function<void(Member&, int rank)>& body,
                      std::chrono::milliseconds timeout = kWait) {
  const uint16_t port = free_port();
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<Member> members(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        members[static_cast<size_t>(rank)] = join_group(rank, size, port, timeout);
        body(members[static_cast<size_t>(rank)], rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
        if (const auto& comm = members[static_cast<size_t>(rank)].comm) comm->abort();
      }
    });
  for (std::thread& t : threads) t.join();
  for (const auto& e : errors)
    if (e) std::rethrow_exception(e);
}

}  // namespace glm53::test
