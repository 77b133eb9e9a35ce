// Products with packed weights: float32 with one accumulator per output, int8 with exact sums, and the activation
// functions that follow them. Included by one file per instruction set; simd.h lists the rules for such files.
//
// An output is the sum over inputs in rising order (float32), or an integer sum (int8), for any number of rows, so a
// row's result cannot depend on its neighbours.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace antiphon {
namespace {

constexpr int32_t kMiddle = 128;  // the zero point of rows with negative numbers

template <Activation kind>
struct Constant {
  static constexpr Activation value = kind;
};

// erf by Abramowitz and Stegun 7.1.26: absolute error below 1.5e-7.
ANTIPHON_INLINE F32 Erf(F32 x) {
  const F32 size = Abs(x);
  const F32 t = 1.0f / Fma(size, Splat(0.3275911f), Splat(1.0f));
  F32 p = Fma(t, Splat(1.061405429f), Splat(-1.453152027f));
  p = Fma(p, t, Splat(1.421413741f));
  p = Fma(p, t, Splat(-0.284496736f));
  p = Fma(p, t, Splat(0.254829592f));
  const F32 y = 1.0f - p * t * Exp(-size * size);
  return x < 0.0f ? -y : y;
}

// tanh by the exponential; near zero, where that loses digits, by Cephes' polynomial. Error: a few ulp.
ANTIPHON_INLINE F32 Tanh(F32 x) {
  const F32 bounded = Min(Splat(20.0f), Max(Splat(-20.0f), x));  // in this order NaN stays NaN
  const F32 square = x * x;
  F32 p = Fma(square, Splat(-5.70498872745e-3f), Splat(2.06390887954e-2f));
  p = Fma(p, square, Splat(-5.37397155531e-2f));
  p = Fma(p, square, Splat(1.33314422036e-1f));
  p = Fma(p, square, Splat(-3.33332819422e-1f));
  const F32 near = Fma(p * square, x, x);
  return Abs(x) < 0.625f ? near : 1.0f - 2.0f / (Exp(bounded * 2.0f) + 1.0f);
}

// x times the logistic function of x, in the form whose exponential cannot overflow.
ANTIPHON_INLINE F32 Silu(F32 x) {
  const F32 e = Exp(-Abs(x));
  return (x < 0.0f ? x * e : x) / (1.0f + e);
}

template <Activation kind>
ANTIPHON_INLINE F32 Activate(F32 x) {
  if constexpr (kind == Activation::kRelu) return x < 0.0f ? F32{} : x;
  if constexpr (kind == Activation::kGelu) return x * 0.5f * (1.0f + Erf(x * 0.70710678f));
  if constexpr (kind == Activation::kGeluTanh) {
    return x * 0.5f * (1.0f + Tanh((x + x * x * x * 0.044715f) * 0.79788456f));
  }
  if constexpr (kind == Activation::kSilu) return Silu(x);
  if constexpr (kind == Activation::kTanh) return Tanh(x);
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
    case Activation::kNone:
      return body(Constant<Activation::kNone>{});
  }
}

ANTIPHON_INLINE int PanelWidth(int64_t outputs, int64_t panel) {
  const int64_t left = outputs - panel * kPanel;
  return static_cast<int>(left < kPanel ? left : kPanel);
}

