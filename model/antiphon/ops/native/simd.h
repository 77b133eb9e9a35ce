// Vectors of sixteen numbers, for the instruction set that this translation unit is compiled for.
//
// The compiler's vector extensions provide the arithmetic; intrinsics are used only where the compiler would not find
// an instruction. Rules for this file and all that include it: everything is in an unnamed namespace and uses no
// standard template, since these files are compiled with different flags and the linker must never use one file's copy
// in another. Results are bit-identical for equal inputs on one instruction set; compile with -ffp-contract=off, so
// that only Fma fuses.
//
// GCC 12 keeps sums in memory in three cases, which the code avoids because they cost up to ten times the arithmetic:
// - A vector is wider than a register. Vector is therefore an array of registers.
// - A loop has more sums than there are registers. The sizes of tiles depend on the instruction set.
// - An array of sums is used again after its loop. The inner loops of products are therefore functions of their own,
//   which store their sums at the end.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace antiphon {
namespace {

#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif

constexpr int kLanes = 16;
constexpr float kInfinity = __builtin_inff();

#define ANTIPHON_INLINE inline __attribute__((always_inline))
#define ANTIPHON_BODY __attribute__((always_inline))  // of a lambda: GCC calls a long one that is used twice

// `Count` numbers in as many registers as they need.
template <typename Number, int Count>
struct Vector {
  typedef Number Part __attribute__((vector_size(kRegisterBytes)));
  static constexpr int kPartLanes = kRegisterBytes / static_cast<int>(sizeof(Number));
  static constexpr int kParts = Count / kPartLanes;

  Part parts[kParts];

