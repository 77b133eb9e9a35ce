// Products with packed weights: float32 with one accumulator per output, int8 with exact sums, and the activation
// functions that follow them. Included by one file per instruction set; simd.h lists the rules for such files.
//
// An output is the sum over inputs in rising order (float32), or an integer sum (int8), for any number of rows, so a
// row's result cannot depend on its neighbours.
#pragma once

#include "dot_kernels.h"
#include "kernels.h"
#include "simd.h"
#include "tiles.h"

namespace antiphon {
namespace {

constexpr int32_t kMiddle = 128;  // the zero point of rows with negative numbers

template <Activation kind>
struct Constant {
  static constexpr Activation value = kind;
};

// erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
ANTIPHON_INLINE F32 Erf(const F32& x) {
  const F32 size = Abs(x);
  const F32 t = 1.0f / Fma(size, Splat(0.3275911f), Splat(1.0f));
  F32 p = Fma(t, Splat(1.061405429f), Splat(-1.453152027f));
  p = Fma(p, t, Splat(1.421413741f));
  p = Fma(p, t, Splat(-0.284496736f));
  p = Fma(p, t, Splat(0.254829592f));
  const F32 y = 1.0f - p * t * Exp(-size * size);
  return Select(x < 0.0f, -y, y);
}

// x times the logistic function of x, in the form whose exponential cannot overflow.
ANTIPHON_INLINE F32 Silu(const F32& x) {
  const F32 e = Exp(-Abs(x));
  return Select(x < 0.0f, x * e, x) / (1.0f + e);
}

template <Activation kind>
ANTIPHON_INLINE F32 Activate(const F32& x) {
  if constexpr (kind == Activation::kRelu) return Select(x < 0.0f, F32{}, x);
  if constexpr (kind == Activation::kGelu) return x * 0.5f * (1.0f + Erf(x * 0.70710678f));
  if constexpr (kind == Activation::kGeluTanh) {
    return x * 0.5f * (1.0f + Tanh((x + x * x * x * 0.044715f) * 0.79788456f));
  }
  if constexpr (kind == Activation::kSilu) return Silu(x);
  if constexpr (kind == Activation::kTanh) return Tanh(x);
  if constexpr (kind == Activation::kGeluSigmoid) return Silu(x * 1.702f) * 0.58754407f;
  return x;
}

// Calls body(constant) with the activation as a template argument: a branch inside the loops costs more than their
// arithmetic.
template <typename Body>
ANTIPHON_INLINE void WithActivation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kRelu:
      return body(Constant<Activation::kRelu>{});
    case Activation::kGelu:
      return body(Constant<Activation::kGelu>{});
    case Activation::kGeluTanh:
      return body(Constant<Activation::kGeluTanh>{});
    case Activation::kSilu:
      return body(Constant<Activation::kSilu>{});
    case Activation::kTanh:
      return body(Constant<Activation::kTanh>{});
    case Activation::kGeluSigmoid:
      return body(Constant<Activation::kGeluSigmoid>{});
    case Activation::kNone:
      return body(Constant<Activation::kNone>{});
  }
}

ANTIPHON_INLINE int PanelWidth(int64_t outputs, int64_t panel) {
  const int64_t left = outputs - panel * kPanel;
  return static_cast<int>(left < kPanel ? left : kPanel);
}

// A tile has kFloatRows rows of one panel, or kWideFloatRows rows of kFloatPanels panels, so that its sums fit into the
// registers.
#if defined(__AVX512F__)
constexpr int kFloatRows = 6, kFloatPanels = 4, kWideFloatRows = 6;
#elif defined(__AVX2__)
constexpr int kFloatRows = 6, kFloatPanels = 4, kWideFloatRows = 1;
#elif defined(__ARM_NEON)
constexpr int kFloatRows = 6, kFloatPanels = 2, kWideFloatRows = 3;
#else
constexpr int kFloatRows = 3, kFloatPanels = 2, kWideFloatRows = 1;
#endif

// Rows x Panels sums at once: enough to hide the latency of a fused multiply-add. sums: [Rows][Panels][16].
template <int Rows, int Panels>
__attribute__((noinline)) void FloatTile(const float* x, const float* columns, int64_t inputs, float* sums) {
  F32 chains[Rows][Panels];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) chains[r][p] = F32{};
  }
  for (int64_t k = 0; k < inputs; ++k) {
    F32 weights[Panels];
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) weights[p] = Load(columns + (p * inputs + k) * kPanel);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const F32 value = Splat(x[r * inputs + k]);
#pragma GCC unroll 16
      for (int p = 0; p < Panels; ++p) chains[r][p] = Fma(value, weights[p], chains[r][p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) Store(sums + (r * Panels + p) * kPanel, chains[r][p]);
  }
}

