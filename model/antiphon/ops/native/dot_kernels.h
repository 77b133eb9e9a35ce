// Exact integer sums of int8 products, for tiles of rows and panels. Included by one file per instruction set; simd.h
// lists the rules for such files.
//
// DotTile<Rows, Panels, fetches> writes sums [Rows][Panels][16]. Each load of weights or activations feeds several
// products, since loads are the bottleneck of one row and one panel. Sums are exact, so their order does not matter.
// fetches: the tile fetches the weights of the next panels while it multiplies.
//
// DotColumn sums over one row and one column that are stored in one piece.
//
// A tile has up to kDotRows rows of one panel, or up to kWideDotRows rows of kDotPanels panels. Its sums, the weights
// and one vector of activations fit into the registers.
//
// kHasSignedInputs: activations are stored as 0 .. 255 less 128, for instructions that multiply signed numbers only.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace antiphon {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool kHasSignedInputs = true;
#else
constexpr bool kHasSignedInputs = false;
#endif

// Four adjacent activations.
ANTIPHON_INLINE int32_t Four(const uint8_t* from) {
  int32_t four;
  memcpy(&four, from, sizeof(four));
  return four;
}

constexpr int kFetchRows = 3;  // least height of a tile that fetches

// Fetches the weights of the next panels for four inputs into the second-level cache.
template <int Panels>
ANTIPHON_INLINE void FetchNext(const int8_t* columns, int64_t padded, int64_t k) {
#pragma GCC unroll 4
  for (int p = 0; p < Panels; ++p) __builtin_prefetch(columns + ((Panels + p) * padded + k) * kPanel, 0, 2);
}

#if defined(__AVX512VNNI__)

constexpr int kDotRows = 6, kDotPanels = 4, kWideDotRows = 6;

// One core of a Zen 5, of 522 billion multiply-adds a second: inlined 345, as a function 455.
template <int Rows, int Panels, bool fetches>
__attribute__((noinline)) void DotTile(const uint8_t* rows, const int8_t* columns, int64_t padded, int32_t* sums) {
  __m512i chains[Rows][Panels];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) chains[r][p] = _mm512_setzero_si512();
  }
  for (int64_t k = 0; k < padded; k += 4) {
    __m512i weights[Panels];
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) weights[p] = _mm512_loadu_si512(columns + (p * padded + k) * kPanel);
    if constexpr (fetches) FetchNext<Panels>(columns, padded, k);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m512i inputs = _mm512_set1_epi32(Four(rows + r * padded + k));
#pragma GCC unroll 16
      for (int p = 0; p < Panels; ++p) chains[r][p] = _mm512_dpbusd_epi32(chains[r][p], inputs, weights[p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) _mm512_storeu_si512(sums + (r * Panels + p) * kPanel, chains[r][p]);
  }
}

// One row and one panel: memory is the bottleneck, and is read in order. Four chains of additions hide the latency of
// an instruction.
template <>
inline void DotTile<1, 1, false>(const uint8_t* row, const int8_t* columns, int64_t padded, int32_t* sums) {
  __m512i chains[4] = {};
  for (int64_t k = 0; k < padded; k += 16) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) {
      const __m512i weights = _mm512_loadu_si512(columns + (k + 4 * chain) * kPanel);
      chains[chain] = _mm512_dpbusd_epi32(chains[chain], _mm512_set1_epi32(Four(row + k + 4 * chain)), weights);
    }
  }
  const __m512i halves[2] = {_mm512_add_epi32(chains[0], chains[1]), _mm512_add_epi32(chains[2], chains[3])};
  _mm512_storeu_si512(sums, _mm512_add_epi32(halves[0], halves[1]));
}

ANTIPHON_INLINE int32_t DotColumn(const uint8_t* row, const int8_t* column, int64_t padded) {
  __m512i sum = _mm512_setzero_si512();
  for (int64_t k = 0; k < padded; k += 64) {
    sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(row + k), _mm512_loadu_si512(column + k));
  }
  return _mm512_reduce_add_epi32(sum);
}

#elif defined(__AVX2__)

