// Vectors of sixteen floats, for the instruction set that this translation unit is compiled for.
//
// The compiler's vector extensions provide the width; intrinsics are used only where the compiler would not find an
// instruction. Rules for this file and all that include it: everything is in an unnamed namespace and uses no standard
// template, since these files are compiled with different flags and the linker must never use one file's copy in
// another. Results
// are bit-identical for equal inputs on one instruction set; compile with -ffp-contract=off, so that only Fma fuses.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace antiphon {
namespace {

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

typedef float F32 __attribute__((vector_size(64)));
typedef int32_t I32 __attribute__((vector_size(64)));
typedef uint32_t U32 __attribute__((vector_size(64)));

#define ANTIPHON_INLINE inline __attribute__((always_inline))

ANTIPHON_INLINE F32 Load(const float* from) {
  F32 v;
  memcpy(&v, from, sizeof(v));
  return v;
}

ANTIPHON_INLINE void Store(float* to, F32 v) { memcpy(to, &v, sizeof(v)); }

// The first `count` (1 to 16) of sixteen; the others are 0 and not read.
ANTIPHON_INLINE F32 LoadPart(const float* from, int count) {
#if defined(__AVX512F__)
  return reinterpret_cast<F32>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from));
#else
  if (count == kLanes) return Load(from);  // the usual case; a copy of variable length is a function call
  F32 v = {};
  memcpy(&v, from, static_cast<size_t>(count) * sizeof(float));
  return v;
#endif
}

ANTIPHON_INLINE void StorePart(float* to, F32 v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), reinterpret_cast<__m512>(v));
#else
  if (count == kLanes) return Store(to, v);
  memcpy(to, &v, static_cast<size_t>(count) * sizeof(float));
#endif
}

// Written lane by lane, since adding x to zeros would turn -0 into 0.
ANTIPHON_INLINE F32 Splat(float x) { return F32{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

ANTIPHON_INLINE F32 Fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return reinterpret_cast<F32>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  union Halves {
    F32 whole;
    __m256 half[2];
  } x{a}, y{b}, z{c};
  z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
  z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
  return z.whole;
#else
  return a * b + c;
#endif
}

ANTIPHON_INLINE F32 Max(F32 a, F32 b) { return a > b ? a : b; }
ANTIPHON_INLINE F32 Min(F32 a, F32 b) { return a < b ? a : b; }
ANTIPHON_INLINE F32 Abs(F32 a) { return reinterpret_cast<F32>(reinterpret_cast<U32>(a) & 0x7fffffffu); }
ANTIPHON_INLINE F32 ToFloat(I32 v) { return __builtin_convertvector(v, F32); }

// Lane numbers 0 .. 15.
ANTIPHON_INLINE I32 Iota() { return I32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Rotates v: lane i of the result is lane (i + step) mod 16 of v.
ANTIPHON_INLINE F32 Rotated(F32 v, int step) { return __builtin_shuffle(v, (Iota() + step) & (kLanes - 1)); }
ANTIPHON_INLINE I32 Rotated(I32 v, int step) { return __builtin_shuffle(v, (Iota() + step) & (kLanes - 1)); }

// Adds in a fixed order: the upper half to the lower half, until one lane is left.
ANTIPHON_INLINE float Sum(F32 v) {
  for (int half = kLanes / 2; half > 0; half /= 2) v += Rotated(v, half);
  return v[0];
}

ANTIPHON_INLINE float Largest(F32 v) {
  for (int half = kLanes / 2; half > 0; half /= 2) v = Max(Rotated(v, half), v);
  return v[0];
}

ANTIPHON_INLINE int32_t Smallest(I32 v) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const I32 rotated = Rotated(v, half);
    v = rotated < v ? rotated : v;
  }
  return v[0];
}

ANTIPHON_INLINE bool IsAny(I32 v) {
  for (int half = kLanes / 2; half > 0; half /= 2) v |= Rotated(v, half);
  return v[0] != 0;
}

