#include "cli/messages.h"

#include <algorithm>
#include <array>

#include "cli/commands.h"
#include "cli/terminal.h"
#include "common/strings.h"

namespace glm53::cli {
namespace {

constexpr std::array kMessages{
    Message{"E201", "The configuration of the cluster cannot be used.", "`glm53ctl config check` names file and line."},
    Message{"E203", "The node's fabric address is on none of its interfaces.",
            "Set `head.fabric_address` or `worker.fabric_address`, or give the interface its address."},
    Message{"E204", "The clocks of the nodes differ.", "Enable NTP on both: TLS and signed URLs fail otherwise."},
    Message{"E205", "A folder of the agent is nearly full, or out of inodes.", "Make room, or move the folder."},
    Message{"E206", "The agent's user cannot create, lock, rename or link files in a folder of its own.",
            "Create the folder and give it to that user (chown)."},
    Message{"E207", "NVML shows no GPU, or fewer than `topology.ranks` names.",
            "Reboot after an update of the driver; check `nvidia-smi` and `topology.ranks`."},
    Message{"W208", "This driver is known for trouble on GB10.", "Install the driver that the check names."},
    Message{"W209", "The GPU's clock does not rise under load.",
            "Switch the machine off and take the power cable out for some minutes."},
    Message{"E210", "The fabric's interface has no carrier, or is down.",
            "Check the cable; name the interface that is up by its address."},
    Message{"E211", "The MTUs of the two ends differ.", "Set the same MTU (9000) on both fabric interfaces."},
    Message{"E212", "No RoCE v2 GID belongs to the fabric address, or `NCCL_IB_GID_INDEX` names another one.",
            "Unset the variable; where NetworkManager moves indices set `ipv6.addr-gen-mode=eui64`."},
    Message{"E213", "Large frames do not pass between the nodes.", "Set the MTU on everything in between."},
    Message{"E214", "`api.port` or `ranks.port` is held by another process.", "Stop it, or set another port."},
    Message{"E215", "Somebody else's process holds GPU memory.", "Stop the process that the check names."},
    Message{"W216", "Processes or sockets of an earlier run are left.", "Nothing: a start removes them."},
    Message{"E217", "Less memory is available than weights, KV cache and `memory.reserve` need.",
            "Stop what is not needed, or lower `memory.kv_bytes`."},
    Message{"E220", "The agent's database is on a network file system.", "Put `paths.state` on a local disk."},
    Message{"W221", "Few files may be open at the same time.", "Raise `LimitNOFILE` of the unit."},
    Message{"W222", "The GPU's persistence mode is off.", "Enable `nvidia-persistenced`."},
    Message{"W223", "The kernel reported an error of the GPU (Xid) since boot.", "Look at `dmesg`; reboot."},
    Message{"E224", "The RDMA device is missing, its port is not ACTIVE, or it cannot be opened.",
            "Check cable and driver; give the agent's user access to `/dev/infiniband`."},
    Message{"E225", "Too little memory may be locked for RDMA.", "Set `LimitMEMLOCK=infinity` in the unit."},
    Message{"W226", "An RDMA write is slower than the link.", "Boot both machines from cold."},
    Message{"E230", "The disk of `paths.state` is full: nothing new can be recorded.",
            "Make room there; what was recorded is whole, and the agent goes on by itself."},
    Message{"E301", "The worker's agent does not answer.",
            "Start `glm53-agent` there; check `worker.admin`, and who is a member (`glm53ctl node list`)."},
    Message{"E303", "The host key of a machine is not known to ssh, or it has changed.",
            "Compare it with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there, then put it into known_hosts."},
    Message{"E304", "SSH to a machine failed.", "`ssh -o BatchMode=yes USER@HOST` says why; a key must open it."},
    Message{"E305", "The installation on a machine failed.", "The line says where; it can be run again at any time."},
    Message{"E501", "The engine, or what stands in for it, cannot be run.", "Install it, or set `engine.path`."},
    Message{"E601", "The model is not complete.", "Download or copy it again; files that are complete are kept."},
    Message{"E603", "The drafter is not complete.", "Download or copy it again, or leave `draft.path` empty."},
    Message{"E610", "A file does not match its digest.",
            "Another source (`hub.mirrors`); on the head `glm53ctl download --verify`; a disk that damages data."},
    Message{"E611", "A source lists another digest for a file of a commit than what is known.",
            "Do not use that source: a commit names content."},
    Message{"E612", "The server announces another file than the listing did.", "Another source (`hub.mirrors`)."},
    Message{"E613", "The listing names a file that could leave its folder.",
            "Do not use this repository: it cannot be downloaded safely."},
    Message{"E614", "The server answers with something that is no commit, or with another one.",
            "Check `hub.endpoint`: a proxy may answer instead of the Hub."},
    Message{"E615", "The next page of a listing leads astray.", "Check `hub.endpoint`."},
    Message{"E616", "The server sent another part than was asked for.", "It is asked again; else another source."},
    Message{"E617", "The repository is incomplete: its index names a shard that is not there.",
            "Wait until its owner has uploaded it, or pin another revision."},
    Message{"E618", "Redirects lead nowhere, in circles, or are too many.", "Check `hub.endpoint` and proxies."},
    Message{"E619", "The server gave an answer that the protocol does not have.", "Check `hub.endpoint`."},
    Message{"E620", "The repository was not found, or cannot be seen with this token.",
            "Check its name; set `HF_TOKEN` or `hub.token_file`."},
    Message{"E621", "The Hub rejects the token.", "Make a new one."},
    Message{"E622", "The repository is gated.", "Open its page as the token's user and accept its terms."},
    Message{"E623", "The token may not read the repository.", "A fine-grained token needs read access to it."},
    Message{"E624", "The repository has no such revision.", "Check the commit: a rewritten branch loses its old ones."},
    Message{"E625", "The revision has no such file.", "Another source; `glm53ctl download --verify`."},
    Message{"E626", "Access to the repository is disabled.", "Name another one (`model.fallback_repo`)."},
    Message{"E627", "The Hub's rate limit is reached.", "It is waited for; a token has a higher one."},
    Message{"E628", "The server has trouble.", "It is asked again for `hub.give_up_after`."},
    Message{"E629", "A signed URL was refused.", "A new one is asked for; check the clock."},
    Message{"E630", "The server's certificate is not trusted.", "Set `hub.ca_file` if a proxy of yours signs it."},
    Message{"E631", "The server's name cannot be found.", "Check the name server, and `https_proxy`."},
    Message{"E632", "The connection failed.", "Check network and proxy; it is tried again."},
    Message{"E633", "The server did not answer in time.", "It is asked again; `hub.first_byte_timeout`."},
    Message{"E634", "The server sends too little.", "It is asked again; `hub.stall_timeout`."},
    Message{"E635", "The server ended an answer early.", "It goes on at the next byte."},
    Message{"E640", "The disk is full, a quota is used up, or too little would stay free.",
            "Make room and do it again: it goes on where it stopped; `hub.disk_reserve`, `hub.home`."},
    Message{"E641", "The cache cannot be written.", "Give the folder to the user who writes it (chown)."},
    Message{"E642", "A partial file cannot be written or made durable.", "Look at the disk (`dmesg`)."},
    Message{"E643", "A copy to the worker made no progress for too long.",
            "Check the worker and the network; `glm53ctl sync` goes on where it stopped."},
    Message{"E644", "A piece of a copy was damaged on the way.", "It is sent again; if it happens often, the network."},
    Message{"E650", "An image, a blob, a layer or an installed file does not match its digest.",
            "Install it again; do not use a registry that sends other bytes."},
    Message{"E651", "A manifest, an index or a configuration of an image is none.",
            "Check the name; `scripts/make-image.sh` makes images of bundles."},
    Message{"E652", "The image is made for another platform.", "Install an image made for this machine."},
    Message{"E653", "An image is hostile or damaged: names or links that leave their folder, devices, too much of it.",
            "Do not use this image."},
    Message{"E654", "The engine of an image does not run on this machine.",
            "Nothing was activated; install an image made for this machine."},
    Message{"E655", "Somebody else works on the installed bundles.", "Wait until that is done."},
    Message{"E656", "The record of a bundle cannot be read.", "Remove the file and install the image again."},
    Message{"E657", "No such bundle is installed.", "`glm53ctl engine list`."},
    Message{"E658", "The registry gives no token.", "Check `engine.credentials_file`."},
    Message{"E659", "The image was not found, or may not be read.",
            "Check name and digest; private images need `engine.credentials_file`. An installed one goes on working."},
    Message{"E710", "The address asks for a certificate of the cluster.",
            "`glm53ctl cluster login` for a person, `glm53ctl cluster join` for a node."},
    Message{"E711", "A certificate has expired.", "Join again with a new token; check the clocks (NTP)."},
    Message{"E712", "A certificate does not count yet: a clock is wrong.", "Set both clocks (NTP)."},
    Message{"E713", "A certificate is not of this cluster's CA.", "Join this cluster; check the address."},
    Message{"E714", "The certificate's owner is no member (any more).", "Join again with a new token."},
    Message{"E715", "The join token was used already.", "`glm53ctl cluster token` on the head makes a new one."},
    Message{"E716", "The join token has expired.", "`glm53ctl cluster token` on the head makes a new one."},
    Message{"E717", "This is no join token, or not one of this head's.", "Copy it whole, or make a new one."},
    Message{"E718", "The machine that answers is not the head that made the token.",
            "Check the address: somebody may stand in between."},
    Message{"E719", "The certificate's role may not do that.", "Ask an operator; a worker answers its head only."},
    Message{"E720", "The node has no certificate yet.",
            "`glm53ctl cluster init` on the head, `glm53ctl cluster join` on a worker."},
    Message{"W721", "A certificate expires soon.", "Join again with a new token."},
};

}  // namespace

std::span<const Message> messages() {
  return kMessages;
}

const Message* find_message(std::string_view code) {
  const auto same = [](char a, char b) { return std::toupper(static_cast<unsigned char>(a)) == b; };
  const auto* const it = std::find_if(kMessages.begin(), kMessages.end(), [&](const Message& m) {
    return std::equal(code.begin(), code.end(), m.code.begin(), m.code.end(), same);
  });
  return it == kMessages.end() ? nullptr : it;
}

std::string troubleshooting_page() {
  std::string page =
      "# Troubleshooting\n\n"
      "Codes of the agents' messages, what they mean and what to do. `E` ends what was asked for, `W` only warns; "
      "`glm53ctl explain CODE`\n"
      "says the same. Made of the catalogue in `cli/messages.cpp`: `GLM53_UPDATE=1 build/…/tests/unit_cli "
      "-tc=\"messages*\"` writes it.\n\n"
      "Where to look first: `glm53ctl status` (what, and since when), `glm53ctl doctor` (every check, now), `glm53ctl "
      "logs` (both nodes, by time).\n"
      "Exit codes of the programs: [operating.md](operating.md), of ranks: [rank-contract.md](rank-contract.md).\n\n"
      "| code | meaning | what to do |\n|---|---|---|\n";
  for (const Message& m : kMessages) page += cat("| `", m.code, "` | ", m.meaning, " | ", m.remedy, " |\n");
  return page;
}

int run_explain(const std::string& code) {
  if (code.empty()) {
    for (const Message& m : kMessages) print_line(cat(m.code, "  ", m.meaning));
    return 0;
  }
  const Message* const m = find_message(code);
  if (m == nullptr) throw Error(Code::usage, cat("there is no code ", code), "glm53ctl explain lists all");
  print_line(cat(m->code, ": ", m->meaning));
  print_line(cat("  try: ", m->remedy));
  return 0;
}

}  // namespace glm53::cli