// Adds the bias of a panel to `height` rows of sums, `spacing` floats apart, and applies the activation.
template <Activation kind>
ANTIPHON_INLINE void EmitFloats(const float* sums, int64_t spacing, int height, const FloatWeight& weight,
                                int64_t panel, float* out, int64_t stride) {
  const int width = PanelWidth(weight.outputs, panel);
  const F32 bias = weight.bias == nullptr ? F32{} : LoadPart(weight.bias + panel * kPanel, width);
  for (int r = 0; r < height; ++r) StorePart(out + r * stride, Activate<kind>(Load(sums + r * spacing) + bias), width);
}

// All rows of `Panels` panels.
template <Activation kind, int MostRows, int Panels>
ANTIPHON_INLINE void FloatColumns(const float* x, int64_t rows, const FloatWeight& weight, int64_t panel, float* out,
                                  int64_t stride) {
  const int64_t inputs = weight.inputs;
  const float* columns = weight.data + panel * inputs * kPanel;
  ForTiles(rows, MostRows, [&](int64_t row, int height) {
    alignas(64) float sums[MostRows * Panels * kPanel];
    WithHeight<MostRows>(height, [&](auto constant) {
      FloatTile<decltype(constant)::value, Panels>(x + row * inputs, columns, inputs, sums);
    });
    for (int p = 0; p < Panels; ++p) {
      EmitFloats<kind>(sums + p * kPanel, Panels * kPanel, height, weight, panel + p,
                       out + row * stride + p * kPanel, stride);
    }
  });
}

void FloatProduct(const float* x, int64_t rows, const FloatWeight& weight, Activation activation, int64_t begin,
                  int64_t end, float* out, int64_t stride) {
  WithActivation(activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    const bool is_wide = kWideFloatRows == kFloatRows || rows <= kWideFloatRows;
    int64_t panel = begin;
    for (; is_wide && end - panel >= kFloatPanels; panel += kFloatPanels) {
      FloatColumns<kind, kWideFloatRows, kFloatPanels>(x, rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
    for (; panel < end; ++panel) {
      FloatColumns<kind, kFloatRows, 1>(x, rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
  });
}

constexpr int kGroupVectors = static_cast<int>(kDepth) / kLanes;

// Rounds 64 numbers to the nearest integers, ties to even, and limits them to 0 .. 255; NaN becomes an arbitrary byte.
// With signed inputs it stores what is left after kMiddle is subtracted: the upper bit of a byte is the other one.
ANTIPHON_INLINE void StoreBytes(const F32 (&v)[kGroupVectors], uint8_t* to) {
#if defined(__AVX512F__)
  // Packing interleaves the quarters of registers; the permutation puts them in order.
  const __m512i first = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0].parts[0]), _mm512_cvtps_epi32(v[1].parts[0]));
  const __m512i second = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2].parts[0]), _mm512_cvtps_epi32(v[3].parts[0]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second)));
#elif defined(__AVX2__)
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
#pragma GCC unroll 2
  for (int pair = 0; pair < kGroupVectors; pair += 2) {
    __m256i words[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const F32& one = v[pair + i];
      words[i] = _mm256_packs_epi32(_mm256_cvtps_epi32(one.parts[0]), _mm256_cvtps_epi32(one.parts[1]));
    }
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words[0], words[1]), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + pair * kLanes), bytes);
  }
#elif defined(__ARM_NEON)
#pragma GCC unroll 4
  for (int i = 0; i < kGroupVectors; ++i) {
    int16x4_t words[F32::kParts];
#pragma GCC unroll 4
    for (int part = 0; part < F32::kParts; ++part) words[part] = vqmovn_s32(vcvtnq_s32_f32(v[i].parts[part]));
    const uint8x8_t low = vqmovun_s16(vcombine_s16(words[0], words[1]));
    const uint8x8_t high = vqmovun_s16(vcombine_s16(words[2], words[3]));
    vst1q_u8(to + i * kLanes, veorq_u8(vcombine_u8(low, high), vdupq_n_u8(kHasSignedInputs ? kMiddle : 0)));
  }
#else
  for (int i = 0; i < kGroupVectors; ++i) {
    const F32 bounded = Select(v[i] > 0.0f, Select(v[i] < 255.0f, v[i], Splat(255.0f)), F32{});
    const F32 shifted = bounded + 12582912.0f;  // 1.5 * 2^23: the last bits are the nearest integer
    for (int lane = 0; lane < kLanes; ++lane) to[i * kLanes + lane] = static_cast<uint8_t>(As<I32>(shifted)[lane]);
  }
#endif
}