// Rows x Panels outputs at once: enough accumulators to hide the latency of a fused multiply-add.
template <Activation kind, int Rows, int Panels>
ANTIPHON_INLINE void FloatTile(const float* x, const FloatWeight& weight, int64_t panel, float* out, int64_t stride) {
  const float* columns[Panels];
  for (int p = 0; p < Panels; ++p) columns[p] = weight.data + (panel + p) * weight.inputs * kPanel;
  F32 sums[Rows][Panels] = {};
  for (int64_t k = 0; k < weight.inputs; ++k) {
    F32 loaded[Panels];
    for (int p = 0; p < Panels; ++p) loaded[p] = Load(columns[p] + k * kPanel);
    for (int r = 0; r < Rows; ++r) {
      const F32 value = Splat(x[r * weight.inputs + k]);
      for (int p = 0; p < Panels; ++p) sums[r][p] = Fma(value, loaded[p], sums[r][p]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int p = 0; p < Panels; ++p) {
      const int width = PanelWidth(weight.outputs, panel + p);
      const F32 bias = weight.bias == nullptr ? F32{} : LoadPart(weight.bias + (panel + p) * kPanel, width);
      StorePart(out + r * stride + p * kPanel, Activate<kind>(sums[r][p] + bias), width);
    }
  }
}

template <Activation kind, int Panels>
ANTIPHON_INLINE void FloatColumns(const float* x, int64_t rows, const FloatWeight& weight, int64_t panel, float* out,
                                  int64_t stride) {
  constexpr int kRows = 16 / Panels < 6 ? 16 / Panels : 6;
  int64_t row = 0;
  for (; rows - row >= kRows; row += kRows) {
    FloatTile<kind, kRows, Panels>(x + row * weight.inputs, weight, panel, out + row * stride, stride);
  }
  for (; row < rows; ++row) {
    FloatTile<kind, 1, Panels>(x + row * weight.inputs, weight, panel, out + row * stride, stride);
  }
}

void FloatProduct(const float* x, int64_t rows, const FloatWeight& weight, Activation activation, int64_t begin,
                  int64_t end, float* out, int64_t stride) {
  WithActivation(activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    int64_t panel = begin;
    for (; end - panel >= 4; panel += 4) {
      FloatColumns<kind, 4>(x, rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
    for (; panel < end; ++panel) {
      FloatColumns<kind, 1>(x, rows, weight, panel, out + (panel - begin) * kPanel, stride);
    }
  });
}

// Rounds to the nearest integer, ties to even, and limits it to 0 .. 255; NaN becomes an arbitrary byte.
ANTIPHON_INLINE void StoreBytes(F32 v, uint8_t* to) {
#if defined(__AVX512F__)
  const __m512i integers = _mm512_max_epi32(_mm512_cvtps_epi32(reinterpret_cast<__m512>(v)), _mm512_setzero_si512());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtusepi32_epi8(integers));
#else
  const F32 bounded = v > 0.0f ? (v < 255.0f ? v : Splat(255.0f)) : F32{};
  const F32 shifted = bounded + 12582912.0f;  // 1.5 * 2^23: the last bits are the nearest integer
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<uint8_t>(reinterpret_cast<I32>(shifted)[lane]);
#endif
}

// Rows without negative numbers use all 256 levels from 0 up; others use 255 levels around 128. Each group of 64
// inputs starts `spacing` bytes after the group before.
ANTIPHON_INLINE void QuantizeRow(const float* x, int64_t inputs, int64_t padded, uint8_t* row, int64_t spacing,
                                 float* step, int32_t* zero) {
  F32 low = Splat(kInfinity), high = Splat(-kInfinity);
  int64_t k = 0;
  for (; inputs - k >= kLanes; k += kLanes) {
    const F32 v = Load(x + k);
    low = Min(v, low);
    high = Max(v, high);
  }
  if (k < inputs) {
    const int part = static_cast<int>(inputs - k);
    const F32 v = LoadPart(x + k, part);  // zeros after the row change no sign and no maximum
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
  for (k = 0; k < padded; k += kLanes) {
    const int64_t left = inputs - k;
    const F32 v = left >= kLanes ? Load(x + k) : (left > 0 ? LoadPart(x + k, static_cast<int>(left)) : F32{});
    StoreBytes(Fma(v, Splat(inverse), Splat(static_cast<float>(*zero))), row + k / kDepth * spacing + k % kDepth);
  }
}

void Quantize(const float* x, int64_t inputs, int64_t padded, const QuantizedRows& rows, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* to = rows.data + row * padded;
    QuantizeRow(x + row * inputs, inputs, padded, to, kDepth, rows.steps + row, rows.zeros + row);
  }
}

// Converts a panel's integer sums to outputs: (sum - zero * column sum) * scale * step + bias, activation.
template <Activation kind>
class Dequantizer {
 public:
  ANTIPHON_INLINE Dequantizer(const QuantizedWeight& weight, int64_t panel)
      : scales_(Load(weight.scales + panel * kPanel)), width_(PanelWidth(weight.outputs, panel)) {
    memcpy(&offsets_, weight.column_sums + panel * kPanel, sizeof(offsets_));
    offsets_ *= static_cast<uint32_t>(kMiddle);
    bias_ = weight.bias == nullptr ? F32{} : LoadPart(weight.bias + panel * kPanel, width_);
  }

  ANTIPHON_INLINE void Emit(I32 sums, const QuantizedRows& rows, int64_t row, float* out) const {
    // Zero points are 0 or 128: all bits of the mask are clear or set.
    const U32 mask = U32{} - static_cast<uint32_t>(rows.zeros[row] / kMiddle);
    const I32 exact = reinterpret_cast<I32>(reinterpret_cast<U32>(sums) - (offsets_ & mask));
    const F32 value = Activate<kind>(Fma(ToFloat(exact) * scales_, Splat(rows.steps[row]), bias_));
    if (__builtin_expect(width_ == kPanel, 1)) {
      Store(out, value);
    } else {
      StorePart(out, value, width_);
    }
  }

 private:
  U32 offsets_;  // unsigned, since a foreign model can have any column sums
  F32 scales_, bias_;
  int width_;
};

#if defined(__AVX512VNNI__)
// Sums of Rows x Panels at once, so that each load feeds several products: with one row and one panel at a time, loads
// are the bottleneck. A function of its own whose sums leave it through an intrinsic: GCC 12 otherwise keeps the chains
// of additions in memory (one core of a Zen 5, of 522 billion multiply-adds a second: 345 -> 455).
template <int Rows, int Panels>
__attribute__((noinline)) void DotTile(const uint8_t* rows, const int8_t* columns, int64_t padded,
                                       I32 (&sums)[Rows][Panels]) {
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
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      int32_t four;
      memcpy(&four, rows + r * padded + k, sizeof(four));
      const __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 16
      for (int p = 0; p < Panels; ++p) chains[r][p] = _mm512_dpbusd_epi32(chains[r][p], inputs, weights[p]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < Panels; ++p) _mm512_storeu_si512(&sums[r][p], chains[r][p]);
  }
}