ANTIPHON_INLINE __m256i LoadHalf(const int8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
ANTIPHON_INLINE void StoreHalf(int32_t* to, __m256i half) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
}
ANTIPHON_INLINE int32_t SumOf(__m256i sums) {
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

#if defined(__AVXVNNI__)

constexpr int kDotRows = 6, kDotPanels = 2, kWideDotRows = 3;

// Half a panel, eight columns, fills a register (one core of a Zen 5: 230 billion multiply-adds a second, with the
// instructions of AVX2 85).
template <int Rows, int Panels, bool fetches>
__attribute__((noinline)) void DotTile(const uint8_t* rows, const int8_t* columns, int64_t padded, int32_t* sums) {
  constexpr int kHalves = 2 * Panels;
  __m256i chains[Rows][kHalves];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int h = 0; h < kHalves; ++h) chains[r][h] = _mm256_setzero_si256();
  }
  for (int64_t k = 0; k < padded; k += 4) {
    __m256i weights[kHalves];
#pragma GCC unroll 16
    for (int h = 0; h < kHalves; ++h) weights[h] = LoadHalf(columns + (h / 2 * padded + k) * kPanel + h % 2 * 32);
    if constexpr (fetches) FetchNext<Panels>(columns, padded, k);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m256i inputs = _mm256_set1_epi32(Four(rows + r * padded + k));
#pragma GCC unroll 16
      for (int h = 0; h < kHalves; ++h) chains[r][h] = _mm256_dpbusd_avx_epi32(chains[r][h], inputs, weights[h]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int h = 0; h < kHalves; ++h) StoreHalf(sums + r * Panels * kPanel + 8 * h, chains[r][h]);
  }
}

template <>
inline void DotTile<1, 1, false>(const uint8_t* row, const int8_t* columns, int64_t padded, int32_t* sums) {
  __m256i chains[4][2] = {};
  for (int64_t k = 0; k < padded; k += 16) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) {
      const __m256i inputs = _mm256_set1_epi32(Four(row + k + 4 * chain));
      const int8_t* weights = columns + (k + 4 * chain) * kPanel;
      chains[chain][0] = _mm256_dpbusd_avx_epi32(chains[chain][0], inputs, LoadHalf(weights));
      chains[chain][1] = _mm256_dpbusd_avx_epi32(chains[chain][1], inputs, LoadHalf(weights + 32));
    }
  }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i first = _mm256_add_epi32(chains[0][h], chains[1][h]);
    StoreHalf(sums + 8 * h, _mm256_add_epi32(first, _mm256_add_epi32(chains[2][h], chains[3][h])));
  }
}

ANTIPHON_INLINE int32_t DotColumn(const uint8_t* row, const int8_t* column, int64_t padded) {
  __m256i sums[2] = {};
  for (int64_t k = 0; k < padded; k += 64) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i inputs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k + 32 * h));
      sums[h] = _mm256_dpbusd_avx_epi32(sums[h], inputs, LoadHalf(column + k + 32 * h));
    }
  }
  return SumOf(_mm256_add_epi32(sums[0], sums[1]));
}

#else

constexpr int kDotRows = 6, kDotPanels = 1, kWideDotRows = 6;

// Multiplied in 16 bits, since sums of two 8-bit products would saturate. Weights with even and odd numbers are widened
// by shifts, once for all rows of the tile (one core of a Zen 5: one row at a time 60 billion multiply-adds a second,
// six rows 85).
template <int Rows, int Panels, bool fetches>
__attribute__((noinline)) void DotTile(const uint8_t* rows, const int8_t* columns, int64_t padded, int32_t* sums) {
  static_assert(Panels == 1, "one panel has as many sums as there are registers");
  const __m256i low_bytes = _mm256_set1_epi16(0xff);
  __m256i chains[Rows][2];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) chains[r][0] = chains[r][1] = _mm256_setzero_si256();
  for (int64_t k = 0; k < padded; k += 4) {
    if constexpr (fetches) FetchNext<Panels>(columns, padded, k);
    __m256i even[2], odd[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i weights = LoadHalf(columns + k * kPanel + 32 * h);
      odd[h] = _mm256_srai_epi16(weights, 8);
      even[h] = _mm256_srai_epi16(_mm256_slli_epi16(weights, 8), 8);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const __m256i inputs = _mm256_set1_epi32(Four(rows + r * padded + k));
      const __m256i even_inputs = _mm256_and_si256(inputs, low_bytes), odd_inputs = _mm256_srli_epi16(inputs, 8);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        chains[r][h] = _mm256_add_epi32(chains[r][h], _mm256_madd_epi16(even[h], even_inputs));
        chains[r][h] = _mm256_add_epi32(chains[r][h], _mm256_madd_epi16(odd[h], odd_inputs));
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    StoreHalf(sums + r * kPanel, chains[r][0]);
    StoreHalf(sums + r * kPanel + 8, chains[r][1]);
  }
}

