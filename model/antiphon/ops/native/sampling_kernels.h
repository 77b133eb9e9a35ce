// Loops over all tokens of a distribution for the warpers of sampling.cc: ranks, sums, and filters. Included by one file
// per instruction set; simd.h lists the rules for such files. Results are the same on all instruction sets for equal
// weights: there is one order of addition, and no product is fused with a sum.
#pragma once

#include "kernels.h"
#include "row_kernels.h"
#include "simd.h"

namespace antiphon {
namespace {

typedef Vector<double, kLanes / 2> F64;
typedef Vector<int64_t, kLanes / 2> I64;

// Sixteen numbers in double precision.
struct Doubles {
  F64 half[2];
};

typedef float FewFloats __attribute__((vector_size(kRegisterBytes / 2)));  // as many as doubles in a register
constexpr int kFew = static_cast<int>(sizeof(F32) / sizeof(FewFloats));

ANTIPHON_INLINE Doubles ToDoubles(const F32& v) {
  FewFloats few[kFew];
  memcpy(few, &v, sizeof(few));
  Doubles result;
  for (int i = 0; i < kFew; ++i) {
    result.half[i / F64::kParts].parts[i % F64::kParts] = __builtin_convertvector(few[i], F64::Part);
  }
  return result;
}

ANTIPHON_INLINE F32 ToFloats(const Doubles& v) {
  FewFloats few[kFew];
  for (int i = 0; i < kFew; ++i) {
    few[i] = __builtin_convertvector(v.half[i / F64::kParts].parts[i % F64::kParts], FewFloats);
  }
  F32 joined;
  memcpy(&joined, few, sizeof(joined));
  return joined;
}

ANTIPHON_INLINE F64 Abs(const F64& v) { return As<F64>(As<I64>(v) & INT64_MAX); }

// In a fixed order.
ANTIPHON_INLINE double Sum(const F64& v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The bucket of a rank; the last one where it is not a number.
ANTIPHON_INLINE void StoreBuckets(const F32& ranks, int32_t* to) {
  const F32 bounded = Min(ranks * kBucketsPerRank, Splat(static_cast<float>(kRankBuckets - 1)));
  const I32 buckets = Converted<I32>(bounded);
  memcpy(to, &buckets, sizeof(buckets));
}

void RankValues(const float* values, int64_t count, float largest, int32_t* buckets) {
  Vectors(count, [&](int64_t k, int part) ANTIPHON_BODY {
    StoreBuckets(largest - LoadPart(values + k, part), buckets + k);
  });
}

// Logarithms of weights, which may be too small to be floats.
ANTIPHON_INLINE F64 LogWeights(const F64& values, const Scale& scale) {
  return (values - static_cast<double>(scale.largest)) * static_cast<double>(scale.inverse);
}

Moments MeasureWeights(const float* values, const float* weights, int64_t count, const Scale& scale) {
  F64 total = {}, scaled = {};
  Vectors(count, [&](int64_t k, int part) ANTIPHON_BODY {
    const Doubles value = ToDoubles(LoadPart(values + k, part)), weight = ToDoubles(LoadPart(weights + k, part));
    for (int half = 0; half < 2; ++half) {
      total += weight.half[half];
      const F64& each = weight.half[half];
      scaled += Select(each > 0.0, each * LogWeights(value.half[half], scale), F64{});
    }
  });
  return {Sum(total), Sum(scaled)};
}

ANTIPHON_INLINE F64 Distances(const F64& values, const Surprise& surprise) {
  return Abs(surprise.log_total - LogWeights(values, surprise.scale) - surprise.entropy);
}

void RankDistances(const float* values, int64_t count, const Surprise& surprise, int32_t* buckets) {
  const float temperature = 1.0f / surprise.scale.inverse;
  Vectors(count, [&](int64_t k, int part) ANTIPHON_BODY {
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
  Vectors(count, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 value = LoadPart(values + k, part), weight = LoadPart(tokens.weights + k, part);
    const I32 index = Iota() + static_cast<int32_t>(k);
    I32 id = index;
    if (has_ids) memcpy(&id, tokens.ids + k, sizeof(id));
    const I32 passed = passes(index, value, weight) & (Iota() < part);
    const auto mask = static_cast<__mmask16>(Bits(passed));
    _mm512_storeu_si512(tokens.ids + kept, _mm512_maskz_compress_epi32(mask, reinterpret_cast<__m512i>(id.parts[0])));
    _mm512_storeu_ps(tokens.values + kept, _mm512_maskz_compress_ps(mask, value.parts[0]));
    _mm512_storeu_ps(tokens.weights + kept, _mm512_maskz_compress_ps(mask, weight.parts[0]));
    kept += __builtin_popcount(mask);
  });
  return kept;
}

ANTIPHON_INLINE I32 AreNear(const F32& values, const Surprise& surprise, double farthest) {
  typedef int32_t Half __attribute__((vector_size(32)));
  const Doubles value = ToDoubles(values);
  Half halves[2];
  for (int half = 0; half < 2; ++half) {
    halves[half] = __builtin_convertvector((Distances(value.half[half], surprise) <= farthest).parts[0], Half);
  }
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
