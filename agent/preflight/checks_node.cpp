// Checks of the node itself.
#include <algorithm>
#include <cmath>

#include "agent/preflight/checks.h"
#include "common/strings.h"

namespace glm53::preflight {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kLeastFree = kGiB / 4, kComfortable = 5 * kGiB;
constexpr int64_t kLeastInodes = 1000;
constexpr int64_t kDescriptors = 4096;

struct Place {
  const char* key;
  std::string path;
};
std::vector<Place> places(const Subject& s) {
  return {{"paths.state", s.state_dir}, {"paths.logs", s.logs_dir}, {"paths.run", s.run_dir}};
}

bool is_remote(const std::string& type) {
  return type.starts_with("nfs") || type == "cifs" || type == "smb3" || type == "fuse.sshfs" || type == "9p";
}

std::string holder(const Listener& l) {
  return l.pid ? cat("pid ", *l.pid, " (", l.name, ")") : std::string("a process of another user");
}

}  // namespace

void check_config(const Context& c, Result& r) {
  const Subject& s = c.subject;
  r.measured = cat(s.ranks, s.ranks == 1 ? " rank" : " ranks", " on ", s.nodes, s.nodes == 1 ? " node" : " nodes",
                   ", engine.backend = \"", s.backend, "\", hash ", s.hash.substr(0, 12));
}

void check_role(const Context& c, Result& r) {
  const auto wanted = parse_ipv4(c.subject.fabric_address);
  if (!wanted) {
    skip(r, cat("the fabric address '", c.subject.fabric_address, "' is no IPv4 address"));
    return;
  }
  std::string have;
  for (const InterfaceAddress& a : c.addresses) {
    // All of 127.0.0.0/8 is this machine.
    const bool loopback = (*wanted >> 24) == 127 && a.netdev == "lo";
    if (a.address == *wanted || loopback) {
      r.measured = cat(c.subject.fabric_address, " is on ", a.netdev);
      return;
    }
    have += cat(have.empty() ? "" : ", ", ipv4_text(a.address), " on ", a.netdev);
  }
  fail(r,
       cat(c.subject.fabric_address, " is not on any interface here (have ", have.empty() ? "none" : have.c_str(), ")"),
       cat("set ", std::string_view(c.subject.node), ".fabric_address, or give the interface its address"));
}

void check_disk(const Context& c, Result& r) {
  std::string low, none, all;
  for (const Place& place : places(c.subject)) {
    const auto space = c.host.space(place.path);
    if (!space) {
      none += cat(none.empty() ? "" : "; ", place.key, " ", place.path, ": cannot be asked");
      continue;
    }
    const std::string text = cat(human_bytes(space->free), " free on ", place.path);
    all += (all.empty() ? "" : ", ") + text;
    const bool inodes = space->inodes >= 0 && space->inodes < kLeastInodes;
    if (space->free < kLeastFree || inodes) {
      none += cat(none.empty() ? "" : "; ", text, inodes ? cat(", ", space->inodes, " inodes") : std::string());
    } else if (space->free < kComfortable) {
      low += (low.empty() ? "" : "; ") + text;
    }
  }
  r.measured = all;
  if (!none.empty()) {
    fail(r, none,
         cat("make room for at least ", human_bytes(kLeastFree), " and ", kLeastInodes, " files, or move the folder"));
  } else if (!low.empty()) {
    warn(r, low, cat("make room: ", human_bytes(kComfortable), " hold logs and state for long"));
  }
}

void check_writable(const Context& c, Result& r) {
  std::string trouble;
  for (const Place& place : places(c.subject)) {
    if (const auto why = c.host.write_trouble(place.path)) {
      trouble += cat(trouble.empty() ? "" : "; ", place.key, " ", place.path, ": ", *why);
    }
  }
  r.measured = "state, log and run folder can be written";
  if (!trouble.empty()) fail(r, trouble, "create the folder and give it to the agent's user (chown)");
}

void check_filesystem(const Context& c, Result& r) {
  const auto state = mount_of(c.files, c.subject.state_dir);
  const auto model = mount_of(c.files, c.subject.model);
  if (!state) {
    skip(r, "/proc/self/mountinfo cannot be read");
    return;
  }
  r.measured = cat("paths.state is on ", state->type, model ? cat(", model.path on ", model->type) : std::string());
  if (is_remote(state->type)) {
    fail(r, cat("paths.state is on ", state->type, " (", state->point, "): the database needs a local file system"),
         "put paths.state on a local disk");
  } else if (model && is_remote(model->type)) {
    warn(r, cat("model.path is on ", model->type, " (", model->point, "): loading takes as long as the network does"),
         "copy the checkpoint to a local disk");
  }
}

void check_ports(const Context& c, Result& r) {
  struct Port {
    const char* key;
    uint16_t number;
    const std::string& address;
  };
  if (c.subject.node != "head") {
    skip(r, "the ports of ranks and API are the head's");
    return;
  }
  std::string taken;
  for (const Port& port : {Port{"api.port", c.subject.api_port, c.subject.api_bind},
                           Port{"ranks.port", c.subject.ranks_port, c.subject.fabric_address}}) {
    const auto listener = listener_of(c.files, port.number, parse_ipv4(port.address).value_or(0));
    if (!listener || (listener->pid && c.is_own(*listener->pid))) continue;
    taken += cat(taken.empty() ? "" : "; ", "port ", port.number, " (", port.key, ") is in use by ", holder(*listener));
  }
  r.measured = cat("api.port ", c.subject.api_port, " and ranks.port ", c.subject.ranks_port, " are free or ours");
  if (!taken.empty()) fail(r, taken, "stop it, or set another port");
}

void check_descriptors(const Context& c, Result& r) {
  const auto limit = limit_of(c.files, "Max open files");
  if (!limit) {
    skip(r, "/proc/self/limits cannot be read");
    return;
  }
  r.measured = *limit < 0 ? "unlimited open files" : cat(*limit, " open files");
  if (*limit >= 0 && *limit < kDescriptors) {
    warn(r, r.measured, cat("raise the limit to ", kDescriptors, " or more (LimitNOFILE= of the unit)"));
  }
}

void check_residue(const Context& c, Result& r) {
  std::vector<std::string> found;
  for (const std::string& name : c.files.list("/dev/shm")) {
    if (name.starts_with("glm53-") || name.starts_with("nccl-")) found.push_back(name);
  }
  if (!c.own_pids.empty()) {
    skip(r, "processes of the cluster run and may own them");
    return;
  }
  r.measured = "no shared memory of earlier ranks";
  if (found.empty()) return;
  warn(r, cat(found.size(), " shared memory objects of earlier ranks in /dev/shm (", found.front(), "…)"),
       "remove them when no other program uses NCCL: rm /dev/shm/nccl-*");
}

}  // namespace glm53::preflight
