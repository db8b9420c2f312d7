#include "agent/hub/transport.h"

#include <algorithm>
#include <array>
#include <deque>
#include <strings.h>

#include <curl/curl.h>

#include "agent/hub/client.h"
#include "common/error.h"
#include "common/strings.h"
#include "common/version.h"

namespace glm53::hub {
namespace {

constexpr size_t kMaxHeaders = size_t{256} << 10;

struct FreeEasy {
  void operator()(CURL* easy) const { curl_easy_cleanup(easy); }
};
struct FreeList {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};

/// libcurl's own set-up, once a process.
class Library {
 public:
  Library() : ok_(curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK) {}
  ~Library() { curl_global_cleanup(); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;
  static void ensure() {
    static const Library library;
    if (!library.ok_) throw Error(Code::internal, "libcurl cannot be set up");
  }

 private:
  bool ok_;
};

template <class T>
void set(CURL* easy, CURLoption option, T value) {
  if (const CURLcode code = curl_easy_setopt(easy, option, value); code != CURLE_OK) {
    throw Error(Code::internal, cat("libcurl option ", static_cast<int>(option), ": ", curl_easy_strerror(code)));
  }
}

void append(std::unique_ptr<curl_slist, FreeList>& list, const std::string& line) {
  curl_slist* const longer = curl_slist_append(list.get(), line.c_str());
  if (longer == nullptr) throw Error(Code::memory, "curl: out of memory");
  (void)list.release();  // the list's first element is part of the longer one
  list.reset(longer);
}

/// One easy handle and what its callbacks need.
struct Job {
  std::shared_ptr<Transfer> transfer;
  std::unique_ptr<CURL, FreeEasy> easy;
  std::unique_ptr<curl_slist, FreeList> headers;
  std::array<char, CURL_ERROR_SIZE> error{};
  size_t header_bytes = 0;
  bool head_seen = false, paused = false;
  Clock::time_point started = Clock::now(), window = started;
  int64_t window_bytes = 0;
};

void see_head(Job& job) {
  if (job.head_seen) return;
  job.head_seen = true;
  long status = 0;
  if (curl_easy_getinfo(job.easy.get(), CURLINFO_RESPONSE_CODE, &status) != CURLE_OK) status = 0;
  job.transfer->head.status = static_cast<int>(status);
  job.window = Clock::now();
  if (job.transfer->on_head) job.transfer->on_head(job.transfer->head);
}

size_t on_header(char* data, size_t size, size_t count, void* user) {
  Job& job = *static_cast<Job*>(user);
  const size_t n = size * count;
  try {
    const std::string_view line = trim(std::string_view(data, n));
    job.header_bytes += n;
    if (job.header_bytes > kMaxHeaders) throw Error(Code::corrupt, "hub: the head of an answer is too large");
    auto& headers = job.transfer->head.headers;
    if (line.starts_with("HTTP/")) {
      headers.clear();
    } else if (const size_t colon = line.find(':'); colon != std::string_view::npos) {
      headers.emplace_back(line.substr(0, colon), trim(line.substr(colon + 1)));
    }
    return n;
  } catch (...) {
    job.transfer->failed = std::current_exception();
    return 0;
  }
}

size_t on_body(char* data, size_t size, size_t count, void* user) {
  Job& job = *static_cast<Job*>(user);
  const size_t n = size * count;
  try {
    see_head(job);
    if (job.transfer->limit != nullptr && !job.transfer->limit->take(static_cast<int64_t>(n))) {
      job.paused = true;
      return CURL_WRITEFUNC_PAUSE;
    }
    job.window_bytes += static_cast<int64_t>(n);
    if (job.transfer->on_body) job.transfer->on_body({data, n});
    return n;
  } catch (...) {
    job.transfer->failed = std::current_exception();
    return 0;
  }
}

/// Certificates, names and proxies are the environment's: another repository would not help, and the remedy differs.
HubError explain(CURLcode code, const Job& job) {
  const std::string host = job.transfer->request.url.authority();
  const std::string detail = job.error[0] != '\0' ? std::string(job.error.data()) : curl_easy_strerror(code);
  switch (code) {
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
      return {Action::give_up,
              Error(Code::unavailable, cat("E630 hub: the certificate of ", host, " is not trusted: ", detail),
                    "if a proxy of yours signs it, set hub.ca_file to its certificate")};
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
      return {Action::retry, Error(Code::unavailable, cat("E631 hub: ", host, " cannot be found: ", detail),
                                   "check the name server, and https_proxy if you need a proxy")};
    default:
      return {Action::retry, Error(Code::unavailable, cat("E632 hub: ", host, ": ", detail))};
  }
}

}  // namespace

bool RateLimit::take(int64_t n) {
  if (rate_ <= 0) return true;
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  const auto rate = static_cast<double>(rate_);
  // At most a tenth of a second is saved up, so that a pause is not followed by a burst.
  budget_ = std::min(budget_ + rate * std::chrono::duration<double>(now - last_).count(), rate / 10);
  last_ = now;
  if (budget_ < 0) return false;
  budget_ -= static_cast<double>(n);
  return true;
}

void throw_cancelled() {
  throw Error(Code::cancelled, "the download was interrupted", "run it again: it goes on where it stopped");
}

std::string_view Head::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key.size() == name.size() && ::strncasecmp(key.data(), name.data(), name.size()) == 0) return value;
  }
  return {};
}