// Sums of one row and one panel: memory is the bottleneck, and is read in order. Four chains of additions hide the
// latency of an instruction.
template <>
inline void DotTile<1, 1>(const uint8_t* row, const int8_t* columns, int64_t padded, I32 (&sums)[1][1]) {
  __m512i chains[4] = {};
  for (int64_t k = 0; k < padded; k += 16) {
#pragma GCC unroll 4
    for (int chain = 0; chain < 4; ++chain) {
      int32_t four;
      memcpy(&four, row + k + 4 * chain, sizeof(four));
      const __m512i weights = _mm512_loadu_si512(columns + (k + 4 * chain) * kPanel);
      chains[chain] = _mm512_dpbusd_epi32(chains[chain], _mm512_set1_epi32(four), weights);
    }
  }
  const __m512i halves[2] = {_mm512_add_epi32(chains[0], chains[1]), _mm512_add_epi32(chains[2], chains[3])};
  _mm512_storeu_si512(&sums[0][0], _mm512_add_epi32(halves[0], halves[1]));
}
constexpr int kDotRows = 4, kDotPanels = 4;
#else
// Sums for one row and one panel.
ANTIPHON_INLINE I32 DotPanel(const uint8_t* row, const int8_t* panel, int64_t padded) {
#if defined(__AVX2__)
  // Widened to 16 bits: the 8-bit multiply of AVX2 would saturate.
  __m256i sums[4] = {};
  for (int64_t k = 0; k < padded; k += 4) {
    int32_t four;
    memcpy(&four, row + k, sizeof(four));
    const __m256i inputs = _mm256_cvtepu8_epi16(_mm_set1_epi32(four));
    for (int64_t quarter = 0; quarter < 4; ++quarter) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(panel + k * kPanel + 16 * quarter));
      sums[quarter] = _mm256_add_epi32(sums[quarter], _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), inputs));
    }
  }
  I32 result;
  for (int64_t quarter = 0; quarter < 4; ++quarter) {
    int32_t pairs[8];
    memcpy(pairs, &sums[quarter], sizeof(pairs));
    for (int64_t column = 0; column < 4; ++column) {
      result[4 * quarter + column] = pairs[2 * column] + pairs[2 * column + 1];
    }
  }
  return result;