// Rows without negative numbers use all 256 levels from 0 up; others use 255 levels around 128. Each group of 64
// inputs starts `spacing` bytes after the group before.
// mask: of the inputs that are no outliers, or null.
template <bool masked>
ANTIPHON_INLINE void QuantizeMasked(const float* x, const int32_t* mask, int64_t inputs, int64_t padded, uint8_t* row,
                                    int64_t spacing, float* step, int32_t* zero) {
  const auto without = [&](const F32& v, int64_t at) ANTIPHON_BODY {
    if constexpr (!masked) return v;
    return As<F32>(As<I32>(v) & Load(mask + at));
  };
  F32 low = Splat(kInfinity), high = Splat(-kInfinity);
  int64_t k = 0;
  for (; inputs - k >= kLanes; k += kLanes) {
    const F32 v = without(Load(x + k), k);
    low = Min(v, low);
    high = Max(v, high);
  }
  if (k < inputs) {
    const int part = static_cast<int>(inputs - k);
    const F32 v = without(LoadPart(x + k, part), k);  // zeros after the row change no sign and no maximum
    low = Min(v, low);
    high = Max(v, high);
  }
  const float least = -Largest(-low), most = Largest(high);
  const bool is_positive = least >= 0.0f;
  const float size = -least > most ? -least : most;
  const float levels = is_positive ? 255.0f : 127.0f;
  // A row of zeros has step 0 and integers `zero`, as has a row whose numbers are too small to divide by in float32.
  const float inverse = size > 1e-35f ? levels / size : 0.0f;
  *step = size > 1e-35f ? size / levels : 0.0f;
  *zero = is_positive ? 0 : kMiddle;
  const F32 factor = Splat(inverse), middle = Splat(static_cast<float>(*zero));
  for (k = 0; k < padded; k += kDepth, row += spacing) {
    F32 group[kGroupVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kGroupVectors; ++i) {
      const int64_t at = k + i * kLanes, left = inputs - at;
      const F32 v = left >= kLanes ? Load(x + at) : (left > 0 ? LoadPart(x + at, static_cast<int>(left)) : F32{});
      group[i] = Fma(without(v, at), factor, middle);
    }
    StoreBytes(group, row);
  }
}

// Quantises row `row` of x [rows, inputs] to `to`, and keeps its outliers.
ANTIPHON_INLINE void QuantizeRow(const float* x, int64_t inputs, int64_t padded, const QuantizedRows& rows, int64_t row,
                                 uint8_t* to, int64_t spacing) {
  const float* from = x + row * inputs;
  float* step = rows.steps + row;
  int32_t* zero = rows.zeros + row;
  if (rows.num_outliers == 0) return QuantizeMasked<false>(from, nullptr, inputs, padded, to, spacing, step, zero);
  for (int64_t i = 0; i < rows.num_outliers; ++i) rows.outliers[row * rows.num_outliers + i] = from[rows.columns[i]];
  QuantizeMasked<true>(from, rows.mask, inputs, padded, to, spacing, step, zero);
}

// value + the sum over outliers of row `row` in the order of their columns. weights: of a panel, [num_outliers, 16].
ANTIPHON_INLINE F32 WithOutliers(F32 value, const QuantizedRows& rows, int64_t row, const float* weights) {
  const float* outliers = rows.outliers + row * rows.num_outliers;
  for (int64_t i = 0; i < rows.num_outliers; ++i) value = Fma(Splat(outliers[i]), Load(weights + i * kPanel), value);
  return value;
}

void Quantize(const float* x, int64_t inputs, int64_t padded, const QuantizedRows& rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    QuantizeRow(x, inputs, padded, rows, row, rows.data + row * padded, kDepth);
  }
}

// Converts a panel's integer sums to outputs: (sum - zero * column sum) * scale * step + bias, activation.
template <Activation kind>
class Dequantizer {
 public:
  ANTIPHON_INLINE Dequantizer(const QuantizedWeight& weight, int64_t panel)
      : Dequantizer(weight.scales + panel * kPanel, weight.column_sums + panel * kPanel,
                    weight.bias == nullptr ? nullptr : weight.bias + panel * kPanel,
                    weight.outliers.weights + panel * weight.outliers.count * kPanel,
                    PanelWidth(weight.outputs, panel)) {}
  // Of `width` columns with these scales and column sums [16] and this bias [width], which can be null.
  ANTIPHON_INLINE Dequantizer(const float* scales, const int32_t* column_sums, const float* bias, const float* outliers,
                              int width)
      : offsets_(As<U32>(Load(column_sums)) * static_cast<uint32_t>(kMiddle)),
        scales_(Load(scales)),
        bias_(bias == nullptr ? F32{} : LoadPart(bias, width)),
        outliers_(outliers),
        width_(width) {}