struct Transport::Impl {
  struct FreeMulti {
    void operator()(CURLM* handle) const { curl_multi_cleanup(handle); }
  };
  std::unique_ptr<CURLM, FreeMulti> multi;
  std::list<Job> jobs;

  void check(CURLMcode code) const {
    if (code != CURLM_OK) throw Error(Code::internal, cat("libcurl: ", curl_multi_strerror(code)));
  }
  std::shared_ptr<Transfer> take(std::list<Job>::iterator job) {
    check(curl_multi_remove_handle(multi.get(), job->easy.get()));
    auto transfer = std::move(job->transfer);
    jobs.erase(job);
    return transfer;
  }
};

Transport::Transport(TransportOptions options) : options_(std::move(options)), impl_(std::make_unique<Impl>()) {
  Library::ensure();
  impl_->multi.reset(curl_multi_init());
  if (!impl_->multi) throw Error(Code::memory, "curl: out of memory");
}

Transport::~Transport() {
  for (Job& job : impl_->jobs) curl_multi_remove_handle(impl_->multi.get(), job.easy.get());
}

void Transport::clear() {
  while (!impl_->jobs.empty()) impl_->take(impl_->jobs.begin());
}

size_t Transport::active() const {
  return impl_->jobs.size();
}

void Transport::start(std::shared_ptr<Transfer> transfer) {
  Job& job = impl_->jobs.emplace_back();
  try {
    job.transfer = std::move(transfer);
    job.easy.reset(curl_easy_init());
    if (!job.easy) throw Error(Code::memory, "curl: out of memory");
    CURL* const easy = job.easy.get();
    const Request& request = job.transfer->request;
    set(easy, CURLOPT_URL, request.url.full.c_str());
    set(easy, CURLOPT_PROTOCOLS_STR, "http,https");
    set(easy, CURLOPT_NOSIGNAL, 1L);
    set(easy, CURLOPT_FOLLOWLOCATION, 0L);
    // Own windows a connection: with HTTP/2 the segments would share one.
    set(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    set(easy, CURLOPT_USERAGENT, cat("glm53/", version()).c_str());
    set(easy, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.connect_timeout.count()));
    set(easy, CURLOPT_BUFFERSIZE, 512L * 1024);
    set(easy, CURLOPT_HEADEROPT, static_cast<long>(CURLHEADER_SEPARATE));  // no token to a proxy
    set(easy, CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
    set(easy, CURLOPT_ERRORBUFFER, job.error.data());
    if (!options_.ca_file.empty()) set(easy, CURLOPT_CAINFO, options_.ca_file.c_str());
    if (request.method == "HEAD") set(easy, CURLOPT_NOBODY, 1L);
    // Otherwise sizes would be those of the compressed body.
    append(job.headers, "Accept-Encoding: identity");
    if (!request.token.empty()) append(job.headers, "Authorization: Bearer " + request.token);
    if (request.range) append(job.headers, cat("Range: bytes=", request.range->first, "-", request.range->second));
    if (!request.if_range.empty()) append(job.headers, "If-Range: " + request.if_range);
    for (const std::string& header : request.headers) append(job.headers, header);
    set(easy, CURLOPT_HTTPHEADER, job.headers.get());
    set(easy, CURLOPT_HEADERFUNCTION, &on_header);
    set(easy, CURLOPT_HEADERDATA, static_cast<void*>(&job));
    set(easy, CURLOPT_WRITEFUNCTION, &on_body);
    set(easy, CURLOPT_WRITEDATA, static_cast<void*>(&job));
    impl_->check(curl_multi_add_handle(impl_->multi.get(), easy));
  } catch (...) {
    impl_->jobs.pop_back();
    throw;
  }
}

std::shared_ptr<Transfer> Transport::wait(Millis wait) {
  const auto deadline = Clock::now() + wait;
  while (true) {
    int running = 0;
    impl_->check(curl_multi_perform(impl_->multi.get(), &running));
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(impl_->multi.get(), &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      const CURLcode code = message->data.result;
      const auto job = std::find_if(impl_->jobs.begin(), impl_->jobs.end(),
                                    [&](const Job& j) { return j.easy.get() == message->easy_handle; });
      if (job == impl_->jobs.end()) continue;
      Transfer& transfer = *job->transfer;
      try {
        // An answer without a body has had no chance to be judged.
        if (code == CURLE_OK) see_head(*job);
        if (!transfer.failed && code != CURLE_OK) throw explain(code, *job);
      } catch (...) {
        if (!transfer.failed) transfer.failed = std::current_exception();
      }
      return impl_->take(job);
    }
    const auto now = Clock::now();
    bool any_paused = false;
    for (auto job = impl_->jobs.begin(); job != impl_->jobs.end(); ++job) {
      if (job->paused) {
        any_paused = true;
        job->window = now;
        job->window_bytes = 0;
        job->paused = false;
        // May call the write function at once, which may pause again.
        (void)curl_easy_pause(job->easy.get(), CURLPAUSE_CONT);
        continue;
      }
      const bool first = !job->head_seen;
      const Millis limit = first ? options_.connect_timeout + options_.first_byte_timeout : options_.stall_window;
      if (now - job->window < limit) continue;
      if (!first && job->window_bytes >= options_.stall_bytes) {
        job->window = now;
        job->window_bytes = 0;
        continue;
      }
      const std::string host = job->transfer->request.url.authority();
      job->transfer->failed = std::make_exception_ptr(
          Error(Code::stalled,
                first ? cat("E633 hub: ", host, " did not answer within ", limit.count(), " ms")
                      : cat("E634 hub: ", host, " sent ", job->window_bytes, " bytes in ", limit.count(), " ms")));
      return impl_->take(job);
    }
    if (now >= deadline || cancelled()) return nullptr;
    const auto rest = std::chrono::duration_cast<Millis>(deadline - now).count() + 1;
    impl_->check(curl_multi_poll(impl_->multi.get(), nullptr, 0,
                                 static_cast<int>(std::min<int64_t>(rest, any_paused ? 10 : 100)), nullptr));
  }
}

Response Transport::request(const Request& request, size_t max_body) {
  Response response;
  const auto transfer = std::make_shared<Transfer>();
  transfer->request = request;
  transfer->on_body = [&](std::string_view data) {
    if (response.body.size() + data.size() > max_body) {
      throw Error(Code::corrupt,
                  cat("hub: the answer of ", request.url.shown(), " is larger than ", max_body, " bytes"));
    }
    response.body.append(data);
  };
  start(transfer);
  try {
    while (!wait(Millis(1000))) {
      if (cancelled()) throw_cancelled();
    }
  } catch (...) {
    clear();
    throw;
  }
  if (transfer->failed) std::rethrow_exception(transfer->failed);
  response.head = std::move(transfer->head);
  return response;
}

}  // namespace glm53::hub