#else
  int32_t sums[kPanel] = {};
  for (int64_t k = 0; k < padded; k += 4) {
    const int8_t* weights = panel + k * kPanel;
    for (int64_t column = 0; column < kPanel; ++column) {
      for (int64_t j = 0; j < 4; ++j) sums[column] += static_cast<int32_t>(row[k + j]) * weights[4 * column + j];
    }
  }
  I32 result;
  memcpy(&result, sums, sizeof(result));
  return result;
#endif
}

template <int Rows, int Panels>
ANTIPHON_INLINE void DotTile(const uint8_t* rows, const int8_t* columns, int64_t padded, I32 (&sums)[Rows][Panels]) {
  static_assert(Rows == 1 && Panels == 1, "one at a time");
  sums[0][0] = DotPanel(rows, columns, padded);
}
constexpr int kDotRows = 1, kDotPanels = 1;
#endif

template <Activation kind, int Rows, int Panels>
ANTIPHON_INLINE void QuantizedTile(const QuantizedRows& rows, int64_t row, const QuantizedWeight& weight, int64_t panel,
                                   float* out, int64_t stride) {
  const int64_t padded = weight.padded_inputs;
  I32 sums[Rows][Panels];
  DotTile<Rows, Panels>(rows.data + row * padded, weight.data + panel * padded * kPanel, padded, sums);
  for (int p = 0; p < Panels; ++p) {
    const Dequantizer<kind> outputs(weight, panel + p);
    for (int r = 0; r < Rows; ++r) outputs.Emit(sums[r][p], rows, row + r, out + r * stride + p * kPanel);
  }
}

// Weights of the next columns, fetched into the second-level cache in equal parts, one part after each tile of the
// present columns. Cold weights otherwise stop the first tile of every column (shipped model, 60 rows, one core of a
// Zen 5: a decoder step with cold caches 1.41 -> 1.25 ms, with warm ones 0.94 ms either way).
class Prefetch {
 public:
  Prefetch(const int8_t* from, int64_t bytes, int64_t parts)
      : next_(from), end_(from + bytes), part_(RoundUp((bytes + parts - 1) / parts, kLine)) {}

  ANTIPHON_INLINE void FetchPart() {
    const int8_t* end = end_ - next_ < part_ ? end_ : next_ + part_;
    for (; next_ < end; next_ += kLine) __builtin_prefetch(next_, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  const int8_t* next_;
  const int8_t* end_;
  int64_t part_;
};

template <Activation kind, int Panels>
ANTIPHON_INLINE void QuantizedColumns(const QuantizedRows& rows, const QuantizedWeight& weight, int64_t panel,
                                      int64_t end, float* out, int64_t stride) {
  const int64_t after = panel + Panels, num_next = end - after < Panels ? end - after : Panels;
  const int64_t panel_bytes = weight.padded_inputs * kPanel, num_tiles = (rows.rows + kDotRows - 1) / kDotRows;
  Prefetch next(weight.data + after * panel_bytes, num_next * panel_bytes, num_tiles);
  int64_t row = 0;
  for (; rows.rows - row >= kDotRows; row += kDotRows) {
    QuantizedTile<kind, kDotRows, Panels>(rows, row, weight, panel, out + row * stride, stride);
    next.FetchPart();
  }
  if constexpr (kDotRows == 4) {
    if (rows.rows - row >= 2) {
      QuantizedTile<kind, 2, Panels>(rows, row, weight, panel, out + row * stride, stride);
      row += 2;
    }
  }
  for (; row < rows.rows; ++row) {
    QuantizedTile<kind, 1, Panels>(rows, row, weight, panel, out + row * stride, stride);
  }
}

void QuantizedProduct(const QuantizedRows& rows, const QuantizedWeight& weight, Activation activation, int64_t begin,
                      int64_t end, float* out, int64_t stride) {
  WithActivation(activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    int64_t panel = begin;
    for (; rows.rows > 1 && end - panel >= kDotPanels; panel += kDotPanels) {
      QuantizedColumns<kind, kDotPanels>(rows, weight, panel, end, out + (panel - begin) * kPanel, stride);
    }
    for (; panel < end; ++panel) {
      QuantizedColumns<kind, 1>(rows, weight, panel, end, out + (panel - begin) * kPanel, stride);
    }
  });
}

}  // namespace
}  // namespace antiphon
