// Products with 4-bit weights: exact sums within a group of 32 inputs, float32 from group to group in rising order.
// Included by one file per instruction set; simd.h lists the rules for such files.
//
// NibbleTile<Rows, Panels> writes sums [Rows][Panels][16]. An integer of 4 bits counts 16 times, since in the upper
// nibble of a byte it needs no sign extension. The scales include the factor 1 / 16.
#pragma once

#include "kernels.h"
#include "linear_kernels.h"
#include "simd.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr int64_t kGroupBytes = kNibbleGroup / 2 * kPanel;  // of one panel

// Operands of a tile.
struct NibbleOperands {
  const uint8_t* rows;     // the first row
  const uint8_t* columns;  // the first panel
  const uint16_t* ratios;  // of the first panel
  int64_t groups;

  // Four inputs of a group, beginning at input k of it.
  ANTIPHON_INLINE int32_t Inputs(int64_t row, int64_t group, int64_t k) const {
    return Four(rows + (row * groups + group) * kNibbleGroup + k);
  }
  // Inputs k .. k + 7 of a group.
  ANTIPHON_INLINE const uint8_t* Weights(int64_t panel, int64_t group, int64_t k) const {
    return columns + (panel * groups + group) * kGroupBytes + k / 2 * kPanel;
  }
  ANTIPHON_INLINE F32 Ratios(int64_t panel, int64_t group) const {
    return LoadElements(ratios + (panel * groups + group) * kPanel);
  }
};

#if defined(__AVX512VNNI__)

constexpr int kNibbleRows = 6, kNibblePanels = 2;

template <int Rows, int Panels>
__attribute__((noinline)) void NibbleTile(const NibbleOperands& in, float* sums) {
  const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0));
  F32 totals[Rows][Panels];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) totals[r][p] = F32{};
  }
  for (int64_t group = 0; group < in.groups; ++group) {
    __m512i chains[Rows][Panels];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
      for (int p = 0; p < Panels; ++p) chains[r][p] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < kNibbleGroup; k += 8) {
      __m512i low[Panels], high[Panels];
#pragma GCC unroll 16
      for (int p = 0; p < Panels; ++p) {
        const __m512i both = _mm512_loadu_si512(in.Weights(p, group, k));
        low[p] = _mm512_and_si512(_mm512_slli_epi16(both, 4), upper);
        high[p] = _mm512_and_si512(both, upper);
      }
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const __m512i first = _mm512_set1_epi32(in.Inputs(r, group, k));
        const __m512i second = _mm512_set1_epi32(in.Inputs(r, group, k + 4));
#pragma GCC unroll 16
        for (int p = 0; p < Panels; ++p) {
          chains[r][p] = _mm512_dpbusd_epi32(chains[r][p], first, low[p]);
          chains[r][p] = _mm512_dpbusd_epi32(chains[r][p], second, high[p]);
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) {
      const F32 ratio = in.Ratios(p, group);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        totals[r][p] = Fma({{_mm512_cvtepi32_ps(chains[r][p])}}, ratio, totals[r][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) Store(sums + (r * Panels + p) * kPanel, totals[r][p]);
  }
}

#elif defined(__AVX2__)

constexpr int kNibbleRows = 4, kNibblePanels = 1;

#if defined(__AVXVNNI__)

constexpr int kGroupUnroll = 4;

// Weights in the upper nibbles of bytes.
ANTIPHON_INLINE __m256i LowWeights(__m256i both) {
  return _mm256_and_si256(_mm256_slli_epi16(both, 4), _mm256_set1_epi8(static_cast<char>(0xf0)));
}
ANTIPHON_INLINE __m256i HighWeights(__m256i both) {
  return _mm256_and_si256(both, _mm256_set1_epi8(static_cast<char>(0xf0)));
}
ANTIPHON_INLINE __m256i AddProducts(__m256i sums, __m256i inputs, __m256i weights) {
  return _mm256_dpbusd_avx_epi32(sums, inputs, weights);
}
ANTIPHON_INLINE __m256i GroupSums(__m256i sums) { return sums; }

#else

constexpr int kGroupUnroll = 1;  // more would move loads forward until the sums lose their registers: 128 -> 105

// Weights as bytes with a sign.
ANTIPHON_INLINE __m256i Extended(__m256i nibbles) {
  const __m128i integers = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(integers), nibbles);
}
ANTIPHON_INLINE __m256i LowWeights(__m256i both) { return Extended(_mm256_and_si256(both, _mm256_set1_epi8(15))); }
ANTIPHON_INLINE __m256i HighWeights(__m256i both) { return LowWeights(_mm256_srli_epi16(both, 4)); }

