// Products with 4-bit weights: exact sums within a group of 32 inputs, float32 from group to group in rising order.
// Included by one file per instruction set; simd.h lists the rules for such files.
//
// An integer of 4 bits is used in the upper nibble of a byte, that is, as 16 times itself. This needs a mask, and for
// lower nibbles a shift, but no sign extension. The scales include the factor 1 / 16.
#pragma once

#include "kernels.h"
#include "linear_kernels.h"
#include "simd.h"

namespace antiphon {
namespace {

constexpr int64_t kGroupBytes = kNibbleGroup / 2 * kPanel;  // of one panel

#if defined(__AVX512VNNI__)
constexpr int kNibbleRows = 4, kNibblePanels = 2;

// Sums of Rows x Panels over one group. rows: first input of the group in the first row. columns: the group in the
// first panel; the same group of the next panel is `spacing` bytes further.
template <int Rows, int Panels>
ANTIPHON_INLINE void NibbleGroup(const uint8_t* rows, int64_t padded, const uint8_t* columns, int64_t spacing,
                                 I32 (&sums)[Rows][Panels]) {
  const __m512i upper = _mm512_set1_epi8(static_cast<char>(0xf0));
  __m512i chains[Rows][Panels] = {};
  for (int64_t k = 0; k < kNibbleGroup; k += 8) {
    __m512i low[Panels], high[Panels];
    for (int p = 0; p < Panels; ++p) {
      const __m512i both = _mm512_loadu_si512(columns + p * spacing + k / 2 * kPanel);
      low[p] = _mm512_and_si512(_mm512_slli_epi16(both, 4), upper);
      high[p] = _mm512_and_si512(both, upper);
    }
    for (int r = 0; r < Rows; ++r) {
      int32_t four[2];
      memcpy(four, rows + r * padded + k, sizeof(four));
      const __m512i first = _mm512_set1_epi32(four[0]), second = _mm512_set1_epi32(four[1]);
      for (int p = 0; p < Panels; ++p) {
        chains[r][p] = _mm512_dpbusd_epi32(chains[r][p], first, low[p]);
        chains[r][p] = _mm512_dpbusd_epi32(chains[r][p], second, high[p]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int p = 0; p < Panels; ++p) sums[r][p] = reinterpret_cast<I32>(chains[r][p]);
  }
}
#else
constexpr int kNibbleRows = 1, kNibblePanels = 1;

// Sums of one row and panel over one group.
ANTIPHON_INLINE I32 NibbleDots(const uint8_t* row, const uint8_t* panel) {
#if defined(__AVX2__)
  // Widened to 16 bits, as in DotPanel; a quarter holds four outputs.
  const __m128i upper = _mm_set1_epi8(static_cast<char>(0xf0));
  __m256i sums[4] = {};
  for (int64_t k = 0; k < kNibbleGroup; k += 8) {
    int32_t four[2];
    memcpy(four, row + k, sizeof(four));
    const __m256i first = _mm256_cvtepu8_epi16(_mm_set1_epi32(four[0]));
    const __m256i second = _mm256_cvtepu8_epi16(_mm_set1_epi32(four[1]));
    for (int64_t quarter = 0; quarter < 4; ++quarter) {
      const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + k / 2 * kPanel + 16 * quarter));
      const __m256i low = _mm256_cvtepi8_epi16(_mm_and_si128(_mm_slli_epi16(both, 4), upper));
      const __m256i high = _mm256_cvtepi8_epi16(_mm_and_si128(both, upper));
      sums[quarter] = _mm256_add_epi32(sums[quarter], _mm256_madd_epi16(low, first));
      sums[quarter] = _mm256_add_epi32(sums[quarter], _mm256_madd_epi16(high, second));
    }
  }
  union Halves {
    __m256i half[2];
    I32 whole;
  } result;
  for (int half = 0; half < 2; ++half) {
    const __m256i pairs = _mm256_hadd_epi32(sums[2 * half], sums[2 * half + 1]);
    result.half[half] = _mm256_permute4x64_epi64(pairs, 0xd8);  // hadd adds within each half of a vector
  }
  return result.whole;
#else
  int32_t sums[kPanel] = {};
  for (int64_t k = 0; k < kNibbleGroup; k += 8) {
    const uint8_t* bytes = panel + k / 2 * kPanel;
    for (int64_t column = 0; column < kPanel; ++column) {
      for (int64_t j = 0; j < 4; ++j) {
        const int32_t both = bytes[4 * column + j];
        sums[column] += row[k + j] * static_cast<int8_t>(both << 4);
        sums[column] += row[k + 4 + j] * static_cast<int8_t>(both & 0xf0);
      }
    }
  }
  I32 result;
  memcpy(&result, sums, sizeof(result));
  return result;
#endif
}

template <int Rows, int Panels>
ANTIPHON_INLINE void NibbleGroup(const uint8_t* rows, int64_t, const uint8_t* columns, int64_t,
                                 I32 (&sums)[Rows][Panels]) {
  static_assert(Rows == 1 && Panels == 1, "one at a time");
  sums[0][0] = NibbleDots(rows, columns);
}
#endif

template <Activation kind, int Rows, int Panels>
ANTIPHON_INLINE void NibbleTile(const QuantizedRows& rows, int64_t row, const NibbleWeight& weight, int64_t panel,
                                float* out, int64_t stride) {
  const int64_t padded = weight.padded_inputs, groups = padded / kNibbleGroup;
  F32 totals[Rows][Panels] = {};
  for (int64_t group = 0; group < groups; ++group) {
    I32 sums[Rows][Panels];
    NibbleGroup<Rows, Panels>(rows.data + row * padded + group * kNibbleGroup, padded,
                              weight.data + (panel * groups + group) * kGroupBytes, groups * kGroupBytes, sums);
    for (int p = 0; p < Panels; ++p) {
      const F32 ratio = LoadElements(weight.ratios + ((panel + p) * groups + group) * kPanel);
      for (int r = 0; r < Rows; ++r) totals[r][p] = Fma(ToFloat(sums[r][p]), ratio, totals[r][p]);
    }
  }
  for (int p = 0; p < Panels; ++p) {
    const int64_t column = (panel + p) * kPanel;
    const int width = PanelWidth(weight.outputs, panel + p);
    const F32 scales = Load(weight.scales + column), offsets = Load(weight.offsets + column);
    const F32 bias = weight.bias == nullptr ? F32{} : LoadPart(weight.bias + column, width);
    for (int r = 0; r < Rows; ++r) {
      const F32 zero = Splat(static_cast<float>(-rows.zeros[row + r]));
      const F32 value = Fma(offsets, zero, totals[r][p]) * scales;
      const F32 step = Splat(rows.steps[row + r]);
      StorePart(out + r * stride + p * kPanel, Activate<kind>(Fma(value, step, bias)), width);
    }
  }
}

template <Activation kind, int Panels>
ANTIPHON_INLINE void NibbleColumns(const QuantizedRows& rows, const NibbleWeight& weight, int64_t panel, float* out,
                                   int64_t stride) {
  int64_t row = 0;
  for (; rows.rows - row >= kNibbleRows; row += kNibbleRows) {
    NibbleTile<kind, kNibbleRows, Panels>(rows, row, weight, panel, out + row * stride, stride);
  }
  for (; row < rows.rows; ++row) NibbleTile<kind, 1, Panels>(rows, row, weight, panel, out + row * stride, stride);
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
