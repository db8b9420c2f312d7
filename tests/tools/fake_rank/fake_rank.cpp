#include "tests/tools/fake_rank/fake_rank.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <poll.h>
#include <signal.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sys/signalfd.h>
#include <sys/socket.h>

#include "common/error.h"
#include "common/json.h"
#include "common/log.h"
#include "common/process.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53::fake {
namespace {

using namespace std::chrono_literals;

std::vector<std::byte> bytes_of(const std::string& text) {
  std::vector<std::byte> out;
  std::ranges::transform(text, std::back_inserter(out), [](char c) { return static_cast<std::byte>(c); });
  return out;
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

UniqueFd watch_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  if (pthread_sigmask(SIG_BLOCK, &set, nullptr) != 0) throw_errno(Code::internal, "pthread_sigmask");
  UniqueFd fd(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) throw_errno(Code::internal, "signalfd");
  return fd;
}

}  // namespace

FakeRank::FakeRank(RankConfig config, Rules rules) : config_(std::move(config)), rules_(std::move(rules)) {}

int FakeRank::run() {
  signals_ = watch_signals();
  admin_ = listen_unix(config_.admin_socket);
  try {
    enter(Phase::exec);
    enter(Phase::init);
    enter(Phase::rendezvous);
    meet_peers();
    for (const Phase phase : {Phase::comm_init, Phase::load_target, Phase::load_draft, Phase::measure, Phase::pools,
                              Phase::capture, Phase::warmup}) {
      enter(phase);
    }
    ready_ = true;
    ready_since_ = Clock::now();
    notifier_.phase(Phase::ready);
    notifier_.ready();
    while (!draining_) pump(100ms);
    notifier_.phase(Phase::draining);
    const auto limit = Clock::now() + 30s;
    while ((!running_.empty() || !waiting_.empty()) && Clock::now() < limit) pump(20ms);
  } catch (const Error& e) {
    if (e.code() != Code::cancelled) {
      ::unlink(config_.admin_socket.c_str());
      throw;
    }
  }
  ::unlink(config_.admin_socket.c_str());
  return 0;
}

void FakeRank::enter(Phase phase) {
  notifier_.phase(phase);
  const Rule* rule = rules_.find(config_.rank, config_.generation, phase);
  if (rule != nullptr) {
    pump(rule->after);
    misbehave(*rule);
  }
  constexpr int kPieces = 4;
  for (int piece = 1; piece <= kPieces; ++piece) {
    pump(rules_.phase_time / kPieces);
    if (phase == Phase::load_target) notifier_.progress(static_cast<uint64_t>(piece) << 20, uint64_t{kPieces} << 20);
  }
}

void FakeRank::misbehave(const Rule& rule) {
  switch (rule.act) {
    case Rule::Act::kill:
      ::kill(::getpid(), SIGKILL);
      break;
    case Rule::Act::exit:
      notifier_.error(cat("told to exit with ", rule.exit_code, " in phase ", name(rule.phase)));
      log::error(cat("told to exit with ", rule.exit_code));
      ::_exit(rule.exit_code);
    case Rule::Act::hang:
      log::warn(cat("told to hang in phase ", name(rule.phase)));
      break;
  }
  while (true) std::this_thread::sleep_for(1h);
}

void FakeRank::meet_peers() {
  if (config_.size <= 1) return;
  if (config_.rank == 0) {
    accept_peers();
  } else {
    join_rank0();
  }
}

void FakeRank::accept_peers() {
  const UniqueFd listener = listen_tcp(config_.rendezvous_host, config_.rendezvous_port);
  const auto limit = Clock::now() + 60s;
  while (static_cast<int>(peers_.size()) < config_.size - 1) {
    pump(0ms);
    UniqueFd peer = accept_until(listener.get(), Clock::now() + 50ms);
    if (!peer) {
      if (Clock::now() > limit) throw Error(Code::fabric, cat("only ", peers_.size(), " peers came to the rendezvous"));
      continue;
    }
    const auto hello = parse_json(text_of(receive_block(peer.get(), 1 << 16)));
    if (hello.value("generation", uint64_t{0}) != config_.generation) {
      log::warn("a peer of another generation came to the rendezvous");
      continue;
    }
    if (hello.value("config_hash", "") != config_.config_hash || hello.value("size", 0) != config_.size) {
      throw Error(Code::config, cat("rank ", hello.value("rank", -1), " has another configuration"));
    }
    send_block(peer.get(), bytes_of(R"({"ok":true})"));
    peers_.push_back(std::move(peer));
  }
}