// In 16 bits: the sixteen products of a group that meet there are at most 16 * 255 * 8 = 32640.
ANTIPHON_INLINE __m256i AddProducts(__m256i sums, __m256i inputs, __m256i weights) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(inputs, weights));
}
ANTIPHON_INLINE __m256i GroupSums(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(16)); }

#endif

template <int Rows, int Panels>
__attribute__((noinline)) void NibbleTile(const NibbleOperands& in, float* sums) {
  static_assert(Panels == 1, "one panel has as many sums as there are registers");
  F32 totals[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) totals[r] = F32{};
  for (int64_t group = 0; group < in.groups; ++group) {
    __m256i chains[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) chains[r][0] = chains[r][1] = _mm256_setzero_si256();
#pragma GCC unroll kGroupUnroll
    for (int64_t k = 0; k < kNibbleGroup; k += 8) {
      const auto* both = reinterpret_cast<const __m256i*>(in.Weights(0, group, k));
      const __m256i first = _mm256_loadu_si256(both), second = _mm256_loadu_si256(both + 1);
      const __m256i low[2] = {LowWeights(first), LowWeights(second)};
      const __m256i high[2] = {HighWeights(first), HighWeights(second)};
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const __m256i low_inputs = _mm256_set1_epi32(in.Inputs(r, group, k));
        const __m256i high_inputs = _mm256_set1_epi32(in.Inputs(r, group, k + 4));
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          chains[r][h] = AddProducts(AddProducts(chains[r][h], low_inputs, low[h]), high_inputs, high[h]);
        }
      }
    }
    const F32 ratio = in.Ratios(0, group);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const F32 exact = {{_mm256_cvtepi32_ps(GroupSums(chains[r][0])), _mm256_cvtepi32_ps(GroupSums(chains[r][1]))}};
      totals[r] = Fma(exact, ratio, totals[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) Store(sums + r * kPanel, totals[r]);
}

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int kNibbleRows = 3, kNibblePanels = 1;

// Adds the products of eight inputs, the lanes Lane and Lane + 1 of sixteen, with their weights.
template <int Rows, int Lane>
ANTIPHON_INLINE void AddEight(const int8x16_t (&inputs)[Rows], const uint8_t* weights, int32x4_t (&chains)[Rows][4]) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const int8x16_t both = LoadSigned(weights + 16 * q);
    const int8x16_t low = vshlq_n_s8(both, 4), high = vandq_s8(both, vdupq_n_s8(static_cast<int8_t>(0xf0)));
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      chains[r][q] = vdotq_laneq_s32(chains[r][q], low, inputs[r], Lane);
      chains[r][q] = vdotq_laneq_s32(chains[r][q], high, inputs[r], Lane + 1);
    }
  }
}

template <int Rows, int Panels>
__attribute__((noinline)) void NibbleTile(const NibbleOperands& in, float* sums) {
  static_assert(Panels == 1, "one panel has as many sums as there are registers");
  F32 totals[Rows];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) totals[r] = F32{};
  for (int64_t group = 0; group < in.groups; ++group) {
    int32x4_t chains[Rows][4];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) chains[r][q] = vdupq_n_s32(0);
    }
#pragma GCC unroll 2
    for (int64_t k = 0; k < kNibbleGroup; k += 16) {
      int8x16_t inputs[Rows];
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) inputs[r] = LoadSigned(in.rows + (r * in.groups + group) * kNibbleGroup + k);
      AddEight<Rows, 0>(inputs, in.Weights(0, group, k), chains);
      AddEight<Rows, 2>(inputs, in.Weights(0, group, k + 8), chains);
    }
    const F32 ratio = in.Ratios(0, group);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const F32 exact = EachPart<F32>([&](int q) ANTIPHON_BODY { return vcvtq_f32_s32(chains[r][q]); });
      totals[r] = Fma(exact, ratio, totals[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) Store(sums + r * kPanel, totals[r]);
}

