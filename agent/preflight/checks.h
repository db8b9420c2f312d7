// The table of checks; each function answers for one.
#pragma once

#include <span>

#include "agent/preflight/preflight.h"

namespace glm53::preflight {

struct Check {
  std::string_view name, code;
  enum class Needs { nothing, gpu, fabric, gb10 } needs;
  void (*run)(const Context& context, Result& result);  ///< null: a probe this version lacks (needs says why)
};
/// Cheap and read-only first, as in an operator's head: the node, then the device, then the model.
std::span<const Check> all_checks();

// Sets verdict, text and remedy of a result.
void warn(Result& result, std::string measured, std::string remedy);
void fail(Result& result, std::string measured, std::string remedy);
void skip(Result& result, const std::string& why);

// checks_node.cpp
void check_config(const Context& c, Result& r);
void check_role(const Context& c, Result& r);
void check_disk(const Context& c, Result& r);
void check_writable(const Context& c, Result& r);
void check_filesystem(const Context& c, Result& r);
void check_ports(const Context& c, Result& r);
void check_descriptors(const Context& c, Result& r);
void check_residue(const Context& c, Result& r);

// checks_device.cpp
void check_gpu(const Context& c, Result& r);
void check_driver(const Context& c, Result& r);
void check_persistence(const Context& c, Result& r);
void check_xid(const Context& c, Result& r);
void check_foreign_gpu_use(const Context& c, Result& r);
void check_link(const Context& c, Result& r);
void check_rdma(const Context& c, Result& r);
void check_memlock(const Context& c, Result& r);
void check_gid(const Context& c, Result& r);

// checks_model.cpp
void check_engine(const Context& c, Result& r);
void check_weights(const Context& c, Result& r);
void check_draft(const Context& c, Result& r);
void check_memory(const Context& c, Result& r);

}  // namespace glm53::preflight