// One row: widened weights would serve only once. Instead, each activation is split into two numbers of 4 bits, whose
// products can be added in 16 bits: eight sums of two products are at most 8 * 2 * 15 * 128 = 30720.
template <>
inline void DotTile<1, 1, false>(const uint8_t* row, const int8_t* columns, int64_t padded, int32_t* sums) {
  constexpr int kSteps = 8;
  const __m256i low_bits = _mm256_set1_epi8(15);
  __m256i totals[2] = {};
  for (int64_t k = 0; k < padded; k += 4 * kSteps) {
    const __m256i inputs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k));
    alignas(32) int32_t low_inputs[kSteps], high_inputs[kSteps];
    StoreHalf(low_inputs, _mm256_and_si256(inputs, low_bits));
    StoreHalf(high_inputs, _mm256_and_si256(_mm256_srli_epi16(inputs, 4), low_bits));
    __m256i low[2] = {}, high[2] = {};
#pragma GCC unroll 2
    for (int step = 0; step < kSteps; ++step) {
      const __m256i lows = _mm256_set1_epi32(low_inputs[step]), highs = _mm256_set1_epi32(high_inputs[step]);
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m256i weights = LoadHalf(columns + (k + 4 * step) * kPanel + 32 * h);
        asm("" : "+x"(weights));  // loaded once: loads are the bottleneck
        low[h] = _mm256_add_epi16(low[h], _mm256_maddubs_epi16(lows, weights));
        high[h] = _mm256_add_epi16(high[h], _mm256_maddubs_epi16(highs, weights));
      }
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      totals[h] = _mm256_add_epi32(totals[h], _mm256_madd_epi16(low[h], _mm256_set1_epi16(1)));
      totals[h] = _mm256_add_epi32(totals[h], _mm256_madd_epi16(high[h], _mm256_set1_epi16(16)));
    }
  }
  StoreHalf(sums, totals[0]);
  StoreHalf(sums + 8, totals[1]);
}

// Widened to 16 bits, since sums of two 8-bit products would saturate.
ANTIPHON_INLINE int32_t DotColumn(const uint8_t* row, const int8_t* column, int64_t padded) {
  __m256i sums[2] = {};
  for (int64_t k = 0; k < padded; k += 32) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const auto* inputs = reinterpret_cast<const __m128i*>(row + k + 16 * h);
      const auto* weights = reinterpret_cast<const __m128i*>(column + k + 16 * h);
      const __m256i products =
          _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128(inputs)), _mm256_cvtepi8_epi16(_mm_loadu_si128(weights)));
      sums[h] = _mm256_add_epi32(sums[h], products);
    }
  }
  return SumOf(_mm256_add_epi32(sums[0], sums[1]));
}

#endif  // AVX-VNNI
#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int kDotRows = 6, kDotPanels = 1, kWideDotRows = 6;

ANTIPHON_INLINE int8x16_t LoadSigned(const void* from) { return vld1q_s8(static_cast<const int8_t*>(from)); }

// Adds the products of four inputs, the lane of sixteen, with their weights [16][4].
template <int Rows, int Lane>
ANTIPHON_INLINE void AddFour(const int8x16_t (&inputs)[Rows], const int8_t* weights, int32x4_t (&chains)[Rows][4]) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const int8x16_t columns = LoadSigned(weights + 16 * q);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) chains[r][q] = vdotq_laneq_s32(chains[r][q], columns, inputs[r], Lane);
  }
}

// A quarter of a panel, four columns, fills a register.
template <int Rows>
ANTIPHON_INLINE void DotRows(const uint8_t* rows, const int8_t* columns, int64_t padded, int32_t* sums) {
  int32x4_t chains[Rows][4];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) chains[r][q] = vdupq_n_s32(0);
  }
  for (int64_t k = 0; k < padded; k += 16) {
    int8x16_t inputs[Rows];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) inputs[r] = LoadSigned(rows + r * padded + k);
    const int8_t* weights = columns + k * kPanel;
    AddFour<Rows, 0>(inputs, weights, chains);
    AddFour<Rows, 1>(inputs, weights + 64, chains);
    AddFour<Rows, 2>(inputs, weights + 128, chains);
    AddFour<Rows, 3>(inputs, weights + 192, chains);
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) vst1q_s32(sums + r * kPanel + 4 * q, chains[r][q]);
  }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

ANTIPHON_INLINE int8x16_t LowHalves(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip1q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}
ANTIPHON_INLINE int8x16_t HighHalves(int8x16_t a, int8x16_t b) {
  return vreinterpretq_s8_s64(vzip2q_s64(vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b)));
}

