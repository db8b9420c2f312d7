// Encoding of the frames between API process and rank 0.
#include "engine/runtime/wire.h"

#include "common/bytes.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53::wire {
namespace {

enum class Kind : uint8_t { hello = 1, submit = 2, cancel = 3, delta = 4, stats = 5 };

using Pairs = std::vector<std::pair<int32_t, float>>;

void put_pairs(ByteWriter& w, const Pairs& pairs) {
  w.put(static_cast<uint32_t>(pairs.size()));
  for (const auto& [token, value] : pairs) {
    w.put(token);
    w.put(value);
  }
}

Pairs get_pairs(ByteReader& r) {
  Pairs pairs(r.count(sizeof(int32_t) + sizeof(float)));
  for (auto& [token, value] : pairs) {
    token = r.get<int32_t>();
    value = r.get<float>();
  }
  return pairs;
}

bool get_bool(ByteReader& r) {
  const auto v = r.get<uint8_t>();
  if (v > 1) throw Error(Code::corrupt, cat("frame holds ", int{v}, " where 0 or 1 belongs"));
  return v == 1;
}

void put(ByteWriter& w, const Hello& m) {
  w.put(m.protocol);
  w.put(m.generation);
  w.put(m.model_digest);
  w.put(m.vocab);
  w.put(m.max_context);
  w.put(m.max_seqs);
  w.put(m.eos);
}

Hello get_hello(ByteReader& r) {
  Hello m;
  m.protocol = r.get<uint32_t>();
  if (m.protocol != kProtocol)
    throw Error(Code::corrupt, cat("hello speaks protocol ", m.protocol, ", this program protocol ", kProtocol),
                "run API process and ranks from the same build");
  m.generation = r.get<uint64_t>();
  m.model_digest = r.get_string();
  m.vocab = r.get<int32_t>();
  m.max_context = r.get<int32_t>();
  m.max_seqs = r.get<int32_t>();
  m.eos = r.get_vector<int32_t>();
  return m;
}

void put(ByteWriter& w, const SamplingParams& s) {
  for (const float v : {s.temperature, s.top_p, s.min_p, s.presence, s.frequency, s.repetition}) w.put(v);
  for (const int32_t v : {s.top_k, s.max_tokens, s.min_tokens, s.logprobs}) w.put(v);
  w.put(static_cast<uint8_t>(s.ignore_eos));
  w.put(s.stop_ids);
  put_pairs(w, s.bias);
  w.put(s.allowed);
}

SamplingParams get_sampling(ByteReader& r) {
  SamplingParams s;
  for (float* v : {&s.temperature, &s.top_p, &s.min_p, &s.presence, &s.frequency, &s.repetition}) *v = r.get<float>();
  for (int32_t* v : {&s.top_k, &s.max_tokens, &s.min_tokens, &s.logprobs}) *v = r.get<int32_t>();
  s.ignore_eos = get_bool(r);
  s.stop_ids = r.get_vector<int32_t>();
  s.bias = get_pairs(r);
  s.allowed = r.get_vector<int32_t>();
  return s;
}

void put(ByteWriter& w, const Submit& m) {
  w.put(m.id);
  w.put(m.prompt);
  w.put(m.emitted);
  w.put(m.seed);
  w.put(m.priority);
  w.put(m.salt);
  w.put(m.key);
  w.put(static_cast<uint8_t>(m.cache_write));
  w.put(static_cast<uint8_t>(m.speculate));
  w.put(m.boundaries);
  put(w, m.sampling);
  w.put(m.grammar);
  w.put(m.deadline_ms);
  w.put(static_cast<uint8_t>(m.replayed));
}

Submit get_submit(ByteReader& r) {
  Submit m;
  m.id = r.get<uint64_t>();
  m.prompt = r.get_vector<int32_t>();
  m.emitted = r.get_vector<int32_t>();
  m.seed = r.get<uint64_t>();
  m.priority = r.get<int32_t>();
  m.salt = r.get_string();
  m.key = r.get_string();
  m.cache_write = get_bool(r);
  m.speculate = get_bool(r);
  m.boundaries = r.get_vector<int32_t>();
  m.sampling = get_sampling(r);
  m.grammar = r.get_string();
  m.deadline_ms = r.get<int64_t>();
  m.replayed = get_bool(r);
  return m;
}

void put(ByteWriter& w, const Cancel& m) {
  w.put(m.id);
  w.put(static_cast<uint8_t>(m.keep_tokens.has_value()));
  w.put(m.keep_tokens.value_or(0));
}

Cancel get_cancel(ByteReader& r) {
  Cancel m;
  m.id = r.get<uint64_t>();
  const bool has = get_bool(r);
  const auto keep = r.get<uint32_t>();
  if (has) m.keep_tokens = keep;
  return m;
}

void put(ByteWriter& w, const Delta& m) {
  w.put(m.id);
  w.put(m.index);
  w.put(m.tokens);
  w.put(static_cast<uint32_t>(m.logprobs.size()));
  for (const TokenLogprobs& l : m.logprobs) {
    w.put(l.logprob);
    put_pairs(w, l.top);
  }
  w.put(m.finish);
  w.put(m.error);
  w.put(m.error_code);
  w.put(m.stop_token);
  w.put(m.cached_tokens);
  w.put(m.draft_tokens);
  w.put(m.draft_accepted);
  w.put(m.queue_ms);
  w.put(m.retry_after_s);
}

Delta get_delta(ByteReader& r) {
  Delta m;
  m.id = r.get<uint64_t>();
  m.index = r.get<uint32_t>();
  m.tokens = r.get_vector<int32_t>();
  m.logprobs.resize(r.count(sizeof(float) + sizeof(uint32_t)));
  for (TokenLogprobs& l : m.logprobs) {
    l.logprob = r.get<float>();
    l.top = get_pairs(r);
  }
  if (!m.logprobs.empty() && m.logprobs.size() != m.tokens.size())
    throw Error(Code::corrupt, cat("delta holds ", m.tokens.size(), " tokens and logprobs of ", m.logprobs.size()));
  m.finish = r.get_string();
  m.error = r.get_string();
  m.error_code = r.get<int32_t>();
  m.stop_token = r.get<int32_t>();
  m.cached_tokens = r.get<uint32_t>();
  m.draft_tokens = r.get<uint32_t>();
  m.draft_accepted = r.get<uint32_t>();
  m.queue_ms = r.get<uint32_t>();
  m.retry_after_s = r.get<uint32_t>();
  return m;
}

template <size_t N>
void put_all(ByteWriter& w, const std::array<uint64_t, N>& values) {
  for (const uint64_t v : values) w.put(v);
}

template <size_t N>
void get_all(ByteReader& r, std::array<uint64_t, N>& values) {
  for (uint64_t& v : values) v = r.get<uint64_t>();
}

void put(ByteWriter& w, const Stats& m) {
  w.put(m.step);
  for (const uint32_t v : {m.running, m.waiting, m.blocks_used, m.blocks_total, m.slots_used, m.slots_total}) w.put(v);
  w.put(m.prompt_tokens);
  w.put(m.generated_tokens);
  for (const uint32_t v : {m.blocks_cached, m.snaps_used, m.snaps_total}) w.put(v);
  for (const uint64_t v : {m.prefix_queries, m.prefix_hits, m.snaps_written, m.snaps_evicted, m.blocks_evicted,
                           m.preemptions, m.spill_memory_bytes, m.spill_disk_bytes, m.spilled, m.spill_dropped,
                           m.restores, m.restores_failed, m.draft_steps, m.draft_tokens, m.draft_accepted})
    w.put(v);
  w.put(m.draft_accepted_at);
  w.put(static_cast<uint8_t>(m.drafter_paused));
  put_all(w, m.stage_us);
  put_all(w, m.stage_bytes);
  put_all(w, m.step_us);
  put_all(w, m.step_counts);
  w.put(m.progress_age_ms);
  w.put(m.memory_bytes);
  w.put(m.memory_available);
  w.put(m.memory_level);
  w.put(static_cast<uint8_t>(m.spill_disk_ok));
  w.put(static_cast<uint8_t>(m.gate_open));
  w.put(static_cast<uint8_t>(m.peers_alive));
}

Stats get_stats(ByteReader& r) {
  Stats m;
  m.step = r.get<uint64_t>();
  for (uint32_t* v : {&m.running, &m.waiting, &m.blocks_used, &m.blocks_total, &m.slots_used, &m.slots_total})
    *v = r.get<uint32_t>();
  m.prompt_tokens = r.get<uint64_t>();
  m.generated_tokens = r.get<uint64_t>();
  for (uint32_t* v : {&m.blocks_cached, &m.snaps_used, &m.snaps_total}) *v = r.get<uint32_t>();
  for (uint64_t* v : {&m.prefix_queries, &m.prefix_hits, &m.snaps_written, &m.snaps_evicted, &m.blocks_evicted,
                      &m.preemptions, &m.spill_memory_bytes, &m.spill_disk_bytes, &m.spilled, &m.spill_dropped,
                      &m.restores, &m.restores_failed, &m.draft_steps, &m.draft_tokens, &m.draft_accepted})
    *v = r.get<uint64_t>();
  m.draft_accepted_at = r.get_vector<uint64_t>();
  m.drafter_paused = get_bool(r);
  get_all(r, m.stage_us);
  get_all(r, m.stage_bytes);
  get_all(r, m.step_us);
  get_all(r, m.step_counts);
  m.progress_age_ms = r.get<uint32_t>();
  m.memory_bytes = r.get<uint64_t>();
  m.memory_available = r.get<uint64_t>();
  m.memory_level = r.get<uint32_t>();
  m.spill_disk_ok = get_bool(r);
  m.gate_open = get_bool(r);
  m.peers_alive = get_bool(r);
  return m;
}

Kind kind_of(const Message& message) {
  return static_cast<Kind>(message.index() + 1);
}
static_assert(std::is_same_v<std::variant_alternative_t<0, Message>, Hello> &&
              std::is_same_v<std::variant_alternative_t<4, Message>, Stats>);

Message decode_body(Kind kind, ByteReader& r) {
  switch (kind) {
    case Kind::hello:
      return get_hello(r);
    case Kind::submit:
      return get_submit(r);
    case Kind::cancel:
      return get_cancel(r);
    case Kind::delta:
      return get_delta(r);
    case Kind::stats:
      return get_stats(r);
  }
  throw Error(Code::corrupt, cat("frame of unknown kind ", int{static_cast<uint8_t>(kind)}));
}

}  // namespace

std::vector<std::byte> encode(const Message& message) {
  ByteWriter w;
  w.put(kind_of(message));
  std::visit([&](const auto& m) { put(w, m); }, message);
  return w.take();
}

Message decode(std::span<const std::byte> frame) {
  ByteReader r(frame);
  const auto kind = r.get<Kind>();
  Message message = decode_body(kind, r);
  r.finish();
  return message;
}

void send_frame(int fd, const Message& message) {
  const std::vector<std::byte> body = encode(message);
  if (body.size() > kMaxFrame)
    throw Error(Code::internal, cat("frame of ", body.size(), " bytes is over the limit of ", kMaxFrame));
  send_block(fd, body);
}

Message receive_frame(int fd) {
  return decode(receive_block(fd, kMaxFrame));
}

}  // namespace glm53::wire