  ANTIPHON_INLINE Number operator[](int lane) const { return parts[lane / kPartLanes][lane % kPartLanes]; }
};

typedef Vector<float, kLanes> F32;
typedef Vector<int32_t, kLanes> I32;
typedef Vector<uint32_t, kLanes> U32;

// Returns the vector whose part i is body(i).
template <typename Result, typename Body>
ANTIPHON_INLINE Result EachPart(const Body& body) {
  Result result;
#pragma GCC unroll 8
  for (int i = 0; i < Result::kParts; ++i) result.parts[i] = body(i);
  return result;
}

template <int Bytes>
struct Integer;
template <>
struct Integer<4> {
  typedef int32_t Type;
};
template <>
struct Integer<8> {
  typedef int64_t Type;
};

// Result of a comparison: all bits of a lane are set where it holds.
template <typename Number, int Count>
using Mask = Vector<typename Integer<sizeof(Number)>::Type, Count>;

// Operators of two vectors, or of a vector and one number.
#define ANTIPHON_OPERATOR(op, Result)                                                                                  \
  template <typename Number, int Count>                                                                                \
  ANTIPHON_INLINE Result<Number, Count> operator op(const Vector<Number, Count>& a, const Vector<Number, Count>& b) {  \
    return EachPart<Result<Number, Count>>([&](int i) ANTIPHON_BODY { return a.parts[i] op b.parts[i]; });             \
  }                                                                                                                    \
  template <typename Number, int Count>                                                                                \
  ANTIPHON_INLINE Result<Number, Count> operator op(const Vector<Number, Count>& a, Number b) {                        \
    return EachPart<Result<Number, Count>>([&](int i) ANTIPHON_BODY { return a.parts[i] op b; });                      \
  }                                                                                                                    \
  template <typename Number, int Count>                                                                                \
  ANTIPHON_INLINE Result<Number, Count> operator op(Number a, const Vector<Number, Count>& b) {                        \
    return EachPart<Result<Number, Count>>([&](int i) ANTIPHON_BODY { return a op b.parts[i]; });                      \
  }

#define ANTIPHON_ARITHMETIC(op) ANTIPHON_OPERATOR(op, Vector)
#define ANTIPHON_COMPARISON(op) ANTIPHON_OPERATOR(op, Mask)
ANTIPHON_ARITHMETIC(+)
ANTIPHON_ARITHMETIC(-)
ANTIPHON_ARITHMETIC(*)
ANTIPHON_ARITHMETIC(/)
ANTIPHON_ARITHMETIC(&)
ANTIPHON_ARITHMETIC(|)
ANTIPHON_ARITHMETIC(<<)
ANTIPHON_COMPARISON(<)
ANTIPHON_COMPARISON(>)
ANTIPHON_COMPARISON(<=)
ANTIPHON_COMPARISON(>=)
ANTIPHON_COMPARISON(==)
ANTIPHON_COMPARISON(!=)

template <typename Number, int Count>
ANTIPHON_INLINE Vector<Number, Count> operator-(const Vector<Number, Count>& a) {
  return EachPart<Vector<Number, Count>>([&](int i) ANTIPHON_BODY { return -a.parts[i]; });
}

template <typename Number, int Count, typename Other>
ANTIPHON_INLINE void operator+=(Vector<Number, Count>& a, const Other& b) {
  a = a + b;
}
template <typename Number, int Count, typename Other>
ANTIPHON_INLINE void operator*=(Vector<Number, Count>& a, const Other& b) {
  a = a * b;
}
template <typename Number, int Count>
ANTIPHON_INLINE void operator|=(Vector<Number, Count>& a, const Vector<Number, Count>& b) {
  a = a | b;
}

// Lanes of `a` where the mask is set, of `b` elsewhere.
template <typename Number, int Count>
ANTIPHON_INLINE Vector<Number, Count> Select(const Mask<Number, Count>& mask, const Vector<Number, Count>& a,
                                             const Vector<Number, Count>& b) {
  return EachPart<Vector<Number, Count>>([&](int i) ANTIPHON_BODY { return mask.parts[i] ? a.parts[i] : b.parts[i]; });
}

// The same bits as another type.
template <typename To, typename From>
ANTIPHON_INLINE To As(const From& from) {
  return EachPart<To>([&](int i) ANTIPHON_BODY { return reinterpret_cast<typename To::Part>(from.parts[i]); });
}
// The same numbers as another type: rounded to the nearest float, or towards zero to an integer.
template <typename To, typename From>
ANTIPHON_INLINE To Converted(const From& from) {
  return EachPart<To>([&](int i) ANTIPHON_BODY { return __builtin_convertvector(from.parts[i], typename To::Part); });
}

// Copies part by part: one copy of all parts would pass through memory.
template <typename To>
ANTIPHON_INLINE To LoadAs(const void* from) {
  return EachPart<To>([&](int i) ANTIPHON_BODY {
    typename To::Part part;
    memcpy(&part, static_cast<const char*>(from) + i * kRegisterBytes, sizeof(part));
    return part;
  });
}

template <typename From>
ANTIPHON_INLINE void StoreAll(void* to, const From& v) {
#pragma GCC unroll 8
  for (int i = 0; i < From::kParts; ++i) {
    memcpy(static_cast<char*>(to) + i * kRegisterBytes, &v.parts[i], kRegisterBytes);
  }
}

ANTIPHON_INLINE F32 Load(const float* from) { return LoadAs<F32>(from); }
ANTIPHON_INLINE I32 Load(const int32_t* from) { return LoadAs<I32>(from); }
ANTIPHON_INLINE void Store(float* to, const F32& v) { StoreAll(to, v); }
ANTIPHON_INLINE void Store(int32_t* to, const I32& v) { StoreAll(to, v); }

// Lane numbers 0 .. 15. Written lane by lane: the compiler computes with them, which it cannot do with a table.
ANTIPHON_INLINE I32 Iota() {
  I32 numbers{};
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) numbers.parts[lane / I32::kPartLanes][lane % I32::kPartLanes] = lane;
  return numbers;
}