void FakeRank::join_rank0() {
  const nlohmann::ordered_json hello = {{"rank", config_.rank},
                                        {"size", config_.size},
                                        {"generation", config_.generation},
                                        {"config_hash", config_.config_hash}};
  const auto limit = Clock::now() + 60s;
  while (true) {
    pump(20ms);
    try {
      UniqueFd peer = connect_tcp(config_.rendezvous_host, config_.rendezvous_port, Clock::now() + 1s);
      send_block(peer.get(), bytes_of(dump(hello)));
      receive_block(peer.get(), 1 << 16);
      peers_.push_back(std::move(peer));
      return;
    } catch (const Error& e) {
      if (Clock::now() > limit) throw Error(Code::fabric, cat("rank 0 does not answer: ", e.what()));
    }
  }
}

void FakeRank::pump(std::chrono::milliseconds time) {
  const auto until = Clock::now() + time;
  do {
    if (ready_) serve_ready();
    std::vector<pollfd> fds{{signals_.get(), POLLIN, 0}, {admin_.get(), POLLIN, 0}, {api_.get(), POLLIN, 0}};
    for (const auto& peer : peers_) fds.push_back({peer.get(), POLLIN, 0});
    const size_t first_client = fds.size();
    for (const auto& client : admin_clients_) fds.push_back({client.fd.get(), POLLIN, 0});
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    const int wait = static_cast<int>(std::clamp<int64_t>(left, 0, running_.empty() ? 100 : rules_.token_time.count()));
    if (::poll(fds.data(), fds.size(), wait) < 0 && errno != EINTR) throw_errno(Code::internal, "poll");
    if (fds[0].revents != 0) on_signal();
    if (fds[1].revents != 0) {
      if (UniqueFd client = accept_until(admin_.get(), Clock::now())) {
        admin_clients_.push_back({std::move(client), {}});
      }
    }
    if (api_ && fds[2].revents != 0) on_api_frame();
    for (size_t i = first_client; i-- > 3;) {
      if (fds[i].revents != 0) on_peer(i - 3);
    }
    for (size_t i = fds.size(); i-- > first_client;) {
      if (fds[i].revents != 0) on_admin(i - first_client);
    }
  } while (Clock::now() < until);
}

void FakeRank::serve_ready() {
  const auto now = Clock::now();
  const Rule* rule = rules_.find(config_.rank, config_.generation, Phase::ready);
  if (rule != nullptr && now - ready_since_ >= rule->after) misbehave(*rule);
  ++steps_;
  if (now >= next_watchdog_) {
    notifier_.watchdog();
    next_watchdog_ = now + 1s;
  }
  if (config_.rank != 0) return;
  if (!api_ && now >= next_api_try_ && !config_.api_socket.empty()) connect_api();
  admit();
  speak();
  if (api_ && now >= next_stats_) {
    next_stats_ = now + 1s;
    try {
      wire::send_frame(api_.get(), stats());
    } catch (const Error&) {
      drop_api();
    }
  }
}

void FakeRank::on_signal() {
  std::array<signalfd_siginfo, 4> infos{};
  const ssize_t n = ::read(signals_.get(), infos.data(), sizeof infos);
  if (n <= 0) return;
  if (!ready_ || draining_) throw Error(Code::cancelled, "told to stop");
  draining_ = true;
}

void FakeRank::on_peer(size_t index) {
  std::array<char, 64> ignored{};
  const ssize_t n = ::recv(peers_[index].get(), ignored.data(), ignored.size(), MSG_DONTWAIT);
  if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
  if (draining_) {
    peers_.erase(peers_.begin() + static_cast<std::ptrdiff_t>(index));
    return;
  }
  throw Error(Code::peer_lost, config_.rank == 0 ? cat("rank ", index + 1, " went away") : "rank 0 went away");
}

