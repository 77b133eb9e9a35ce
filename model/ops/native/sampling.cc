#include "sampling.h"

#include <algorithm>
#include <limits>

#include "workspace.h"

namespace antiphon {

namespace {

constexpr int64_t kNucleusGuess = 64;   // tokens a nucleus is first expected within
constexpr float kSteepest = 1e30f;      // of inverse temperatures: 0 times infinity would not be 0

bool IsLikelier(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}
bool HasLowerId(const Candidate& a, const Candidate& b) { return a.id < b.id; }

// A logit that at least `count` logits reach: the count-th largest of the chunks' maxima.
float Threshold(const LogitRow& row, int64_t count) {
  if (count > row.chunks) return -std::numeric_limits<float>::infinity();
  const Scratch<float> maxima(static_cast<size_t>(row.chunks));
  std::copy(row.chunk_largest, row.chunk_largest + row.chunks, maxima.data());
  std::nth_element(maxima.data(), maxima.data() + count - 1, maxima.data() + row.chunks, std::greater<float>());
  return maxima[static_cast<size_t>(count - 1)];
}

// The likeliest tokens of a row; `size` of them, in no order.
class Shortlist {
 public:
  Shortlist(const Kernels& kernels, const LogitRow& row, int64_t count) : entries_(static_cast<size_t>(row.vocab)) {
    const Scratch<int32_t> ids(static_cast<size_t>(row.vocab));
    const int64_t found = kernels.at_least(row.logits, row.vocab, Threshold(row, count), ids.data(), row.vocab);
    for (int64_t index = 0; index < found; ++index) {
      const int32_t id = ids[static_cast<size_t>(index)];
      entries_[static_cast<size_t>(index)] = {row.logits[id], id};
    }
    size_ = std::min(count, found);
    if (size_ < found) std::nth_element(begin(), begin() + size_, begin() + found, IsLikelier);
  }

  Candidate* begin() const { return entries_.data(); }
  Candidate* end() const { return begin() + size_; }
  int64_t size() const { return size_; }
  void Truncate(int64_t size) { size_ = size; }

 private:
  Scratch<Candidate> entries_;
  int64_t size_ = 0;
};

float InverseTemperature(float temperature) { return std::min(1.0f / temperature, kSteepest); }

// Weights of the shortlist, in its order.
void Weigh(const Kernels& kernels, const LogitRow& row, const Shortlist& list, float inverse, float* weights) {
  std::transform(list.begin(), list.end(), weights, [](const Candidate& candidate) { return candidate.logit; });
  kernels.boltzmann(weights, list.size(), row.largest, inverse, weights);
}

// First index whose cumulative weight passes `uniform` of the total; never one of weight 0.
int64_t Invert(const float* weights, int64_t count, double uniform) {
  double total = 0;
  int64_t last = 0;
  for (int64_t index = 0; index < count; ++index) {
    total += static_cast<double>(weights[index]);
    if (weights[index] > 0) last = index;
  }
  const double point = uniform * total;
  double passed = 0;
  for (int64_t index = 0; index < last; ++index) {
    passed += static_cast<double>(weights[index]);
    if (passed > point) return index;
  }
  return last;
}

int64_t Draw(const Kernels& kernels, const LogitRow& row, Shortlist& list, float inverse, double uniform) {
  std::sort(list.begin(), list.end(), HasLowerId);
  const Scratch<float> weights(static_cast<size_t>(list.size()));
  Weigh(kernels, row, list, inverse, weights.data());
  return list.begin()[Invert(weights.data(), list.size(), uniform)].id;
}

double Sum(const float* weights, int64_t count) {
  double sum = 0;
  for (int64_t index = 0; index < count; ++index) sum += static_cast<double>(weights[index]);
  return sum;
}

// Probability mass, unnormalised, of the top_k likeliest tokens.
double MassOf(const Kernels& kernels, const LogitRow& row, int64_t top_k, float inverse) {
  const Scratch<float> weights(static_cast<size_t>(row.vocab));
  if (top_k == row.vocab) {
    kernels.boltzmann(row.logits, row.vocab, row.largest, inverse, weights.data());
    return Sum(weights.data(), row.vocab);
  }
  const Shortlist list(kernels, row, top_k);
  Weigh(kernels, row, list, inverse, weights.data());
  return Sum(weights.data(), list.size());
}

// Sorts the list, best first, and says how many of it reach `mass`; 0 where all together do not.
int64_t NucleusSize(const Kernels& kernels, const LogitRow& row, const Shortlist& list, float inverse, double mass) {
  std::sort(list.begin(), list.end(), IsLikelier);
  const Scratch<float> weights(static_cast<size_t>(list.size()));
  Weigh(kernels, row, list, inverse, weights.data());
  double passed = 0;
  for (int64_t index = 0; index < list.size(); ++index) {
    passed += static_cast<double>(weights[static_cast<size_t>(index)]);
    if (passed >= mass) return index + 1;
  }
  return 0;
}

int64_t DrawFromNucleus(const Kernels& kernels, const LogitRow& row, const SamplingParams& params, int64_t top_k,
                        float inverse, double uniform) {
  const double mass = static_cast<double>(params.top_p) * MassOf(kernels, row, top_k, inverse);
  for (const int64_t guess : {std::min(kNucleusGuess, top_k), top_k}) {
    Shortlist list(kernels, row, guess);
    const int64_t size = NucleusSize(kernels, row, list, inverse, mass);
    if (size == 0 && guess < top_k) continue;
    list.Truncate(size == 0 ? list.size() : size);
    return Draw(kernels, row, list, inverse, uniform);
  }
  return 0;  // not reached: the second guess always returns
}

void Multiply64(uint64_t a, uint64_t b, uint64_t* high, uint64_t* low) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  *high = static_cast<uint64_t>(product >> 64);
  *low = static_cast<uint64_t>(product);
}

}  // namespace

double UniformAt(uint64_t seed, uint64_t position) {
  uint64_t counter[4] = {position + 1, position + 1 == 0 ? 1u : 0u, 0, 0};
  uint64_t key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    uint64_t high0, low0, high1, low1;
    Multiply64(0xD2E7470EE14C6C93u, counter[0], &high0, &low0);
    Multiply64(0xCA5A826395121157u, counter[2], &high1, &low1);
    const uint64_t next[4] = {high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0};
    std::copy(next, next + 4, counter);
    key[0] += 0x9E3779B97F4A7C15u;
    key[1] += 0xBB67AE8584CAA73Bu;
  }
  return static_cast<double>(counter[0] >> 11) * 0x1p-53;
}

int64_t SampleRow(const Kernels& kernels, const LogitRow& row, const SamplingParams& params, double uniform) {
  const float inverse = InverseTemperature(params.temperature);
  const int64_t top_k = params.top_k > 0 && params.top_k < row.vocab ? params.top_k : row.vocab;
  if (params.top_p < 1.0f) return DrawFromNucleus(kernels, row, params, top_k, inverse, uniform);
  if (top_k < row.vocab) {
    Shortlist list(kernels, row, top_k);
    return Draw(kernels, row, list, inverse, uniform);
  }
  const Scratch<float> weights(static_cast<size_t>(row.vocab));
  kernels.boltzmann(row.logits, row.vocab, row.largest, inverse, weights.data());
  return Invert(weights.data(), row.vocab, uniform);
}

void LikeliestTokens(const Kernels& kernels, const LogitRow& row, int64_t count, Candidate* out) {
  const Shortlist list(kernels, row, count);
  std::sort(list.begin(), list.end(), IsLikelier);
  std::copy(list.begin(), list.end(), out);
}

}  // namespace antiphon
