#include "engine/runtime/api_link.h"

#include <chrono>

#include <sys/socket.h>

#include "common/error.h"
#include "common/log.h"
#include "common/socket.h"
#include "common/strings.h"

namespace glm53 {
namespace {

constexpr std::chrono::milliseconds kReconnect{200};
constexpr size_t kMaxQueue = 200000;

}  // namespace

ApiLink::ApiLink(std::string socket, wire::Hello hello, std::function<void(ApiEvent)> on_event)
    : socket_(std::move(socket)), hello_(std::move(hello)), on_event_(std::move(on_event)) {
  reader_ = std::thread([this] { read_loop(); });
  writer_ = std::thread([this] { write_loop(); });
}

ApiLink::~ApiLink() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    if (fd_) ::shutdown(fd_->get(), SHUT_RDWR);
  }
  changed_.notify_all();
  reader_.join();
  writer_.join();
}

void ApiLink::send(uint64_t connection, wire::Message message) {
  const std::lock_guard lock(mutex_);
  if (!fd_ || connection != connection_) return;
  if (queue_.size() >= kMaxQueue) {
    log::error(cat("the API process has not read ", kMaxQueue, " messages: disconnected"));
    ::shutdown(fd_->get(), SHUT_RDWR);
    return;
  }
  queue_.push_back(std::move(message));
  changed_.notify_all();
}

void ApiLink::flush(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, limit, [&] { return !fd_ || (queue_.empty() && !writing_); });
}

void ApiLink::read_loop() {
  bool told = false;
  for (;;) {
    try {
      const auto fd = std::make_shared<UniqueFd>(connect_unix(socket_));
      told = false;
      serve_connection(fd);
    } catch (const std::exception& e) {
      if (!told) log::info(cat("waiting for the API process: ", std::string(e.what())));
      told = true;
    }
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, kReconnect, [&] { return stop_; })) return;
  }
}

void ApiLink::serve_connection(const std::shared_ptr<UniqueFd>& fd) {
  wire::send_frame(fd->get(), hello_);
  uint64_t connection = 0;
  {
    const std::lock_guard lock(mutex_);
    if (stop_) return;
    fd_ = fd;
    connection = ++connection_;
    queue_.clear();
  }
  log::info("connected to the API process");
  on_event_(ApiConnected{connection});
  try {
    for (;;) on_event_(ApiMessage{connection, wire::receive_frame(fd->get())});
  } catch (const std::exception& e) {
    log::warn(cat("connection to the API process ended: ", std::string(e.what())));
  }
  drop(fd);
  on_event_(ApiLost{connection});
}

void ApiLink::drop(const std::shared_ptr<UniqueFd>& fd) {
  const std::lock_guard lock(mutex_);
  ::shutdown(fd->get(), SHUT_RDWR);
  if (fd_ == fd) fd_.reset();
  queue_.clear();
  changed_.notify_all();
}

void ApiLink::write_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (fd_ && !queue_.empty()); });
    if (stop_) return;
    const std::shared_ptr<UniqueFd> fd = fd_;
    const wire::Message message = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    lock.unlock();
    try {
      wire::send_frame(fd->get(), message);
    } catch (const std::exception&) {
      ::shutdown(fd->get(), SHUT_RDWR);  // the reader notices and connects again
    }
    lock.lock();
    writing_ = false;
    changed_.notify_all();
  }
}

}  // namespace glm53