#else

constexpr int kNibbleRows = 1, kNibblePanels = 1;

template <int Rows, int Panels>
ANTIPHON_INLINE void NibbleTile(const NibbleOperands& in, float* sums) {
  static_assert(Rows == 1 && Panels == 1, "one at a time");
  F32 totals = {};
  for (int64_t group = 0; group < in.groups; ++group) {
    int32_t exact[kPanel] = {};
    for (int64_t k = 0; k < kNibbleGroup; k += 8) {
      const uint8_t* inputs = in.rows + group * kNibbleGroup + k;
      const uint8_t* bytes = in.Weights(0, group, k);
      for (int64_t column = 0; column < kPanel; ++column) {
        for (int64_t j = 0; j < 4; ++j) {
          const int32_t both = bytes[4 * column + j];
          exact[column] += inputs[j] * static_cast<int8_t>(both << 4);
          exact[column] += inputs[4 + j] * static_cast<int8_t>(both & 0xf0);
        }
      }
    }
    totals = Fma(Converted<F32>(Load(exact)), in.Ratios(0, group), totals);
  }
  Store(sums, totals);
}

#endif

// Converts `height` rows of a panel's sums to outputs, beginning at `row`; they are `spacing` floats apart.
template <Activation kind>
ANTIPHON_INLINE void EmitNibbles(const float* sums, int64_t spacing, const QuantizedRows& rows, int64_t row, int height,
                                 const NibbleWeight& weight, int64_t panel, float* out, int64_t stride) {
  const int64_t column = panel * kPanel;
  const int width = PanelWidth(weight.outputs, panel);
  const F32 scales = Load(weight.scales + column), offsets = Load(weight.offsets + column);
  const F32 bias = weight.bias == nullptr ? F32{} : LoadPart(weight.bias + column, width);
  const float* outliers = weight.outliers.weights + column * weight.outliers.count;
  for (int r = 0; r < height; ++r) {
    const F32 zero = Splat(static_cast<float>((kHasSignedInputs ? kMiddle : 0) - rows.zeros[row + r]));
    const F32 value = Fma(offsets, zero, Load(sums + r * spacing)) * scales;
    const F32 sum = WithOutliers(Fma(value, Splat(rows.steps[row + r]), bias), rows, row + r, outliers);
    StorePart(out + r * stride, Activate<kind>(sum), width);
  }
}

template <Activation kind, int Panels>
ANTIPHON_INLINE void NibbleColumns(const QuantizedRows& rows, const NibbleWeight& weight, int64_t panel, float* out,
                                   int64_t stride) {
  const int64_t padded = weight.padded_inputs, groups = padded / kNibbleGroup;
  ForTiles(rows.rows, kNibbleRows, [&](int64_t row, int height) {
    const NibbleOperands in = {rows.data + row * padded, weight.data + panel * groups * kGroupBytes,
                               weight.ratios + panel * groups * kPanel, groups};
    alignas(64) float sums[kNibbleRows * Panels * kPanel];
    WithHeight<kNibbleRows>(height, [&](auto constant) { NibbleTile<decltype(constant)::value, Panels>(in, sums); });
    for (int p = 0; p < Panels; ++p) {
      EmitNibbles<kind>(sums + p * kPanel, Panels * kPanel, rows, row, height, weight, panel + p,
                        out + row * stride + p * kPanel, stride);
    }
  });
}

void NibbleProduct(const QuantizedRows& rows, const NibbleWeight& weight, Activation activation, int64_t begin,
                   int64_t end, float* out, int64_t stride) {
  WithActivation(activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    int64_t panel = begin;
    for (; end - panel >= kNibblePanels; panel += kNibblePanels) {
      NibbleColumns<kind, kNibblePanels>(rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
    for (; panel < end; ++panel) {
      NibbleColumns<kind, 1>(rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
  });
}

}  // namespace
}  // namespace antiphon