// The first `count` (1 to 16) of sixteen; the others are 0 and not read.
ANTIPHON_INLINE F32 LoadPart(const float* from, int count) {
#if defined(__AVX512F__)
  return {{_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from)}};
#elif defined(__AVX2__)
  if (count == kLanes) return Load(from);  // the usual case
  const I32 mask = Iota() < count;
  return EachPart<F32>([&](int i) ANTIPHON_BODY {
    return _mm256_maskload_ps(from + i * F32::kPartLanes, reinterpret_cast<__m256i>(mask.parts[i]));
  });
#else
  if (count == kLanes) return Load(from);  // the usual case; a copy of variable length is a function call
  F32 v = {};
  memcpy(&v, from, static_cast<size_t>(count) * sizeof(float));
  return v;
#endif
}

ANTIPHON_INLINE void StorePart(float* to, const F32& v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), v.parts[0]);
#elif defined(__AVX2__)
  if (count == kLanes) return Store(to, v);
  const I32 mask = Iota() < count;
  for (int i = 0; i < F32::kParts; ++i) {
    _mm256_maskstore_ps(to + i * F32::kPartLanes, reinterpret_cast<__m256i>(mask.parts[i]), v.parts[i]);
  }
#else
  if (count == kLanes) return Store(to, v);
  memcpy(to, &v, static_cast<size_t>(count) * sizeof(float));
#endif
}

// Subtracts zero, since adding x to zeros would turn -0 into 0.
ANTIPHON_INLINE F32 Splat(float x) {
  return EachPart<F32>([&](int) ANTIPHON_BODY { return x - F32::Part{}; });
}

ANTIPHON_INLINE F32 Fma(const F32& a, const F32& b, const F32& c) {
#if defined(__AVX512F__)
  return {{_mm512_fmadd_ps(a.parts[0], b.parts[0], c.parts[0])}};
#elif defined(__FMA__)
  return EachPart<F32>([&](int i) ANTIPHON_BODY { return _mm256_fmadd_ps(a.parts[i], b.parts[i], c.parts[i]); });
#elif defined(__ARM_NEON)
  return EachPart<F32>([&](int i) ANTIPHON_BODY { return vfmaq_f32(c.parts[i], a.parts[i], b.parts[i]); });
#else
  return a * b + c;
#endif
}

ANTIPHON_INLINE F32 Max(const F32& a, const F32& b) { return Select(a > b, a, b); }
ANTIPHON_INLINE F32 Min(const F32& a, const F32& b) { return Select(a < b, a, b); }
ANTIPHON_INLINE F32 Abs(const F32& a) { return As<F32>(As<U32>(a) & 0x7fffffffu); }

// Lane i is lane order[i] of `a`, or of `b` from the number of lanes on. Clang has no such function; where the order is
// constant, it finds the instruction.
template <typename Part>
ANTIPHON_INLINE Part Shuffled(const Part& a, const Part& b, const I32::Part& order) {
#if defined(__clang__)
  Part shuffled = a;
#pragma GCC unroll 16
  for (int lane = 0; lane < I32::kPartLanes; ++lane) {
    const int from = order[lane];
    shuffled[lane] = from < I32::kPartLanes ? a[from] : b[from - I32::kPartLanes];
  }
  return shuffled;
#else
  return __builtin_shuffle(a, b, order);
#endif
}

// Combines the upper half of the lanes with the lower half, by combine(lower, upper), until one lane is left.
template <typename Number, typename Combine>
ANTIPHON_INLINE Number Reduce(Vector<Number, kLanes> v, const Combine& combine) {
  typedef Vector<Number, kLanes> V;
  for (int step = V::kParts / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) v.parts[i] = combine(v.parts[i], v.parts[i + step]);
  }
  typename V::Part part = v.parts[0];
  for (int half = V::kPartLanes / 2; half > 0; half /= 2) {
    part = combine(part, Shuffled(part, part, (Iota().parts[0] + half) & (V::kPartLanes - 1)));
  }
  return part[0];
}

