#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cut.h"

namespace antiphon {

namespace {

// Bounds of inverse temperatures, which keep products with a logit's distance from being 0 times infinity.
constexpr float kSteepest = 1e30f, kFlattest = 1e-37f;

Scale ScaleOf(const ValueRow& row, float temperature) {
  return {row.largest, std::clamp(1.0f / temperature, kFlattest, kSteepest)};
}

// Elements of an array that kernels write whole vectors of 16 to, and 16 beyond those that are kept.
size_t Padded(int64_t count) { return static_cast<size_t>(RoundUp(count, kPanel) + kPanel); }

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

// Weights as integers, whose sums are exact: a kept set depends neither on the order in which tokens are read nor on the
// search. A unit is 2^-49 for 8,192 tokens and 2^-44 for 262,144: so small that all masses together stay below 2^63.
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

// Mass of a share of a total, rounded up: 1 to the total.
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
      : kernels_(kernels),
        scale_(ScaleOf(row, params.temperature)),
        ids_(Padded(row.vocab)),
        kept_values_(Padded(row.vocab)),
        weights_(Padded(row.vocab)),
        buckets_(Padded(row.vocab)),
        masses_(weights_.data(), row.vocab),
        values_(row.values),
        size_(row.vocab) {
    if (params.top_k > 0 && params.top_k < row.vocab) Take(row, params.top_k);
    kernels.boltzmann(values_, size_, scale_.largest, scale_.inverse, weights_.data());
  }

  // Keeps the fewest of the likeliest tokens that hold top_p of the mass, of equal values those of the lowest ids; and
  // of these the tokens that are at least min_p as likely as the likeliest.
  void CutTail(float top_p, float min_p) {
    if (top_p < 1.0f) {
      kernels_.rank_values(values_, size_, scale_.largest, buckets_.data());
      KeepLikely(CutLargest(masses_, Share(top_p)), min_p);
    } else {
      KeepLikely({UINT32_MAX, 0}, min_p);
    }
  }

  // Keeps locally typical tokens (Meister et al. 2022): those whose surprise is nearest the entropy, as many as hold
  // `typical_p` of the mass, and those as near as the last of them.
  void CutUntypical(float typical_p) {
    const Moments moments = kernels_.measure_weights(values_, weights_.data(), size_, scale_);
    const double log_total = std::log(moments.total);
    const Surprise surprise{scale_, log_total, log_total - moments.scaled / moments.total};
    kernels_.rank_distances(values_, size_, surprise, buckets_.data());
    const auto key = [&](int64_t index) { return AscendingKey(DistanceOf(values_[index], surprise)); };
    const Cut<uint64_t> cut = Cutter<uint64_t>::Find(buckets_.data(), size_, key, masses_, Share(typical_p));
    Narrow(kernels_.keep_near(tokens(), values_, has_ids_, size_, surprise, ValueOfKey(cut.last)));
  }

  int64_t Draw(double uniform) const {
    const int64_t index = Invert(weights_.data(), size_, uniform);
    return has_ids_ ? ids_[static_cast<size_t>(index)] : index;
  }

 private:
  Tokens tokens() const { return {ids_.data(), kept_values_.data(), weights_.data()}; }

  // Takes the top_k likeliest tokens of a row; their weights are not known yet.
  void Take(const ValueRow& row, int64_t top_k) {
    if (top_k <= ChunksOf(row.vocab)) return TakeFew(Shortlist(kernels_, row, top_k));
    kernels_.rank_values(values_, size_, scale_.largest, buckets_.data());
    std::fill(weights_.data(), weights_.data() + size_, 1.0f);
    KeepLikely(CutLargest([](int64_t) { return 1; }, [top_k](int64_t) { return top_k; }), 0.0f);
  }

  void TakeFew(const Shortlist& list) {
    std::sort(list.begin(), list.end(), HasLowerId);
    std::transform(list.begin(), list.end(), ids_.data(), [](const Candidate& candidate) { return candidate.id; });
    std::transform(list.begin(), list.end(), kept_values_.data(), [](const Candidate& one) { return one.value; });
    Narrow(list.size());
  }

  // Finds the point at which the largest values reach a target, given their buckets.
  template <typename MassAt, typename TargetOf>
  Cut<uint32_t> CutLargest(const MassAt& mass_at, const TargetOf& target_of) const {
    const auto key = [values = values_](int64_t index) { return DescendingKey(values[index]); };
    return Cutter<uint32_t>::Find(buckets_.data(), size_, key, mass_at, target_of);
  }

  void KeepLikely(const Cut<uint32_t>& cut, float min_weight) {
    const float last = cut.last == UINT32_MAX ? -std::numeric_limits<float>::infinity() : ValueOfKey(cut.last);
    Narrow(kernels_.keep_likely(tokens(), values_, has_ids_, size_, last, cut.end, min_weight));
  }

  void Narrow(int64_t size) {
    size_ = size;
    values_ = kept_values_.data();
    has_ids_ = true;
  }

  const Kernels& kernels_;
  Scale scale_;
  Scratch<int32_t> ids_;  // unused while the whole vocabulary may be drawn, as are kept_values_
  Scratch<float> kept_values_;
  Scratch<float> weights_;
  Scratch<int32_t> buckets_;
  Masses masses_;
  const float* values_;  // the row's, or kept_values_
  int64_t size_;
  bool has_ids_ = false;
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
