#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cut.h"

namespace antiphon {

namespace {

// Bounds of inverse temperatures: 0 times infinity would not be 0, whichever of them a logit's distance is.
constexpr float kSteepest = 1e30f, kFlattest = 1e-37f;

// From values to the logarithms of their weights: distances from the largest value, over the temperature.
struct Scale {
  Scale(float largest, float temperature)
      : largest(largest), inverse(std::clamp(1.0f / temperature, kFlattest, kSteepest)) {}

  // Of a weight that may be too small to be a float.
  double LogWeight(float value) const {
    return (static_cast<double>(value) - static_cast<double>(largest)) * static_cast<double>(inverse);
  }

  float largest;
  float inverse;
};

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

// Weights as integers, whose sums are exact: a kept set depends neither on the order in which tokens are looked at nor on
// the search. A unit is 2^-49 for 8,192 tokens and 2^-44 for 262,144: so small that all masses together stay below 2^63.
// A weight of 2^-25 (2^-20) of the likeliest one's or more is converted exactly, a smaller one is rounded down by less
// than a unit; all of them together by less than 2^-36 of the total, where each weight itself, a float, is rounded by up
// to 2^-24 of its size. A sum of doubles in some order would be off by up to 2^-40.
class Masses {
 public:
  Masses(const float* weights, int64_t vocab) : weights_(weights), units_(1.0f) {
    for (int64_t most = int64_t{1} << 62; most > vocab; most /= 2) units_ *= 2.0f;
  }

  int64_t operator()(int64_t index) const { return Of(weights_[index]); }
  int64_t Of(float weight) const { return static_cast<int64_t>(weight * units_); }

 private:
  const float* weights_;
  float units_;  // of the likeliest token's weight
};

// The mass that a share of a total comes to, rounded up: 1 to the total.
struct Share {
  explicit Share(float share) : share(static_cast<double>(share)) {}
  int64_t operator()(int64_t total) const {
    return std::clamp(static_cast<int64_t>(std::ceil(share * static_cast<double>(total))), int64_t{1}, total);
  }
  double share;
};

// The tokens that may be drawn, by rising id, and their weights: the likeliest one's is 1.
class Support {
 public:
  // After temperature and top-k.
  Support(const Kernels& kernels, const ValueRow& row, const SamplingParams& params)
      : scale_(row.largest, params.temperature),
        ids_(static_cast<size_t>(row.vocab)),
        kept_values_(static_cast<size_t>(row.vocab)),
        weights_(static_cast<size_t>(row.vocab)),
        masses_(weights_.data(), row.vocab),
        values_(row.values),
        size_(row.vocab) {
    if (params.top_k > 0 && params.top_k < row.vocab) Take(Shortlist(kernels, row, params.top_k));
    kernels.boltzmann(values_, size_, scale_.largest, scale_.inverse, weights_.data());
  }

  // Keeps the fewest of the likeliest tokens that hold top_p of the mass, of equal values those of the lowest ids; and
  // of these the tokens that are at least min_p as likely as the likeliest.
  void CutTail(float top_p, float min_p) {
    float last = -std::numeric_limits<float>::infinity();
    int64_t missing = 0;  // mass that tokens of the last value must bring
    if (top_p < 1.0f) {
      const Scratch<float> ranks(static_cast<size_t>(size_));
      for (int64_t i = 0; i < size_; ++i) {
        ranks[static_cast<size_t>(i)] = (scale_.largest - values_[i]) * scale_.inverse;
      }
      const auto key = [&](int64_t index) { return DescendingKey(values_[index]); };
      const Cut<uint32_t> cut = Cutter<uint32_t>::Find(ranks.data(), size_, key, masses_, Share(top_p));
      last = ValueOfKey(cut.last);
      missing = cut.missing;
    }
    Keep([last, min_p, missing, masses = masses_](float value, float weight) mutable {
      bool is_kept = value > last;
      if (value == last) {  // seldom
        is_kept = missing > 0;
        missing -= masses.Of(weight);
      }
      return is_kept & (weight >= min_p);
    });
  }