ANTIPHON_INLINE float Sum(const F32& v) {
  return Reduce(v, [](auto low, auto high) ANTIPHON_BODY { return low + high; });
}
ANTIPHON_INLINE float Largest(const F32& v) {
  return Reduce(v, [](auto low, auto high) ANTIPHON_BODY { return high > low ? high : low; });
}
ANTIPHON_INLINE int32_t Smallest(const I32& v) {
  return Reduce(v, [](auto low, auto high) ANTIPHON_BODY { return high < low ? high : low; });
}

// A bit for each lane of a mask.
ANTIPHON_INLINE uint32_t Bits(const I32& mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask.parts[0]));
#elif defined(__AVX2__)
  const uint32_t low = static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask.parts[0])));
  return low | static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask.parts[1]))) << 8;
#elif defined(__ARM_NEON)
  const uint32x4_t lanes = {1, 2, 4, 8};
  const U32 bits = As<U32>(mask);
  const uint32x4_t low = (bits.parts[0] & lanes) | (bits.parts[1] & lanes << 4);
  const uint32x4_t high = (bits.parts[2] & lanes << 8) | (bits.parts[3] & lanes << 12);
  return vaddvq_u32(low | high);
#else
  if (Reduce(mask, [](auto low, auto high) ANTIPHON_BODY { return low | high; }) == 0) return 0;
  uint32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (mask[lane] != 0) bits |= 1u << lane;
  }
  return bits;
#endif
}

// exp(x) to about 1 ulp for x <= 88; 0 below -87.33, -inf included; NaN stays NaN. Cephes' polynomial after
// Cody-Waite reduction.
ANTIPHON_INLINE F32 Exp(const F32& x) {
  const F32 clamped = Select(x < -87.33f, Splat(-87.33f), Select(x > 88.0f, Splat(88.0f), x));
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
  const U32 power = (As<U32>(shifted) - (0x4b400000u - 127u)) << 23u;
  return Select(x < -87.33f, F32{}, p * As<F32>(power));
}

ANTIPHON_INLINE F32 HalvesToFloats(const U32& halves) {
  const U32 rest = halves & 0x7fffu, sign = (halves & 0x8000u) << 16u, shifted = rest << 13u;
  const I32 size = As<I32>(rest);
  const F32 small = Converted<F32>(size) * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
  const F32 normal = As<F32>(shifted + 0x38000000u);
  const F32 special = As<F32>(shifted | 0x7f800000u);  // infinity, NaN
  const F32 magnitude = Select(size < 0x400, small, Select(size < 0x7c00, normal, special));
  return As<F32>(As<U32>(magnitude) | sign);
}

// Rounds to the nearest, ties to even; a number that float16 cannot hold becomes its largest number, 65504.
ANTIPHON_INLINE uint16_t FloatToHalf(float value) {
  if (value > 65504.0f) value = 65504.0f;
  if (value < -65504.0f) value = -65504.0f;
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
}

// Elements of a cache: float as it is, uint16_t as float16.
ANTIPHON_INLINE F32 LoadElements(const float* from) { return Load(from); }
ANTIPHON_INLINE F32 LoadElements(const uint16_t* from) {
#if defined(__AVX512F__)
  return {{_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))}};
#elif defined(__F16C__)
  return EachPart<F32>([&](int i) ANTIPHON_BODY {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * F32::kPartLanes)));
  });
#elif defined(__ARM_NEON)
  return EachPart<F32>([&](int i) ANTIPHON_BODY {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i * F32::kPartLanes)));
  });
#else
  typedef uint16_t Halves __attribute__((vector_size(kRegisterBytes / 2)));
  const U32 half = EachPart<U32>([&](int i) ANTIPHON_BODY {
    Halves part;
    memcpy(&part, from + i * U32::kPartLanes, sizeof(part));
    return __builtin_convertvector(part, U32::Part);
  });
  return HalvesToFloats(half);
