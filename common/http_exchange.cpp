#include <boost/asio/post.hpp>

#include "common/error.h"
#include "common/http_session.h"
#include "common/log.h"
#include "common/strings.h"

namespace glm53::http {

HttpResponse Context::describe(const HttpRequest& request, const std::exception& e) const noexcept {
  try {
    if (options.on_error) return options.on_error(request, e);
    return default_error(e);
  } catch (...) {  // the description itself failed: a bare 500 is still an answer
    HttpResponse bare;
    bare.status = 500;
    return bare;
  }
}

Exchange::Exchange(std::shared_ptr<Context> context, std::weak_ptr<Session> session)
    : context_(std::move(context)), session_(std::move(session)) {}

void Exchange::queue(std::string piece) {
  if (piece.empty()) return;
  queued_ += piece.size();
  pieces_.push_back(std::move(piece));
}

void Exchange::schedule() {
  if (scheduled_) return;
  scheduled_ = true;
  if (const auto session = session_.lock()) session->post_flush();
}

bool Exchange::send(HttpResponse response) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::waiting) return false;
  keep_alive = keep_alive && !context_->stopping;
  status_ = response.status;
  const bool bodyless = response.status == 204 || response.status == 304 || response.status < 200;
  Head head;
  head.status = response.status;
  head.http11 = http11;
  head.keep_alive = keep_alive;
  head.has_length = !bodyless;
  head.length = response.body.size();
  if (!bodyless) head.content_type = response.content_type;
  queue(format_head(head, response.headers));
  if (!bodyless && !head_only) queue(std::move(response.body));
  phase_ = Phase::finished;
  schedule();
  return true;
}

bool Exchange::start_stream(int status, std::string_view content_type,
                            const std::vector<std::pair<std::string, std::string>>& headers) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::waiting) return false;
  // HTTP/1.0 has no chunks: there the end of the connection ends the body.
  keep_alive = keep_alive && http11 && !context_->stopping;
  status_ = status;
  Head head;
  head.status = status;
  head.http11 = http11;
  head.keep_alive = keep_alive;
  head.chunked = http11;
  head.content_type = content_type;
  queue(format_head(head, headers));
  phase_ = Phase::streaming;
  schedule();
  return true;
}

bool Exchange::write(std::string_view chunk) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::streaming || overflowed_) return false;
  if (queued_ > context_->options.max_backlog) {
    overflowed_ = true;
    schedule();
    return false;
  }
  if (chunk.empty() || head_only) return true;
  queue(http11 ? frame_chunk(chunk) : std::string(chunk));
  schedule();
  return true;
}

void Exchange::finish() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::streaming) return;
  if (http11 && !head_only) queue(std::string("0\r\n\r\n"));
  phase_ = Phase::finished;
  schedule();
}

bool Exchange::connected() const {
  const std::lock_guard lock(mutex_);
  return !overflowed_ && (phase_ == Phase::waiting || phase_ == Phase::streaming);
}

void Exchange::on_disconnect(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    // The one replaced, or the one that will never be needed, is destroyed after the lock: it may own the last reply.
    if (phase_ != Phase::gone) {
      if (phase_ != Phase::finished) disconnect_.swap(callback);
      return;
    }
  }
  if (context_->stopped) return callback();
  boost::asio::post(context_->io, [callback = std::move(callback)] {
    try {
      callback();
    } catch (const std::exception& e) {
      log::error(cat("disconnect handler: ", std::string_view(e.what())));
    }
  });
}

void Exchange::abandon() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::waiting && phase_ != Phase::streaming) return;
  abandoned_ = true;
  schedule();
}

Exchange::Output Exchange::take_output() {
  const std::lock_guard lock(mutex_);
  scheduled_ = false;
  Output out;
  out.pieces.swap(pieces_);
  out.finished = phase_ == Phase::finished;
  out.abandoned = abandoned_ && !out.finished;
  out.overflowed = overflowed_;
  out.keep_alive = keep_alive;
  return out;
}

void Exchange::written(size_t bytes) {
  const std::lock_guard lock(mutex_);
  queued_ -= std::min(queued_, bytes);
}

std::function<void()> Exchange::end(bool client_left) {
  std::function<void()> callback;
  bool incomplete = false;
  {
    const std::lock_guard lock(mutex_);
    callback.swap(disconnect_);
    incomplete = phase_ == Phase::waiting || phase_ == Phase::streaming;
    if (incomplete) phase_ = Phase::gone;
    pieces_.clear();
    queued_ = 0;
  }
  if (!client_left || !incomplete) return nullptr;
  return callback;
}

bool Exchange::finished() const {
  const std::lock_guard lock(mutex_);
  return phase_ == Phase::finished;
}

int Exchange::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

}  // namespace glm53::http
