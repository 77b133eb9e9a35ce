// Loops over all tokens of a distribution for the warpers of sampling.cc: ranks, sums, and filters. Included by one file
// per instruction set; simd.h lists the rules for such files. Results are the same on all instruction sets for equal
// weights: there is one order of addition, and no product is fused with a sum.
#pragma once

#include "kernels.h"
#include "row_kernels.h"
#include "simd.h"

namespace antiphon {
namespace {

constexpr int kHalf = kLanes / 2;

typedef float F32Half __attribute__((vector_size(32)));
typedef int32_t I32Half __attribute__((vector_size(32)));
typedef double F64 __attribute__((vector_size(64)));
typedef int64_t I64 __attribute__((vector_size(64)));

// Sixteen numbers in double precision.
struct Doubles {
  F64 half[2];
};

ANTIPHON_INLINE Doubles ToDoubles(F32 v) {
  F32Half halves[2];
  memcpy(halves, &v, sizeof(v));
  return {{__builtin_convertvector(halves[0], F64), __builtin_convertvector(halves[1], F64)}};
}

ANTIPHON_INLINE F32 ToFloats(const Doubles& v) {
  const F32Half halves[2] = {__builtin_convertvector(v.half[0], F32Half), __builtin_convertvector(v.half[1], F32Half)};
  F32 joined;
  memcpy(&joined, halves, sizeof(joined));
  return joined;
}

ANTIPHON_INLINE F64 Abs(F64 v) { return reinterpret_cast<F64>(reinterpret_cast<I64>(v) & INT64_MAX); }

// In a fixed order.
ANTIPHON_INLINE double Sum(F64 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The bucket of a rank; the last one where it is not a number.
ANTIPHON_INLINE void StoreBuckets(F32 ranks, int32_t* to) {
  const F32 bounded = Min(ranks * kBucketsPerRank, Splat(static_cast<float>(kRankBuckets - 1)));
  const I32 buckets = __builtin_convertvector(bounded, I32);
  memcpy(to, &buckets, sizeof(buckets));
}

void RankValues(const float* values, int64_t count, float largest, int32_t* buckets) {
  Vectors(count, [&](int64_t k, int part) { StoreBuckets(largest - LoadPart(values + k, part), buckets + k); });
}

// Logarithms of weights, which may be too small to be floats.
ANTIPHON_INLINE F64 LogWeights(F64 values, const Scale& scale) {
  return (values - static_cast<double>(scale.largest)) * static_cast<double>(scale.inverse);
}

Moments MeasureWeights(const float* values, const float* weights, int64_t count, const Scale& scale) {
  F64 total = {}, scaled = {};
  Vectors(count, [&](int64_t k, int part) {
    const Doubles value = ToDoubles(LoadPart(values + k, part)), weight = ToDoubles(LoadPart(weights + k, part));
    for (int half = 0; half < 2; ++half) {
      total += weight.half[half];
      scaled += weight.half[half] > 0 ? weight.half[half] * LogWeights(value.half[half], scale) : F64{};
    }
  });
  return {Sum(total), Sum(scaled)};
}

ANTIPHON_INLINE F64 Distances(F64 values, const Surprise& surprise) {
  return Abs(surprise.log_total - LogWeights(values, surprise.scale) - surprise.entropy);
}

void RankDistances(const float* values, int64_t count, const Surprise& surprise, int32_t* buckets) {
  const float temperature = 1.0f / surprise.scale.inverse;
  Vectors(count, [&](int64_t k, int part) {
    Doubles value = ToDoubles(LoadPart(values + k, part));
    for (F64& half : value.half) half = Distances(half, surprise);
    StoreBuckets(ToFloats(value) * temperature, buckets + k);
  });
}

#if defined(__AVX512F__)

// Keeps the tokens for which passes(their indices, values, weights) holds.
template <typename Passes>
ANTIPHON_INLINE int64_t KeepWhere(const Tokens& tokens, const float* values, bool has_ids, int64_t count,
                                  const Passes& passes) {
  int64_t kept = 0;
  Vectors(count, [&](int64_t k, int part) {
    const F32 value = LoadPart(values + k, part), weight = LoadPart(tokens.weights + k, part);
    const I32 index = Iota() + static_cast<int32_t>(k);
    I32 id = index;
    if (has_ids) memcpy(&id, tokens.ids + k, sizeof(id));
    const I32 passed = passes(index, value, weight) & (Iota() < part);
    const __mmask16 mask = _mm512_movepi32_mask(reinterpret_cast<__m512i>(passed));
    _mm512_storeu_si512(tokens.ids + kept, _mm512_maskz_compress_epi32(mask, reinterpret_cast<__m512i>(id)));
    _mm512_storeu_ps(tokens.values + kept, _mm512_maskz_compress_ps(mask, reinterpret_cast<__m512>(value)));
    _mm512_storeu_ps(tokens.weights + kept, _mm512_maskz_compress_ps(mask, reinterpret_cast<__m512>(weight)));
    kept += __builtin_popcount(mask);
  });
  return kept;
}

ANTIPHON_INLINE I32 AreNear(F32 values, const Surprise& surprise, double farthest) {
  const Doubles value = ToDoubles(values);
  const I64 near[2] = {Distances(value.half[0], surprise) <= farthest, Distances(value.half[1], surprise) <= farthest};
  const I32Half halves[2] = {__builtin_convertvector(near[0], I32Half), __builtin_convertvector(near[1], I32Half)};
  I32 joined;
  memcpy(&joined, halves, sizeof(joined));
  return joined;
}

#else

template <typename Passes>
ANTIPHON_INLINE int64_t KeepWhere(const Tokens& tokens, const float* values, bool has_ids, int64_t count,
                                  const Passes& passes) {
  int64_t kept = 0;
  for (int64_t k = 0; k < count; ++k) {  // no branch: which tokens pass cannot be predicted
    const float value = values[k], weight = tokens.weights[k];
    const auto index = static_cast<int32_t>(k);
    const int32_t id = has_ids ? tokens.ids[k] : index;
    tokens.ids[kept] = id;
    tokens.values[kept] = value;
    tokens.weights[kept] = weight;
    kept += passes(index, value, weight) ? 1 : 0;
  }
  return kept;
}

ANTIPHON_INLINE bool AreNear(float value, const Surprise& surprise, double farthest) {
  return DistanceOf(value, surprise) <= farthest;
}

#endif

int64_t KeepLikely(const Tokens& tokens, const float* values, bool has_ids, int64_t count, float last, int64_t end,
                   float min_weight) {
  const auto first_out = static_cast<int32_t>(end);
  return KeepWhere(tokens, values, has_ids, count, [=](auto index, auto value, auto weight) {
    return ((value > last) | ((value == last) & (index < first_out))) & (weight >= min_weight);
  });
}

int64_t KeepNear(const Tokens& tokens, const float* values, bool has_ids, int64_t count, const Surprise& surprise,
                 double farthest) {
  return KeepWhere(tokens, values, has_ids, count,
                   [=](auto, auto value, auto) { return AreNear(value, surprise, farthest); });
}

}  // namespace
}  // namespace antiphon