// An instruction multiplies two rows and two columns, eight inputs each. Two vectors of weights, of four inputs and four
// columns, are interleaved for that, once for all rows of the tile. An odd last row is a pair with itself.
template <int Rows>
ANTIPHON_INLINE void MatrixRows(const uint8_t* rows, const int8_t* columns, int64_t padded, int32_t* sums) {
  constexpr int kPairs = (Rows + 1) / 2;
  int32x4_t chains[kPairs][8];  // of two rows and two columns
#pragma GCC unroll 16
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) chains[pair][c] = vdupq_n_s32(0);
  }
  for (int64_t k = 0; k < padded; k += 8) {
    int8x16_t inputs[kPairs];
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairs; ++pair) {
      const auto* first = reinterpret_cast<const int8_t*>(rows + 2 * pair * padded + k);
      inputs[pair] = vcombine_s8(vld1_s8(first), vld1_s8(2 * pair + 1 < Rows ? first + padded : first));
    }
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int32x4_t low = vreinterpretq_s32_s8(LoadSigned(columns + k * kPanel + 16 * q));
      const int32x4_t high = vreinterpretq_s32_s8(LoadSigned(columns + k * kPanel + 64 + 16 * q));
      const int8x16_t left = vreinterpretq_s8_s32(vzip1q_s32(low, high));
      const int8x16_t right = vreinterpretq_s8_s32(vzip2q_s32(low, high));
#pragma GCC unroll 16
      for (int pair = 0; pair < kPairs; ++pair) {
        chains[pair][2 * q] = vmmlaq_s32(chains[pair][2 * q], inputs[pair], left);
        chains[pair][2 * q + 1] = vmmlaq_s32(chains[pair][2 * q + 1], inputs[pair], right);
      }
    }
  }
#pragma GCC unroll 16
  for (int pair = 0; pair < kPairs; ++pair) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const int8x16_t left = vreinterpretq_s8_s32(chains[pair][2 * q]);
      const int8x16_t right = vreinterpretq_s8_s32(chains[pair][2 * q + 1]);
      int32_t* to = sums + 2 * pair * kPanel + 4 * q;
      vst1q_s32(to, vreinterpretq_s32_s8(LowHalves(left, right)));
      if (2 * pair + 1 < Rows) vst1q_s32(to + kPanel, vreinterpretq_s32_s8(HighHalves(left, right)));
    }
  }
}

#endif  // matrices of int8

template <int Rows, int Panels, bool fetches>
__attribute__((noinline)) void DotTile(const uint8_t* rows, const int8_t* columns, int64_t padded, int32_t* sums) {
  static_assert(Panels == 1, "one panel has as many sums as there are registers");
#if defined(__ARM_FEATURE_MATMUL_INT8)
  if constexpr (Rows > 1) return MatrixRows<Rows>(rows, columns, padded, sums);
#endif
  DotRows<Rows>(rows, columns, padded, sums);
}

ANTIPHON_INLINE int32_t DotColumn(const uint8_t* row, const int8_t* column, int64_t padded) {
  int32x4_t chains[4] = {};
  for (int64_t k = 0; k < padded; k += 64) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      chains[i] = vdotq_s32(chains[i], LoadSigned(row + k + 16 * i), LoadSigned(column + k + 16 * i));
    }
  }
  return vaddvq_s32(vaddq_s32(vaddq_s32(chains[0], chains[1]), vaddq_s32(chains[2], chains[3])));
}

#else

constexpr int kDotRows = 1, kDotPanels = 1, kWideDotRows = 1;

template <int Rows, int Panels, bool fetches>
ANTIPHON_INLINE void DotTile(const uint8_t* row, const int8_t* columns, int64_t padded, int32_t* sums) {
  static_assert(Rows == 1 && Panels == 1, "one at a time");
  int32_t totals[kPanel] = {};
  for (int64_t k = 0; k < padded; k += 4) {
    const int8_t* weights = columns + k * kPanel;
    for (int64_t column = 0; column < kPanel; ++column) {
      for (int64_t j = 0; j < 4; ++j) totals[column] += static_cast<int32_t>(row[k + j]) * weights[4 * column + j];
    }
  }
  memcpy(sums, totals, sizeof(totals));
}

ANTIPHON_INLINE int32_t DotColumn(const uint8_t* row, const int8_t* column, int64_t padded) {
  int32_t sum = 0;
  for (int64_t k = 0; k < padded; ++k) sum += static_cast<int32_t>(row[k]) * column[k];
  return sum;
}

#endif

}  // namespace
}  // namespace antiphon