#endif
}

// The first `count` of sixteen.
ANTIPHON_INLINE void StoreElements(float* to, const F32& v, int count) { StorePart(to, v, count); }
ANTIPHON_INLINE void StoreElements(uint16_t* to, const F32& v, int count) {
#if defined(__AVX512F__)
  const F32 bounded = Min(Max(v, Splat(-65504.0f)), Splat(65504.0f));
  const __m256i half = _mm512_cvtps_ph(bounded.parts[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << count) - 1), half);
#elif defined(__F16C__) || defined(__ARM_NEON)
  const F32 largest = Splat(65504.0f);
  const F32 bounded = Select(v > largest, largest, Select(v < -largest, -largest, v));
  uint16_t halves[kLanes];
#if defined(__ARM_NEON)
  for (int i = 0; i < F32::kParts; ++i) {
    vst1_u16(halves + i * F32::kPartLanes, vreinterpret_u16_f16(vcvt_f16_f32(bounded.parts[i])));
  }
#else
  for (int i = 0; i < F32::kParts; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i * F32::kPartLanes),
                     _mm256_cvtps_ph(bounded.parts[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
#endif
  memcpy(to, halves, static_cast<size_t>(count) * sizeof(*to));
#else
  for (int lane = 0; lane < count; ++lane) to[lane] = FloatToHalf(v[lane]);
#endif
}

// rows[i][j] <-> rows[j][i].
ANTIPHON_INLINE void Transpose(F32 rows[kLanes]) {
  constexpr int kPartLanes = F32::kPartLanes;
#pragma GCC unroll 4
  for (int step = kLanes / 2; step > 0; step /= 2) {
#pragma GCC unroll 16
    for (int row = 0; row < kLanes; ++row) {
      if (row & step) continue;
      const F32 low = rows[row], high = rows[row + step];
      if (step >= kPartLanes) {  // whole parts change their places
        for (int i = 0; i < F32::kParts; ++i) {
          const int other = step / kPartLanes;
          rows[row].parts[i] = i & other ? high.parts[i - other] : low.parts[i];
          rows[row + step].parts[i] = i & other ? high.parts[i] : low.parts[i + other];
        }
      } else {
        const I32::Part lane = Iota().parts[0], is_high = (lane & step) != 0;
        const I32::Part low_mask = is_high ? lane - step + kPartLanes : lane;
        const I32::Part high_mask = is_high ? lane + kPartLanes : lane + step;
        for (int i = 0; i < F32::kParts; ++i) {
          rows[row].parts[i] = Shuffled(low.parts[i], high.parts[i], low_mask);
          rows[row + step].parts[i] = Shuffled(low.parts[i], high.parts[i], high_mask);
        }
      }
    }
  }
}

// tanh by the exponential; near zero, where that loses digits, by Cephes' polynomial. Error: a few ulp.
ANTIPHON_INLINE F32 Tanh(const F32& x) {
  const F32 bounded = Min(Splat(20.0f), Max(Splat(-20.0f), x));  // in this order NaN stays NaN
  const F32 square = x * x;
  F32 p = Fma(square, Splat(-5.70498872745e-3f), Splat(2.06390887954e-2f));
  p = Fma(p, square, Splat(-5.37397155531e-2f));
  p = Fma(p, square, Splat(1.33314422036e-1f));
  p = Fma(p, square, Splat(-3.33332819422e-1f));
  const F32 near = Fma(p * square, x, x);
  return Select(Abs(x) < 0.625f, near, 1.0f - 2.0f / (Exp(bounded * 2.0f) + 1.0f));
}

// Scores below a limit: cap tanh(x / cap).
ANTIPHON_INLINE F32 Capped(const F32& x, float cap) { return Tanh(x / Splat(cap)) * cap; }

}  // namespace
}  // namespace antiphon
