// Recurrences of rows in place of self attention: SsruSublayer at every precision of its weight, and PagedAverage. The
// state of a row has a constant size and lies in the first block of its cache.
#include "operators.h"
#include "paged_rows.h"
#include "residual_norm.h"
#include "weight_inputs.h"

namespace antiphon {

namespace {

// Inputs of a node, in this order: cache, block_tables, offsets, positions.
constexpr std::array<Port, 4> kStatePorts = {{{kAnyElement}, {kInt32}, {kInt32}, {kInt32}}};

// New tokens of rows and the states of one layer. The state after n tokens is the vector n mod 2 of two float32 ones at
// the beginning of the layer's part of a block: a step that failed behind this node can run again.
class RowStates {
 public:
  // first: index of the node's input `cache`. width: M.
  RowStates(const Call& call, size_t first, int64_t layer, int64_t tokens, int64_t width)
      : width_(width),
        packing_(CheckedPacking(call.Input(first + 2, "offsets", 1), tokens)),
        positions_(CheckedPositions(call.Input(first + 3, "positions", 1), packing_, tokens)),
        states_(static_cast<size_t>(packing_.sequences)) {
    const Tensor cache = call.Input(first, "cache", 5), tables = call.Input(first + 1, "block_tables", 2);
    if (cache.type != kFloat32 && cache.type != kFloat16) throw OperatorError("cache must be float32 or float16");
    Require(layer >= 0 && layer < cache.dims[1], "layer", layer, [&] { return UpTo(cache.dims[1] - 1); });
    const int64_t element_bytes = cache.type == kFloat16 ? 2 : 4;
    const int64_t layer_bytes = cache.dims[2] * cache.dims[3] * cache.dims[4] * element_bytes;
    const int64_t needed = 2 * width * static_cast<int64_t>(sizeof(float));
    Require(layer_bytes >= needed, "bytes of a layer in a block of cache", layer_bytes,
            [&] { return "two states need " + std::to_string(needed); });
    Require(tables.dims[0] == packing_.sequences, "rows of block_tables", tables.dims[0],
            [&] { return "it must be " + std::to_string(packing_.sequences); });
    for (int64_t row = 0; row < packing_.sequences; ++row) {
      if (packing_.length(row) == 0) continue;  // its table is not read
      Require(tables.dims[1] >= 1, "width of block_tables", tables.dims[1], "it must be at least 1");
      const int32_t block = tables.as<int32_t>()[row * tables.dims[1]];
      Require(block >= 0 && block < cache.dims[0], "block_tables", block, [&] { return UpTo(cache.dims[0] - 1); });
      states_.data()[row] = reinterpret_cast<float*>(static_cast<char*>(cache.data) +
                                                     (block * cache.dims[1] + layer) * layer_bytes);
    }
  }

  // Calls step(token, position, before, state) for the tokens of every row in their order; before is null at position 0.
  template <typename Step>
  void Run(const Call& call, const Step& step) const {
    const int64_t tokens = packing_.sequences == 0 ? 0 : packing_.end(packing_.sequences - 1);
    const int64_t longest = packing_.sequences == 0 ? 0 : tokens / packing_.sequences + 1;
    ForRows(call, packing_.sequences, longest * width_, [&](int64_t row) {
      for (int64_t token = packing_.begin(row); token < packing_.end(row); ++token) {
        const int64_t position = positions_[token];
        float* states = states_.data()[row];
        const float* before = position == 0 ? nullptr : states + position % 2 * width_;
        step(token, position, before, states + (position + 1) % 2 * width_);
      }
    });
  }

 private:
  int64_t width_;
  Packing packing_;
  const int32_t* positions_;
  Scratch<float*> states_;
};

// norm(residual + relu(c)), c = f c' + (1 - f) candidate (Kim et al. 2019, section 3.2): x [N, M] -> [N, M].
template <typename Inputs>
class SsruSublayer {
 public:
  static constexpr const char* kNames[] = {"SsruSublayer", "QuantizedSsruSublayer", "NibbleSsruSublayer"};
  static constexpr const char* kName = kNames[Inputs::kPrecision];
  static constexpr auto kInputs =
      JoinPorts(std::array<Port, 2>{{{kFloat32}, {kFloat32}}}, Inputs::kPorts,
                std::array<Port, 2>{{{kFloat32, kOptional}, {kFloat32, kOptional}}}, kStatePorts,
                Inputs::kOutlierPorts);
  static constexpr Port kOutputs[] = {{kFloat32}, {kFloat32, kOptional}};

  explicit SsruSublayer(const Attributes& attributes) : norm_(attributes), layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    constexpr size_t kWeight = 2, kNorm = kWeight + Inputs::kPorts.size(), kStates = kNorm + 2;
    const Tensor x = call.Input(0, "x", 2);
    const int64_t tokens = x.dims[0], width = x.dims[1];
    constexpr size_t kOutliers = kInputs.size() - Inputs::kOutlierPorts.size();
    const auto weight = Inputs::Read(call, kWeight, kOutliers, "gates_", width, 2 * width);
    const RowStates rows(call, kStates, layer_, tokens, width);
    const ResidualNorm norm(call, norm_, call.Input(1, "residual", 2), tokens, width, kNorm, "norm_");
    if (tokens > 0) {
      const Scratch<float> gates(static_cast<size_t>(tokens * 2 * width));
      Multiply(call, x.as<float>(), tokens, width, weight, Activation::kNone, gates.data());
      const Kernels& kernels = ActiveKernels();
      rows.Run(call, [&](int64_t token, int64_t, const float* before, float* state) {
        kernels.ssru(gates.data() + token * 2 * width, before, width, state, norm.normed() + token * width);
      });
    }
    norm.Run(call, norm.normed());
  }

 private:
  NormKind norm_;
  int64_t layer_;
};

// The average of each token and those before it in its row (Zhang et al. 2018, section 3.1): x [N, M] -> [N, M].
class PagedAverage {
 public:
  static constexpr const char* kName = "PagedAverage";
  static constexpr auto kInputs = JoinPorts(std::array<Port, 1>{{{kFloat32}}}, kStatePorts);
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit PagedAverage(const Attributes& attributes) : layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const int64_t width = x.dims[1];
    const RowStates rows(call, 1, layer_, x.dims[0], width);
    auto* out = static_cast<float*>(call.Output(0, {x.dims[0], width}));
    const Kernels& kernels = ActiveKernels();
    rows.Run(call, [&](int64_t token, int64_t position, const float* before, float* state) {
      kernels.average(x.as<float>() + token * width, before, position, width, state, out + token * width);
    });
  }

 private:
  int64_t layer_;
};

}  // namespace

std::vector<const OrtCustomOp*> RecurrenceOperators() {
  static const Registration<SsruSublayer<Float32Inputs>> ssru;
  static const Registration<SsruSublayer<Int8Inputs>> quantized_ssru;
  static const Registration<SsruSublayer<Int4Inputs>> nibble_ssru;
  static const Registration<PagedAverage> average;
  return {&ssru, &quantized_ssru, &nibble_ssru, &average};
}

}  // namespace antiphon