// exp(x) to about 1 ulp for x <= 88; 0 below -87.33, -inf included; NaN stays NaN. Cephes' polynomial after
// Cody-Waite reduction.
ANTIPHON_INLINE F32 Exp(F32 x) {
  const F32 clamped = x < -87.33f ? Splat(-87.33f) : (x > 88.0f ? Splat(88.0f) : x);
  const F32 shifted = Fma(clamped, Splat(1.44269504f), Splat(12582912.0f));  // 1.5 * 2^23: rounds
  const F32 n = shifted - 12582912.0f;
  F32 r = Fma(n, Splat(-0.693359375f), clamped);
  r = Fma(n, Splat(2.12194440e-4f), r);
  F32 p = Splat(1.9875691500e-4f);
  p = Fma(p, r, Splat(1.3981999507e-3f));
  p = Fma(p, r, Splat(8.3334519073e-3f));
  p = Fma(p, r, Splat(4.1665795894e-2f));
  p = Fma(p, r, Splat(1.6666665459e-1f));
  p = Fma(p, r, Splat(5.0000001201e-1f));
  p = Fma(p, r * r, r + 1.0f);
  // Multiplied, not added to the exponent's bits: NaN must stay NaN.
  const U32 power = (reinterpret_cast<U32>(shifted) - (0x4b400000u - 127u)) << 23;
  return x < -87.33f ? F32{} : p * reinterpret_cast<F32>(power);
}

ANTIPHON_INLINE float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  uint32_t bits;
  if (rest >= 0x7c00u) {
    bits = 0x7f800000u | (rest & 0x3ffu) << 13;  // infinity, NaN
  } else if (rest >= 0x400u) {
    bits = (rest << 13) + 0x38000000u;
  } else {
    const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
    memcpy(&bits, &small, sizeof(bits));
  }
  bits |= sign;
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds to the nearest, ties to even; a number that float16 cannot hold becomes its largest number, 65504.
ANTIPHON_INLINE uint16_t FloatToHalf(float value) {
  if (value > 65504.0f) value = 65504.0f;
  if (value < -65504.0f) value = -65504.0f;
#if defined(__F16C__)
  return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (bits < 0x38800000u) {  // below 2^-14: the sum's last bits are the subnormal, rounded by the addition
    float magnitude;
    memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
#endif
}

// Elements of a cache: float as it is, uint16_t as float16.
ANTIPHON_INLINE F32 LoadElements(const float* from) { return Load(from); }
ANTIPHON_INLINE F32 LoadElements(const uint16_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<F32>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  union Halves {
    __m256 half[2];
    F32 whole;
  } v;
  v.half[0] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  v.half[1] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)));
  return v.whole;
#else
  float lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = HalfToFloat(from[lane]);
  return Load(lanes);
#endif
}

// The first `count` of sixteen.
ANTIPHON_INLINE void StoreElements(float* to, F32 v, int count) { StorePart(to, v, count); }
ANTIPHON_INLINE void StoreElements(uint16_t* to, F32 v, int count) {
#if defined(__AVX512F__)
  const F32 bounded = Min(Max(v, Splat(-65504.0f)), Splat(65504.0f));
  const __m256i half =
      _mm512_cvtps_ph(reinterpret_cast<__m512>(bounded), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), half);
#else
  for (int lane = 0; lane < count; ++lane) to[lane] = FloatToHalf(v[lane]);
#endif
}

// rows[i][j] <-> rows[j][i].
ANTIPHON_INLINE void Transpose(F32 rows[kLanes]) {
  const I32 lane = Iota();
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const I32 is_high = (lane & step) != 0;
    const I32 low_mask = is_high ? lane - step + kLanes : lane;
    const I32 high_mask = is_high ? lane + kLanes : lane + step;
    for (int row = 0; row < kLanes; ++row) {
      if (row & step) continue;
      const F32 low = rows[row], high = rows[row + step];
      rows[row] = __builtin_shuffle(low, high, low_mask);
      rows[row + step] = __builtin_shuffle(low, high, high_mask);
    }
  }
}

}  // namespace
}  // namespace antiphon
