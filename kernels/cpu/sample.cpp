// Sampling (frontend §6): masks, bias, penalties, then greedy or the inverse CDF of what the filters leave.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/check.h"
#include "kernels/cpu/cpu_ops.h"

namespace glm53::cpu {

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr float kHuge = std::numeric_limits<float>::max();

/// NaN is never chosen; +inf becomes the largest finite number, so that differences stay numbers.
float tame(float z) {
  return std::isnan(z) ? kNever : std::min(z, kHuge);
}

/// Descending value, ties to the lower id: the order of every choice below.
struct Better {
  const float* value;
  bool operator()(int32_t a, int32_t b) const { return value[a] != value[b] ? value[a] > value[b] : a < b; }
};

/// Ids in Better order, sorted only as far as somebody looks.
class Ranking {
 public:
  Ranking(int32_t* ids, int64_t n, Better better) : ids_(ids), n_(n), better_(better) {}
  int32_t at(int64_t i) {
    while (i >= sorted_) extend();
    return ids_[i];
  }

 private:
  void extend() {
    const int64_t next = std::min(n_, std::max<int64_t>(64, sorted_ * 8));
    if (next < n_) std::nth_element(ids_ + sorted_, ids_ + next, ids_ + n_, better_);
    std::sort(ids_ + sorted_, ids_ + next, better_);
    sorted_ = next;
  }

  int32_t* ids_;
  int64_t n_, sorted_ = 0;
  Better better_;
};

/// Scratch of one row: [vocab] each.
struct RowMemory {
  float *raw, *p;
  int32_t *ids, *order;
};

class RowSampler {
 public:
  RowSampler(float* z, int32_t vocab, const SampleRow& row, const RowMemory& memory)
      : z_(z), vocab_(vocab), row_(row), m_(memory) {}

  void run(int text_vocab, SampleOut& out) {
    out = {.token = -1, .logprob = kNever, .top = std::move(out.top)};
    out.top.clear();
    mask(text_vocab);
    std::copy_n(z_, vocab_, m_.raw);
    const double log_sum = log_sum_exp();
    list_best(log_sum, out);
    edit();
    const int32_t best = argmax();
    if (best < 0) return;
    out.token = row_.temperature > 0 ? draw(z_[best]) : best;
    out.logprob = static_cast<float>(m_.raw[out.token] - log_sum);
  }

 private:
  /// Step 1: tokens without text and the structured-output mask.
  void mask(int text_vocab) {
    for (int32_t i = 0; i < vocab_; ++i) z_[i] = i < text_vocab && allowed(i) ? tame(z_[i]) : kNever;
  }

  bool allowed(int32_t id) const {
    const auto word = static_cast<size_t>(id) / 32;
    return row_.allowed.empty() || (word < row_.allowed.size() && ((row_.allowed[word] >> (id & 31)) & 1u) != 0);
  }

  /// −1 when nothing is left.
  int32_t argmax() const {
    int32_t best = -1;
    for (int32_t i = 0; i < vocab_; ++i) {
      if (z_[i] > (best < 0 ? kNever : z_[best])) best = i;
    }
    return best;
  }

  double log_sum_exp() const {
    const int32_t best = argmax();
    if (best < 0) return 0;
    double total = 0;
    for (int32_t i = 0; i < vocab_; ++i) total += static_cast<double>(std::exp(z_[i] - z_[best]));
    return static_cast<double>(z_[best]) + std::log(total);
  }

  void list_best(double log_sum, SampleOut& out) {
    if (row_.top_logprobs <= 0) return;
    int64_t n = 0;
    for (int32_t i = 0; i < vocab_; ++i) {
      if (z_[i] > kNever) m_.ids[n++] = i;
    }
    const int64_t wanted = std::min<int64_t>(n, row_.top_logprobs);
    std::partial_sort(m_.ids, m_.ids + wanted, m_.ids + n, Better{z_});
    for (int64_t i = 0; i < wanted; ++i) {
      out.top.emplace_back(m_.ids[i], static_cast<float>(z_[m_.ids[i]] - log_sum));
    }
  }