void FakeRank::on_admin(size_t index) {
  auto& client = admin_clients_[index];
  std::array<char, 4096> piece{};
  const ssize_t n = ::recv(client.fd.get(), piece.data(), piece.size(), MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
  bool keep = n > 0 && client.line.size() < 65536;
  if (n > 0) client.line.append(piece.data(), static_cast<size_t>(n));
  for (size_t end = client.line.find('\n'); keep && end != std::string::npos; end = client.line.find('\n')) {
    const std::string answer = answer_admin(client.line.substr(0, end)) + "\n";
    client.line.erase(0, end + 1);
    try {
      send_all(client.fd.get(), bytes_of(answer));
    } catch (const Error&) {
      keep = false;
    }
  }
  if (!keep) admin_clients_.erase(admin_clients_.begin() + static_cast<std::ptrdiff_t>(index));
}

std::string FakeRank::answer_admin(const std::string& line) {
  nlohmann::ordered_json answer = {{"ok", true}};
  try {
    const auto command = parse_json(line).at("do").get<std::string>();
    if (command == "gate_open" || command == "gate_close") {
      gate_open_ = command == "gate_open";
      next_stats_ = {};
    } else if (command == "drain") {
      gate_open_ = false;
    } else if (command == "counters") {
      answer["step"] = steps_;
      answer["memory_bytes"] = resident_bytes(::getpid());
      if (config_.rank == 0) {
        const auto now = stats();
        answer.update({{"running", now.running},
                       {"waiting", now.waiting},
                       {"prompt_tokens", now.prompt_tokens},
                       {"generated_tokens", now.generated_tokens},
                       {"progress_age_ms", now.progress_age_ms},
                       {"gate_open", now.gate_open},
                       {"peers_alive", now.peers_alive}});
      }
    } else if (command != "cache_reset") {
      answer = {{"ok", false}, {"error", cat("unknown command '", command, "'")}};
    }
  } catch (const std::exception& e) {
    answer = {{"ok", false}, {"error", e.what()}};
  }
  return dump(answer);
}

void FakeRank::connect_api() {
  next_api_try_ = Clock::now() + 200ms;
  try {
    api_ = connect_unix(config_.api_socket);
    wire::send_frame(api_.get(), wire::Hello{.generation = config_.generation,
                                             .model_digest = "fake",
                                             .vocab = 1 << 18,
                                             .max_context = 1 << 20,
                                             .max_seqs = 256,
                                             .eos = {}});
    next_stats_ = {};
  } catch (const Error&) {
    drop_api();
  }
}

void FakeRank::drop_api() {
  api_.reset();
  running_.clear();
  waiting_.clear();
}

void FakeRank::on_api_frame() {
  try {
    const auto message = wire::receive_frame(api_.get());
    if (const auto* submit = std::get_if<wire::Submit>(&message)) {
      waiting_.emplace_back(submit->id, *submit);
    } else if (const auto* cancel = std::get_if<wire::Cancel>(&message)) {
      running_.erase(cancel->id);
      std::erase_if(waiting_, [&](const auto& entry) { return entry.first == cancel->id; });
    }
  } catch (const Error& e) {
    log::info(cat("the API process went away: ", e.what()));
    drop_api();
  }
}

void FakeRank::admit() {
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const wire::Submit& submit = at->second;
    if (!gate_open_ && submit.key != "canary") {
      ++at;
      continue;
    }
    Request request;
    request.said = static_cast<uint32_t>(submit.emitted.size());
    const size_t skip = std::min<size_t>(submit.emitted.size(), submit.prompt.size());
    request.answer.assign(submit.prompt.begin() + static_cast<std::ptrdiff_t>(skip), submit.prompt.end());
    request.left = submit.sampling.max_tokens - static_cast<int32_t>(request.said);
    request.next = Clock::now();
    prompt_tokens_ += submit.prompt.size();
    running_.emplace(at->first, std::move(request));
    at = waiting_.erase(at);
  }
}

void FakeRank::speak() {
  const auto now = Clock::now();
  try {
    for (auto at = running_.begin(); at != running_.end();) {
      auto& [id, request] = *at;
      if (now < request.next) {
        ++at;
        continue;
      }
      say(id, request);
      at = request.answer.empty() || request.left <= 0 ? running_.erase(at) : std::next(at);
    }
  } catch (const Error&) {
    drop_api();
  }
}

void FakeRank::say(uint64_t id, Request& request) {
  wire::Delta delta;
  delta.id = id;
  delta.index = request.said;
  if (!request.answer.empty() && request.left > 0) {
    delta.tokens.push_back(request.answer.front());
    request.answer.erase(request.answer.begin());
    ++request.said;
    --request.left;
    ++generated_tokens_;
  }
  if (request.answer.empty()) {
    delta.finish = "stop";
  } else if (request.left <= 0) {
    delta.finish = "length";
  }
  request.next = Clock::now() + rules_.token_time;
  wire::send_frame(api_.get(), delta);
}

wire::Stats FakeRank::stats() const {
  wire::Stats now;
  now.step = steps_;
  now.running = static_cast<uint32_t>(running_.size());
  now.waiting = static_cast<uint32_t>(waiting_.size());
  now.prompt_tokens = prompt_tokens_;
  now.generated_tokens = generated_tokens_;
  now.memory_bytes = resident_bytes(::getpid());
  now.gate_open = gate_open_;
  now.peers_alive = config_.rank != 0 || static_cast<int>(peers_.size()) == config_.size - 1;
  return now;
}

}  // namespace glm53::fake
