// Sampling, row by row: find where min-p, top-k and top-p cut, then walk the cumulative probabilities of what is left, in vocabulary
// order, up to the row's uniform number. Nothing is sorted: cuts come from quickselect, in time linear in the vocabulary. Of equal
// logits the lower id is the better one.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "ops.h"
#include "scalar.h"
#include "work.h"

namespace twostroke {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Candidate {
  float logit, weight;  // weight = exp(logit - largest)
};

struct Row {
  float temperature;
  int64_t top_k;
  float top_p, min_p, uniform;
};

float largest_of(const float* logits, int64_t size) {
  float largest = kNothing;
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < size; ++i) largest = logits[i] > largest ? logits[i] : largest;
  return largest;
}

int64_t argmax_of(const float* logits, int64_t size) {
  const float* found = std::find(logits, logits + size, largest_of(logits, size));
  return found == logits + size ? 0 : found - logits;  // not found: all are NaN
}

// Where the filters cut: better logits than `logit` stay, and of those equal to it the first `num_equal`.
struct Cut {
  float logit;
  int64_t num_equal;
};

constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

// min-p, then top-k: k tokens stay, if min-p leaves so many.
Cut first_cut(const float* logits, int64_t size, float floor, int64_t k) {
  static thread_local std::vector<float> copy;
  if (k <= 0 || k >= size) return {floor, kAll};
  copy.assign(logits, logits + size);
  std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(), std::greater<float>());
  const float kth = copy[k - 1];
  if (kth < floor) return {floor, kAll};
  return {kth, k - int64_t(std::count_if(copy.begin(), copy.begin() + k, [&](float x) { return x > kth; }))};
}

// How many of equal weights it takes to reach `target`, at least one.
int64_t num_reaching(double weight, double target, int64_t num_equal) {
  int64_t count = 1;
  for (double mass = weight; mass < target && count < num_equal; ++count) mass += weight;
  return count;
}

// The fewest best candidates whose weights reach `target`: quickselect by mass.
Cut mass_cut(Candidate* begin, Candidate* end, double target) {
  Cut cut = {kNothing, kAll};
  while (begin < end) {
    const float pivot = begin[(end - begin) / 2].logit;
    Candidate* equal = std::partition(begin, end, [&](const Candidate& c) { return c.logit > pivot; });
    Candidate* below = std::partition(equal, end, [&](const Candidate& c) { return c.logit == pivot; });
    double above_mass = 0.0, equal_mass = 0.0;
    for (Candidate* c = begin; c < equal; ++c) above_mass += c->weight;
    for (Candidate* c = equal; c < below; ++c) equal_mass += c->weight;
    if (above_mass >= target) {
      end = equal;
      continue;
    }
    cut = {pivot, num_reaching(equal->weight, target - above_mass, below - equal)};
    if (above_mass + equal_mass >= target) break;
    target -= above_mass + equal_mass;
    begin = below;
  }
  return cut;
}

// top-p of what `cut` leaves.
Cut top_p_cut(const float* logits, int64_t size, float largest, const Cut& cut, float top_p) {
  static thread_local std::vector<Candidate> candidates;
  if (top_p >= 1.0f) return cut;
  candidates.clear();
  double total = 0.0;
  int64_t num_equal = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (logits[i] < cut.logit || logits[i] == kNothing) continue;
    if (logits[i] == cut.logit && ++num_equal > cut.num_equal) continue;
    candidates.push_back({logits[i], exp_nonpositive(logits[i] - largest)});
    total += candidates.back().weight;
  }
  // A target of 0 would keep nothing; the best token always stays.
  const double target = std::max(double(top_p) * total, double(std::numeric_limits<float>::min()));
  return mass_cut(candidates.data(), candidates.data() + candidates.size(), target);
}

// The first token at which the cumulative weight exceeds uniform * total.
int64_t draw(const float* weights, int64_t size, float uniform) {
  constexpr int64_t kRun = 256;
  static thread_local std::vector<double> runs;  // sums, so that the walk skips whole runs
  runs.clear();
  double total = 0.0;
  for (int64_t first = 0; first < size; first += kRun) {
    double sum = 0.0;
    const int64_t last = std::min(first + kRun, size);
#pragma omp simd reduction(+ : sum)
    for (int64_t i = first; i < last; ++i) sum += double(weights[i]);
    runs.push_back(sum);
    total += sum;
  }
  double left = double(uniform) * total;
  int64_t run = 0, token = 0;
  for (; run < int64_t(runs.size()) && runs[run] <= left; ++run) left -= runs[run];
  int64_t last_possible = 0;
  for (token = run * kRun; token < size; ++token) {
    if (weights[token] > 0.0f) last_possible = token;
    if (left < weights[token]) return token;
    left -= weights[token];
  }
  return last_possible;  // rounding moved the end of the last run by a hair
}

// Logits become weights, 0 for those that `cut` leaves out.
void weigh(float* logits, int64_t size, float largest, const Cut& cut) {
  const float threshold = cut.logit;
  if (cut.num_equal != kAll) {
    int64_t num_equal = 0;
#pragma omp simd reduction(+ : num_equal)
    for (int64_t i = 0; i < size; ++i) num_equal += logits[i] == threshold;
    for (int64_t i = size - 1; num_equal > cut.num_equal; --i) {
      if (logits[i] != threshold) continue;
      logits[i] = kNothing;
      --num_equal;
    }
  }
#pragma omp simd
  for (int64_t i = 0; i < size; ++i)
    logits[i] = logits[i] < threshold || logits[i] == kNothing ? 0.0f : exp_nonpositive(logits[i] - largest);
}

// Overwrites the logits.
int64_t sample_row(float* logits, int64_t size, const Row& row) {
  if (row.temperature == 0.0f) return argmax_of(logits, size);
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) logits[i] = logits[i] / row.temperature;
  const float largest = largest_of(logits, size);
  const Cut cut = first_cut(logits, size, largest + std::log(row.min_p), row.top_k);
  weigh(logits, size, largest, top_p_cut(logits, size, largest, cut, row.top_p));
  return draw(logits, size, row.uniform);
}

template <typename Body>
Tensor for_each_row(const Tensor& logits, const Body& body) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "logits must be [N, V] with contiguous rows");
  Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  float* data = logits.mutable_data_ptr<float>();
  int64_t* tokens = out.mutable_data_ptr<int64_t>();
  const int64_t stride = logits.stride(0);
  for_each_item(logits.size(0), [&](int64_t i) { tokens[i] = body(i, data + i * stride); });
  return out;
}

}  // namespace

Tensor argmax(const Tensor& logits) {
  return for_each_row(logits, [&](int64_t, float* row) { return argmax_of(row, logits.size(1)); });
}

Tensor sample(
    const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
    const Tensor& uniforms) {
  const float *temperatures = temperature.const_data_ptr<float>(), *top_ps = top_p.const_data_ptr<float>(),
              *min_ps = min_p.const_data_ptr<float>(), *u = uniforms.const_data_ptr<float>();
  const int64_t* top_ks = top_k.const_data_ptr<int64_t>();
  return for_each_row(logits, [&](int64_t i, float* row) {
    return sample_row(row, logits.size(1), {temperatures[i], top_ks[i], top_ps[i], min_ps[i], u[i]});
  });
}

}  // namespace twostroke