  /// Steps 2 and 3: banned tokens, bias, penalties. Unknown ids are passed over.
  void edit() {
    const auto known = [this](int32_t id) { return id >= 0 && id < vocab_; };
    for (const int32_t id : row_.banned) {
      if (known(id)) z_[id] = kNever;
    }
    for (const auto& [id, bias] : row_.bias) {
      if (known(id)) z_[id] = tame(z_[id] + bias);
    }
    for (const auto& [id, times] : row_.seen) {
      if (!known(id)) continue;
      float z = z_[id];
      if (row_.repetition > 0) z = z > 0 ? z / row_.repetition : z * row_.repetition;
      if (times > 0) z = z - row_.frequency * static_cast<float>(times) - row_.presence;
      z_[id] = tame(z);
    }
  }

  /// Steps 5 to 9. Probabilities are relative to the best token's, so that only ratios matter.
  int32_t draw(float top) {
    const float temperature = std::min(row_.temperature, kHuge);
    const float least = std::isnan(row_.min_p) ? 0.0f : std::min(row_.min_p, 1.0f);
    int64_t n = 0;
    for (int32_t i = 0; i < vocab_; ++i) {
      m_.p[i] = std::exp((z_[i] - top) / temperature);
      if (m_.p[i] > 0 && m_.p[i] >= least) m_.ids[n++] = i;
    }
    n = keep_top_k(n);
    double mass = 0;
    for (int64_t i = 0; i < n; ++i) mass += static_cast<double>(m_.p[m_.ids[i]]);
    Ranking ranking(m_.ids, n, Better{z_});
    if (row_.top_p < 1) mass = keep_top_p(ranking, mass, n);
    const double u = row_.u >= 0 ? row_.u : 0.0;
    const double target = u * mass;
    double cumulative = 0;
    for (int64_t i = 0; i < n; ++i) {
      cumulative += static_cast<double>(m_.p[ranking.at(i)]);
      if (cumulative > target) return ranking.at(i);
    }
    return ranking.at(n - 1);
  }

  /// Keeps the ids (in id order) whose logit is at least the k-th largest; all ties of it stay.
  int64_t keep_top_k(int64_t n) {
    const int64_t k = row_.top_k;
    if (k <= 0 || k >= n) return n;
    std::copy_n(m_.ids, n, m_.order);
    std::nth_element(m_.order, m_.order + (k - 1), m_.order + n, Better{z_});
    const float least = z_[m_.order[k - 1]];
    return std::remove_if(m_.ids, m_.ids + n, [&](int32_t id) { return z_[id] < least; }) - m_.ids;
  }

  /// Shortest prefix that reaches top_p of the mass, at least one token; returns its mass and sets n.
  double keep_top_p(Ranking& ranking, double mass, int64_t& n) const {
    const double wanted = static_cast<double>(row_.top_p) * mass;
    double cumulative = 0;
    for (int64_t i = 0; i < n; ++i) {
      cumulative += static_cast<double>(m_.p[ranking.at(i)]);
      if (cumulative >= wanted) {
        n = i + 1;
        break;
      }
    }
    return cumulative;
  }

  float* z_;
  int32_t vocab_;
  const SampleRow& row_;
  RowMemory m_;
};

}  // namespace

void CpuOps::sample(const SampleArgs& args) {
  expect("sample", "logits", args.logits, Dtype::f32, {-1, -1});
  const auto rows = static_cast<int64_t>(args.rows.size());
  expect_that(rows == static_cast<int64_t>(args.out.size()), "sample", "rows and out must have one entry a row");
  expect_that(rows <= args.logits.dim(0), "sample", "more rows than logits");
  expect_that(args.logits.dim(1) <= std::numeric_limits<int32_t>::max(), "sample", "vocabulary too large");
  const auto vocab = static_cast<size_t>(args.logits.dim(1));
  pool().parallel_for_worker(rows, 1, [&](int worker, int64_t begin, int64_t end) {
    float* memory = worker_scratch(worker).get<float>(4 * vocab);
    auto* ids = reinterpret_cast<int32_t*>(memory + 2 * vocab);
    const RowMemory of_row{memory, memory + vocab, ids, ids + vocab};
    for (int64_t r = begin; r < end; ++r) {
      RowSampler(args.logits.as<float>() + r * args.logits.stride[0], static_cast<int32_t>(vocab),
                 args.rows[static_cast<size_t>(r)], of_row)
          .run(args.text_vocab, args.out[static_cast<size_t>(r)]);
    }
  });
}

}  // namespace glm53::cpu
