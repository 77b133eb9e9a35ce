// Operators that treat each token by itself: Embed, Linear and AddNorm, the first two at every precision of a weight.
#include <string>

#include "operators.h"
#include "product.h"
#include "residual_norm.h"
#include "weight_inputs.h"

namespace antiphon {

namespace {

// Token and position of every row, checked against the tables.
struct Places {
  const int64_t* ids;
  const int32_t* positions;
  const float* table;  // [P, width] or null
  int64_t rows;
  int64_t width;

  const float* Position(int64_t row) const { return table == nullptr ? nullptr : table + positions[row] * width; }
};

Places CheckedPlaces(const Call& call, size_t table_index, int64_t vocab, int64_t width) {
  const Tensor ids = call.Input(0, "input_ids", 1), positions = call.Input(1, "positions", 1);
  const Tensor table = call.OptionalInput(table_index, "position_table", 2);
  Require(positions.dims[0] == ids.dims[0], "length of positions", positions.dims[0],
          [&] { return "it must be that of input_ids, " + std::to_string(ids.dims[0]); });
  if (table) Require(table.dims[1] == width, "width of position_table", table.dims[1], "it must be the model's");
  const Places places{ids.as<int64_t>(), positions.as<int32_t>(), table.as<float>(), ids.dims[0], width};
  for (int64_t row = 0; row < places.rows; ++row) {
    Require(places.ids[row] >= 0 && places.ids[row] < vocab, "input_ids", places.ids[row],
            [&] { return "it must be 0 to " + std::to_string(vocab - 1); });
    if (!table) continue;
    Require(places.positions[row] >= 0 && places.positions[row] < table.dims[0], "positions", places.positions[row],
            [&] { return "it must be 0 to " + std::to_string(table.dims[0] - 1); });
  }
  return places;
}

// The packed weight of an embedding, by precision.
struct Float32Embedding {
  static constexpr const char* kName = "Embed";
  using Weight = FloatWeight;
  static constexpr std::array<Port, 1> kPorts = {{{kFloat32}}};

  static Weight Read(const Call& call, int64_t width, int64_t vocab) {
    return CheckedWeight(call.Input(2, "weight", 3), {}, width, vocab);
  }
  static void Row(const Weight& weight, int64_t, int64_t id, float scale, const float* position, float* out) {
    ActiveKernels().embed(weight, id, scale, position, out);
  }
};

struct Int8Embedding {
  static constexpr const char* kName = "QuantizedEmbed";
  using Weight = QuantizedWeight;
  static constexpr std::array<Port, 2> kPorts = {{{kInt8}, {kFloat32}}};

  static Weight Read(const Call& call, int64_t width, int64_t vocab) {
    return CheckedWeight(call.Input(2, "weight", 4), call.Input(3, "scales", 1), {}, {}, width, vocab);
  }
  static void Row(const Weight& weight, int64_t width, int64_t id, float scale, const float* position, float* out) {
    ActiveKernels().quantized_embed(weight, width, id, scale, position, out);
  }
};

// scale * embedding[id] + position_table[position]: [N], [N] -> [N, width]. The weight is packed as for a product.
template <typename Embedding>
class Embed {
 public:
  static constexpr const char* kName = Embedding::kName;
  static constexpr auto kInputs = JoinPorts(std::array<Port, 2>{{{kInt64}, {kInt32}}}, Embedding::kPorts,
                                            std::array<Port, 1>{{{kFloat32, kOptional}}});
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Embed(const Attributes& attributes)
      : width_(attributes.Size("width")), vocab_(attributes.Size("vocab")), scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Places places = CheckedPlaces(call, kInputs.size() - 1, vocab_, width_);
    const typename Embedding::Weight weight = Embedding::Read(call, width_, vocab_);
    auto* out = static_cast<float*>(call.Output(0, {places.rows, width_}));
    ForRows(call, places.rows, width_, [&](int64_t row) {
      Embedding::Row(weight, width_, places.ids[row], scale_, places.Position(row), out + row * width_);
    });
  }

 private:
  int64_t width_, vocab_;
  float scale_;
};

// act(x W + b): x [N, K], W packed -> [N, width].
template <typename Inputs>
class Linear {
 public:
  static constexpr const char* kNames[] = {"Linear", "QuantizedLinear", "NibbleLinear"};
  static constexpr const char* kName = kNames[Inputs::kPrecision];
  static constexpr auto kInputs = JoinPorts(std::array<Port, 1>{{{kFloat32}}}, Inputs::kPorts, Inputs::kOutlierPorts);
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Linear(const Attributes& attributes)
      : width_(attributes.Size("width")), activation_(ActivationNamed(attributes.String("activation"))) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const typename Inputs::Weight weight = Inputs::Read(call, 1, 1 + Inputs::kPorts.size(), "", x.dims[1], width_);
    auto* out = static_cast<float*>(call.Output(0, {x.dims[0], width_}));
    if (x.dims[0] > 0) Multiply(call, x.as<float>(), x.dims[0], x.dims[1], weight, activation_, out);
  }

 private:
  int64_t width_;
  Activation activation_;
};

// sum = x + residual, normed = norm(sum) * weight + bias: [N, M] each (Ba et al. 2016; Zhang and Sennrich 2019).
class AddNorm {
 public:
  static constexpr const char* kName = "AddNorm";
  static constexpr Port kInputs[] = {{kFloat32}, {kFloat32, kOptional}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}, {kFloat32, kOptional}};

  explicit AddNorm(const Attributes& attributes) : kind_(attributes) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const Tensor residual = call.OptionalInput(1, "residual", 2);
    const ResidualNorm norm(call, kind_, residual, x.dims[0], x.dims[1], 2, "");
    norm.Run(call, x.as<float>());
  }

 private:
  NormKind kind_;
};

}  // namespace

std::vector<const OrtCustomOp*> RowOperators() {
  static const Registration<Embed<Float32Embedding>> embed;
  static const Registration<Embed<Int8Embedding>> quantized_embed;
  static const Registration<Linear<Float32Inputs>> linear;
  static const Registration<Linear<Int8Inputs>> quantized_linear;
  static const Registration<Linear<Int4Inputs>> nibble_linear;
  static const Registration<AddNorm> norm;
  return {&embed, &quantized_embed, &linear, &quantized_linear, &nibble_linear, &norm};
}

}  // namespace antiphon