  // Writes `height` rows of outputs, beginning at `row`; their sums are `spacing` integers apart.
  ANTIPHON_INLINE void Emit(const int32_t* sums, int64_t spacing, const QuantizedRows& rows, int64_t row,
                            int64_t height, float* out, int64_t stride) const {
#pragma GCC unroll 2
    for (int64_t r = 0; r < height; ++r) {
      // Zero points are 0 or kMiddle. Signed inputs are kMiddle less, and so are their zero points.
      const bool is_middle = rows.zeros[row + r] != 0;
      const U32 sum = As<U32>(Load(sums + r * spacing)), offset = offsets_ & (is_middle == kHasSignedInputs ? 0u : ~0u);
      const I32 exact = As<I32>(kHasSignedInputs ? sum + offset : sum - offset);
      const F32 value = Fma(Converted<F32>(exact) * scales_, Splat(rows.steps[row + r]), bias_);
      StorePart(out + r * stride, Activate<kind>(WithOutliers(value, rows, row + r, outliers_)), width_);
    }
  }

 private:
  U32 offsets_;  // unsigned, since a foreign model can have any column sums
  F32 scales_, bias_;
  const float* outliers_;
  int width_;
};

// All rows of `Panels` panels. The first tile fetches the weights of the next panels, unless it is so low that its loads
// take longer than its products. Cold weights otherwise stop the first tile of every column (shipped model, 60 rows, one
// core of a Zen 5, cold caches: a decoder step 1.41 -> 1.16 ms).
template <Activation kind, int MostRows, int Panels>
ANTIPHON_INLINE void QuantizedColumns(const QuantizedRows& rows, const QuantizedWeight& weight, int64_t panel,
                                      float* out, int64_t stride) {
  const int64_t padded = weight.padded_inputs, num_panels = RoundUp(weight.outputs, kPanel) / kPanel;
  const int8_t* columns = weight.data + panel * padded * kPanel;
  const bool has_next = num_panels - panel >= 2 * Panels;
  ForTiles(rows.rows, MostRows, [&](int64_t row, int height) {
    alignas(64) int32_t sums[MostRows * Panels * kPanel];
    const uint8_t* first = rows.data + row * padded;
    WithHeight<MostRows>(height, [&](auto constant) {
      constexpr int kHeight = decltype(constant)::value;
      if constexpr (kHeight >= kFetchRows) {
        if (row == 0 && has_next) return DotTile<kHeight, Panels, true>(first, columns, padded, sums);
      }
      DotTile<kHeight, Panels, false>(first, columns, padded, sums);
    });
    for (int p = 0; p < Panels; ++p) {
      const Dequantizer<kind> outputs(weight, panel + p);
      outputs.Emit(sums + p * kPanel, Panels * kPanel, rows, row, height, out + row * stride + p * kPanel, stride);
    }
  });
}

// Outputs of one row for columns of any order, which `columns` [outputs, padded_inputs] holds.
void ChosenColumns(const QuantizedRows& rows, int64_t row, const QuantizedWeight& weight, const int8_t* columns,
                   const int32_t* ids, int64_t count, float* out) {
  constexpr int64_t kAhead = 8;  // columns that are fetched while one is multiplied
  const int64_t padded = weight.padded_inputs;
  const uint8_t* inputs = rows.data + row * padded;
  for (int64_t first = 0; first < count; first += kPanel) {
    const int width = PanelWidth(count, first / kPanel);
    alignas(64) int32_t sums[kPanel] = {}, column_sums[kPanel] = {};
    alignas(64) float scales[kPanel] = {}, bias[kPanel] = {};
    for (int c = 0; c < width; ++c) {
      const int64_t at = first + c, id = ids[at];
      if (at + kAhead < count) {
        const int8_t* next = columns + ids[at + kAhead] * padded;
        for (int64_t byte = 0; byte < padded; byte += 64) __builtin_prefetch(next + byte);
      }
      sums[c] = DotColumn(inputs, columns + id * padded, padded);
      column_sums[c] = weight.column_sums[id];
      scales[c] = weight.scales[id];
      bias[c] = weight.bias == nullptr ? 0.0f : weight.bias[id];
    }
    const Dequantizer<Activation::kNone> outputs(scales, column_sums, bias, nullptr, width);
    outputs.Emit(sums, kPanel, rows, row, 1, out + first, kPanel);
  }
}

void QuantizedProduct(const QuantizedRows& rows, const QuantizedWeight& weight, Activation activation, int64_t begin,
                      int64_t end, float* out, int64_t stride) {
  WithActivation(activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    const bool is_wide = rows.rows > 1 && (kWideDotRows == kDotRows || rows.rows <= kWideDotRows);
    int64_t panel = begin;
    for (; is_wide && end - panel >= kDotPanels; panel += kDotPanels) {
      QuantizedColumns<kind, kWideDotRows, kDotPanels>(rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
    for (; panel < end; ++panel) {
      QuantizedColumns<kind, kDotRows, 1>(rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
  });
}

}  // namespace
}  // namespace antiphon