  // Keeps locally typical tokens (Meister et al. 2022): those whose surprise is nearest the entropy, as many as hold
  // `typical_p` of the mass, and those as near as the last of them.
  void CutUntypical(float typical_p) {
    const Moments moments = Measure();
    const double log_total = std::log(moments.total), entropy = log_total - moments.scaled / moments.total;
    const auto distance = [log_total, entropy, scale = scale_](float value) {
      return std::abs(log_total - scale.LogWeight(value) - entropy);
    };
    const Scratch<float> ranks(static_cast<size_t>(size_));
    for (int64_t i = 0; i < size_; ++i) ranks[static_cast<size_t>(i)] = static_cast<float>(distance(values_[i]));
    const auto key = [&](int64_t index) { return AscendingKey(distance(values_[index])); };
    const Cut<uint64_t> cut = Cutter<uint64_t>::Find(ranks.data(), size_, key, masses_, Share(typical_p));
    const double farthest = ValueOfKey(cut.last);
    Keep([distance, farthest](float value, float) { return distance(value) <= farthest; });
  }

  int64_t Draw(double uniform) const {
    const int64_t index = Invert(weights_.data(), size_, uniform);
    return is_whole_ ? index : ids_[static_cast<size_t>(index)];
  }

 private:
  // Sums over all tokens: of the weights, and of each times its logarithm.
  struct Moments {
    double total;
    double scaled;
  };

  void Take(const Shortlist& list) {
    std::transform(list.begin(), list.end(), ids_.data(), [](const Candidate& candidate) { return candidate.id; });
    std::transform(list.begin(), list.end(), kept_values_.data(), [](const Candidate& one) { return one.value; });
    Narrow(list.size());
  }

  void Narrow(int64_t size) {
    size_ = size;
    values_ = kept_values_.data();
    is_whole_ = false;
  }

  // Adds up every fourth token and then the four sums: one order, and no addition that waits for the one before.
  Moments Measure() const {
    constexpr int64_t kSums = 4;
    double total[kSums] = {}, scaled[kSums] = {};
    const auto add = [&, weights = weights_.data(), values = values_, scale = scale_](int64_t first, int64_t count) {
      for (int64_t sum = 0; sum < count; ++sum) {
        const auto weight = static_cast<double>(weights[first + sum]);
        total[sum] += weight;
        scaled[sum] += weight > 0 ? weight * scale.LogWeight(values[first + sum]) : 0.0;
      }
    };
    int64_t first = 0;
    for (; first + kSums <= size_; first += kSums) add(first, kSums);
    add(first, size_ - first);
    return {(total[0] + total[1]) + (total[2] + total[3]), (scaled[0] + scaled[1]) + (scaled[2] + scaled[3])};
  }

  // Keeps the tokens that pass a test, which is asked once for each, by rising id.
  template <typename Test>
  void Keep(Test test) {
    if (is_whole_) {
      Compact(test, [](int64_t index) { return static_cast<int32_t>(index); });
    } else {
      Compact(test, [ids = ids_.data()](int64_t index) { return ids[index]; });
    }
  }

  template <typename Test, typename IdAt>
  void Compact(Test test, const IdAt& id_at) {
    int32_t* const ids = ids_.data();
    float *const values = kept_values_.data(), *const weights = weights_.data();
    const float* const from = values_;
    int64_t kept = 0;
    for (int64_t index = 0; index < size_; ++index) {  // no branch: which tokens pass cannot be predicted
      const float value = from[index], weight = weights[index];
      const bool is_kept = test(value, weight);
      ids[kept] = id_at(index);
      values[kept] = value;
      weights[kept] = weight;
      kept += is_kept;
    }
    Narrow(kept);
  }

  Scale scale_;
  Scratch<int32_t> ids_;  // unused while the whole vocabulary may be drawn, as are kept_values_
  Scratch<float> kept_values_;
  Scratch<float> weights_;
  Masses masses_;
  const float* values_;  // the row's, or kept_values_
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
  if (params.top_p < 1.0f || params.min_p > 0.0f) support.CutTail(params.top_p, params.min_p);
  if (params.typical_p < 1.0f) support.CutUntypical(params.typical_p);
  return support.Draw(uniform);
}

}  // namespace antiphon
