#include "sampling.h"

#include <algorithm>
#include <cmath>

namespace antiphon {

namespace {

constexpr int64_t kNucleusGuess = 64;  // tokens a nucleus is first expected within
// Bounds of inverse temperatures: 0 times infinity would not be 0, whichever of them a logit's distance is.
constexpr float kSteepest = 1e30f, kFlattest = 1e-37f;

float InverseTemperature(float temperature) { return std::clamp(1.0f / temperature, kFlattest, kSteepest); }

// Weights of the shortlist, in its order.
void Weigh(const Kernels& kernels, const ValueRow& row, const Shortlist& list, float inverse, float* weights) {
  std::transform(list.begin(), list.end(), weights, [](const Candidate& candidate) { return candidate.value; });
  kernels.boltzmann(weights, list.size(), row.largest, inverse, weights);
}

double Sum(const float* weights, int64_t count) {
  double sum = 0;
  for (int64_t index = 0; index < count; ++index) sum += static_cast<double>(weights[index]);
  return sum;
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

// Probability mass, unnormalised, of the top_k likeliest tokens.
double MassOf(const Kernels& kernels, const ValueRow& row, int64_t top_k, float inverse) {
  const Scratch<float> weights(static_cast<size_t>(row.vocab));
  if (top_k == row.vocab) {
    kernels.boltzmann(row.values, row.vocab, row.largest, inverse, weights.data());
    return Sum(weights.data(), row.vocab);
  }
  const Shortlist list(kernels, row, top_k);
  Weigh(kernels, row, list, inverse, weights.data());
  return Sum(weights.data(), list.size());
}

// Sorts the list, best first, and says how many of it reach `mass`; 0 where all together do not.
int64_t NucleusSize(const Kernels& kernels, const ValueRow& row, const Shortlist& list, float inverse, double mass) {
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

// The tokens that may be drawn, by rising id, and their weights: the likeliest one's is 1.
class Support {
 public:
  // After temperature, top-k and top-p: all three keep the likeliest.
  Support(const Kernels& kernels, const ValueRow& row, const SamplingParams& params)
      : row_(row),
        inverse_(InverseTemperature(params.temperature)),
        ids_(static_cast<size_t>(row.vocab)),
        weights_(static_cast<size_t>(row.vocab)),
        size_(row.vocab) {
    const int64_t top_k = params.top_k > 0 && params.top_k < row.vocab ? params.top_k : row.vocab;
    if (params.top_p < 1.0f) {
      TakeNucleus(kernels, params.top_p, top_k);
    } else if (top_k < row.vocab) {
      Take(kernels, Shortlist(kernels, row, top_k));
    } else {
      kernels.boltzmann(row.values, row.vocab, row.largest, inverse_, weights_.data());
    }
  }

  // Keeps tokens at least min_p as likely as the likeliest.
  void CutUnlikely(float min_p) {
    Keep([&](int64_t index) { return weights_[static_cast<size_t>(index)] >= min_p; });
  }

  // Keeps locally typical tokens (Meister et al. 2022): those whose surprise is nearest the entropy, as many as reach
  // `mass`, and those as near as the last of them.
  void CutUntypical(float mass) {
    const double total = Sum(weights_.data(), size_), log_total = std::log(total), entropy = Entropy(total);
    const Scratch<Distance> order(static_cast<size_t>(size_));
    const auto distance = [&](int64_t index) { return std::abs(log_total - Scaled(index) - entropy); };
    for (int64_t index = 0; index < size_; ++index) {
      order[static_cast<size_t>(index)] = {distance(index), weights_[static_cast<size_t>(index)]};
    }
    const double farthest = Farthest(order.data(), size_, static_cast<double>(mass) * total);
    Keep([&](int64_t index) { return distance(index) <= farthest; });
  }

  int64_t Draw(double uniform) const { return IdOf(Invert(weights_.data(), size_, uniform)); }

 private:
  struct Distance {
    double value;
    float weight;
  };

  // The fewest of the top_k likeliest tokens that hold top_p of their mass.
  void TakeNucleus(const Kernels& kernels, float top_p, int64_t top_k) {
    const double mass = static_cast<double>(top_p) * MassOf(kernels, row_, top_k, inverse_);
    for (const int64_t guess : {std::min(kNucleusGuess, top_k), top_k}) {
      Shortlist list(kernels, row_, guess);
      const int64_t size = NucleusSize(kernels, row_, list, inverse_, mass);
      if (size == 0 && guess < top_k) continue;
      if (size != 0) list.Truncate(size);
      return Take(kernels, list);
    }
  }

  void Take(const Kernels& kernels, const Shortlist& list) {
    std::sort(list.begin(), list.end(), HasLowerId);
    std::transform(list.begin(), list.end(), ids_.data(), [](const Candidate& candidate) { return candidate.id; });
    Weigh(kernels, row_, list, inverse_, weights_.data());
    size_ = list.size();
    is_whole_ = false;
  }

  int64_t IdOf(int64_t index) const { return is_whole_ ? index : ids_[static_cast<size_t>(index)]; }

  // The logarithm of a token's weight, which may be too small to be one.
  double Scaled(int64_t index) const {
    return (static_cast<double>(row_.values[IdOf(index)]) - static_cast<double>(row_.largest)) *
           static_cast<double>(inverse_);
  }

  double Entropy(double total) const {
    double sum = 0;
    for (int64_t index = 0; index < size_; ++index) {
      const auto weight = static_cast<double>(weights_[static_cast<size_t>(index)]);
      if (weight > 0) sum += weight * Scaled(index);
    }
    return std::log(total) - sum / total;
  }

  // The smallest distance within which the weights reach `mass`; the largest where they never do. Reorders.
  static double Farthest(Distance* begin, int64_t count, double mass) {
    Distance* end = begin + count;
    for (double passed = 0; end - begin > 1;) {
      Distance* middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end, [](const Distance& a, const Distance& b) { return a.value < b.value; });
      double nearer = passed;
      for (const Distance* entry = begin; entry < middle; ++entry) nearer += static_cast<double>(entry->weight);
      if (nearer >= mass) {
        end = middle;
      } else {
        begin = middle;
        passed = nearer;
      }
    }
    return begin->value;
  }

  template <typename Test>
  void Keep(const Test& test) {
    int64_t kept = 0;
    for (int64_t index = 0; index < size_; ++index) {
      if (!test(index)) continue;
      ids_[static_cast<size_t>(kept)] = static_cast<int32_t>(IdOf(index));
      weights_[static_cast<size_t>(kept)] = weights_[static_cast<size_t>(index)];
      ++kept;
    }
    size_ = kept;
    is_whole_ = false;
  }

  const ValueRow& row_;
  float inverse_;
  Scratch<int32_t> ids_;  // unused while the whole vocabulary may be drawn
  Scratch<float> weights_;
  int64_t size_;
  bool is_whole_ = true;
};

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

int64_t SampleRow(const Kernels& kernels, const ValueRow& row, const SamplingParams& params, double uniform) {
  Support support(kernels, row, params);
  if (params.min_p > 0.0f) support.CutUnlikely(params.min_p);
  if (params.typical_p < 1.0f) support.CutUntypical(params.typical_p);
  return support.Draw(uniform);
}

}  // namespace antiphon
