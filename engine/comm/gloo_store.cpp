#include "engine/comm/gloo_store.h"

#include "common/bytes.h"
#include "common/error.h"
#include "common/strings.h"

namespace glm53 {
namespace {

using std::chrono::milliseconds;

// A question: u8 what, key, value (set) or u32 milliseconds (get). An answer: u8 ok, then value or reason.
enum class Ask : uint8_t { set = 1, get = 2, done = 3 };

std::string to_text(const std::vector<char>& v) {
  return {v.begin(), v.end()};
}
std::vector<char> to_value(const std::string& s) {
  return {s.begin(), s.end()};
}

}  // namespace

void KeyTable::set(const std::string& key, std::vector<char> value) {
  const std::lock_guard lock(mutex_);
  values_[key] = std::move(value);
  changed_.notify_all();
}

std::vector<char> KeyTable::get(const std::string& key, milliseconds timeout) {
  std::unique_lock lock(mutex_);
  const bool found = changed_.wait_for(lock, timeout, [&] { return !failure_.empty() || values_.contains(key); });
  if (!failure_.empty()) throw Error(Code::fabric, failure_);
  if (!found) throw Error(Code::fabric, cat("no rank gave '", key, "' within ", timeout.count(), " ms"));
  return values_[key];
}

void KeyTable::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  failure_ = why;
  changed_.notify_all();
}

ServingStore::ServingStore(std::span<ControlLink* const> links, milliseconds timeout)
    : links_(links.begin(), links.end()), timeout_(timeout) {
  for (ControlLink* link : links_) threads_.emplace_back([this, link] { serve(*link); });
}

ServingStore::~ServingStore() {
  if (!finished_) {
    table_.fail("rank 0 gave up");
    for (ControlLink* link : links_) link->close();
  }
  join();
}

void ServingStore::serve(ControlLink& link) {
  try {
    for (;;) {
      const std::vector<std::byte> question = link.receive();
      ByteReader r(question);
      const auto ask = r.get<Ask>();
      ByteWriter answer;
      if (ask == Ask::set) {
        const std::string key = r.get_string();
        table_.set(key, to_value(r.get_string()));
        answer.put(uint8_t{1});
      } else if (ask == Ask::get) {
        const std::string key = r.get_string();
        const milliseconds limit = std::min(timeout_, milliseconds(r.get<uint32_t>()));
        try {
          const std::string value = to_text(table_.get(key, limit));
          answer.put(uint8_t{1});
          answer.put(value);
        } catch (const Error& e) {
          answer.put(uint8_t{0});
          answer.put(std::string(e.what()));
        }
      } else if (ask == Ask::done) {
        answer.put(uint8_t{1});
      } else {
        throw Error(Code::corrupt, "unknown question to the rendezvous store");
      }
      link.send(answer.take());
      if (ask == Ask::done) return;
    }
  } catch (const std::exception& e) {
    table_.fail(e.what());
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = e.what();
  }
}

void ServingStore::join() noexcept {
  for (std::thread& t : threads_)
    if (t.joinable()) t.join();
}

void ServingStore::finish() {
  join();
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) throw Error(Code::peer_lost, failure_);
  finished_ = true;
}

void ServingStore::set(const std::string& key, const std::vector<char>& data) {
  table_.set(key, data);
}
std::vector<char> ServingStore::get(const std::string& key) {
  return table_.get(key, timeout_);
}
void ServingStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}
void ServingStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  for (const std::string& key : keys) table_.get(key, timeout);
}

namespace {

std::vector<char> ask_rank0(ControlLink& link, ByteWriter question, bool has_value) {
  link.send(question.take());
  const std::vector<std::byte> answer = link.receive();
  ByteReader r(answer);
  if (r.get<uint8_t>() != 1) throw Error(Code::fabric, r.get_string());
  std::vector<char> value;
  if (has_value) value = to_value(r.get_string());
  r.finish();
  return value;
}

std::vector<char> ask_get(ControlLink& link, const std::string& key, milliseconds timeout) {
  ByteWriter w;
  w.put(Ask::get);
  w.put(key);
  w.put(static_cast<uint32_t>(std::max<int64_t>(timeout.count(), 0)));
  return ask_rank0(link, std::move(w), true);
}

}  // namespace

void AskingStore::set(const std::string& key, const std::vector<char>& data) {
  ByteWriter w;
  w.put(Ask::set);
  w.put(key);
  w.put(to_text(data));
  ask_rank0(link_, std::move(w), false);
}

std::vector<char> AskingStore::get(const std::string& key) {
  return ask_get(link_, key, timeout_);
}
void AskingStore::wait(const std::vector<std::string>& keys) {
  wait(keys, timeout_);
}
void AskingStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  for (const std::string& key : keys) ask_get(link_, key, timeout);
}

void AskingStore::finish() {
  ByteWriter w;
  w.put(Ask::done);
  ask_rank0(link_, std::move(w), false);
}

}  // namespace glm53
