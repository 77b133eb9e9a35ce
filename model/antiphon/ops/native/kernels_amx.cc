// int8 products in AMX tiles; all other kernels are those of AVX-512. Intel's Architecture Instruction Set Extensions
// Programming Reference, chapter 3.
//
// A tile of activations is 16 rows of 64 bytes, stored tile by tile (rows a power of two apart would share few sets of
// the L1 cache). A tile of weights is 16 columns by 64 inputs, exactly as packed. A tile of sums is 16 by 16. Two by
// two tiles of sums share their operands: four products for four loads.
#include "kernel_table.h"
#include "tile_config.h"

namespace antiphon {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kFewRows = 2;  // below this, loading tiles costs more than the vector products (measured)

struct Operands {
  const uint8_t* rows;    // the first tile of activations
  const int8_t* weights;  // the first panel
  int64_t depth;          // tiles along the inputs
};

// Prefetches weights, since tile loads alone do not make the processor read ahead: while one pair of panels is
// multiplied for the first time, the next pair is fetched (64 rows, whole step: 5.6 -> 4.9 ms on two cores).
template <bool fetches>
ANTIPHON_INLINE void FetchNextPair(const Operands& in, int64_t k) {
  if constexpr (!fetches) return;
  const int8_t* from = in.weights + (2 * in.depth + 2 * k) * kTileBytes;
  for (int64_t byte = 0; byte < 2 * kTileBytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// One tile row of activations and two panels. sums: [2][16][16].
template <bool fetches>
ANTIPHON_INLINE void OneByTwo(const Operands& in, int32_t* sums) {
  const int8_t* second = in.weights + in.depth * kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t k = 0; k < in.depth; ++k) {
    _tile_loadd(4, in.rows + k * kTileBytes, 64);
    _tile_loadd(6, in.weights + k * kTileBytes, 64);
    _tile_loadd(7, second + k * kTileBytes, 64);
    _tile_dpbusd(0, 4, 6);
    FetchNextPair<fetches>(in, k);
    _tile_dpbusd(1, 4, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
}

ANTIPHON_INLINE void OneByOne(const Operands& in, int32_t* sums) {
  _tile_zero(0);
  for (int64_t k = 0; k < in.depth; ++k) {
    _tile_loadd(4, in.rows + k * kTileBytes, 64);
    _tile_loadd(6, in.weights + k * kTileBytes, 64);
    _tile_dpbusd(0, 4, 6);
  }
  _tile_stored(0, sums, 64);
}

// Two tile rows and two panels. sums: [2 tile rows][2][16][16].
template <bool fetches>
ANTIPHON_INLINE void TwoByTwo(const Operands& in, int32_t* sums) {
  const uint8_t* below = in.rows + in.depth * kTileBytes;
  const int8_t* second = in.weights + in.depth * kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < in.depth; ++k) {
    _tile_loadd(4, in.rows + k * kTileBytes, 64);
    _tile_loadd(6, in.weights + k * kTileBytes, 64);
    _tile_dpbusd(0, 4, 6);
    _tile_loadd(7, second + k * kTileBytes, 64);
    _tile_dpbusd(1, 4, 7);
    FetchNextPair<fetches>(in, k);
    _tile_loadd(5, below + k * kTileBytes, 64);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  _tile_stored(2, sums + 512, 64);
  _tile_stored(3, sums + 768, 64);
}

struct Product {
  const QuantizedRows& rows;
  const QuantizedWeight& weight;
  float* out;
  int64_t stride;
  int64_t begin;

  // Outputs of up to 16 rows of one panel from their sums.
  template <Activation kind>
  ANTIPHON_INLINE void Emit(const int32_t* sums, int64_t row, int64_t panel, const Dequantizer<kind>& outputs) const {
    const int64_t left = rows.rows - row, height = left < kTileRows ? left : kTileRows;
    outputs.Emit(sums, kPanel, rows, row, height, out + row * stride + (panel - begin) * kPanel, stride);
  }

  ANTIPHON_INLINE Operands At(int64_t row, int64_t panel) const {
    const int64_t depth = weight.padded_inputs;
    return {rows.data + row * depth, weight.data + panel * depth * kPanel, depth / kDepth};
  }

  template <Activation kind>
  ANTIPHON_INLINE void PanelPair(int64_t panel, int32_t* sums) const {
    const Dequantizer<kind> left(weight, panel), right(weight, panel + 1);
    int64_t row = 0;
    for (; rows.rows - row > kTileRows; row += 2 * kTileRows) {
      row == 0 ? TwoByTwo<true>(At(row, panel), sums) : TwoByTwo<false>(At(row, panel), sums);
      Emit(sums, row, panel, left);
      Emit(sums + 256, row, panel + 1, right);
      Emit(sums + 512, row + kTileRows, panel, left);
      Emit(sums + 768, row + kTileRows, panel + 1, right);
    }
    if (row < rows.rows) {
      row == 0 ? OneByTwo<true>(At(row, panel), sums) : OneByTwo<false>(At(row, panel), sums);
      Emit(sums, row, panel, left);
      Emit(sums + 256, row, panel + 1, right);
    }
  }

  template <Activation kind>
  ANTIPHON_INLINE void SinglePanel(int64_t panel, int32_t* sums) const {
    const Dequantizer<kind> outputs(weight, panel);
    for (int64_t row = 0; row < rows.rows; row += kTileRows) {
      OneByOne(At(row, panel), sums);
      Emit(sums, row, panel, outputs);
    }
  }
};

// Stored tile by tile where the product below reads tiles, row by row elsewhere.
void QuantizeTiles(const float* x, int64_t inputs, int64_t padded, const QuantizedRows& rows, int64_t begin,
                   int64_t end) {
  if (rows.rows <= kFewRows) {
    Quantize(x, inputs, padded, rows, begin, end);
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    uint8_t* to = rows.data + row / kTileRows * kTileRows * padded + row % kTileRows * kDepth;
    QuantizeRow(x, inputs, padded, rows, row, to, kTileBytes);
  }
}

void TiledProduct(const QuantizedRows& rows, const QuantizedWeight& weight, Activation activation, int64_t begin,
                  int64_t end, float* out, int64_t stride) {
  if (rows.rows <= kFewRows) {
    QuantizedProduct(rows, weight, activation, begin, end, out, stride);
    return;
  }
  alignas(64) int32_t sums[4 * 256];
  Configure(rows.rows < kTileRows ? rows.rows : kTileRows);
  const Product product{rows, weight, out, stride, begin};
  WithActivation(activation, [&](auto constant) {
    constexpr Activation kind = decltype(constant)::value;
    int64_t panel = begin;
    for (; end - panel >= 2; panel += 2) product.PanelPair<kind>(panel, sums);
    if (panel < end) product.SinglePanel<kind>(panel, sums);
  });
  _tile_release();
}

}  // namespace

const Kernels& AmxKernels() {
  static constexpr Kernels table = [] {
    Kernels built = MakeTable("amx");
    built.quantize = QuantizeTiles;
    built.quantized_product = TiledProduct;
    return built;
  }();
  return table;
}

}  // namespace antiphon
