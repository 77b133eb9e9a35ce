// Operators that treat each token by itself: Embed, QuantizedEmbed, AddNorm and Rotary.
#include <cstring>
#include <string>

#include "operators.h"
#include "product.h"

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
          "it must be that of input_ids, " + std::to_string(ids.dims[0]));
  if (table) Require(table.dims[1] == width, "width of position_table", table.dims[1], "it must be the model's");
  const Places places{ids.as<int64_t>(), positions.as<int32_t>(), table.as<float>(), ids.dims[0], width};
  for (int64_t row = 0; row < places.rows; ++row) {
    Require(places.ids[row] >= 0 && places.ids[row] < vocab, "input_ids", places.ids[row],
            "it must be 0 to " + std::to_string(vocab - 1));
    if (!table) continue;
    Require(places.positions[row] >= 0 && places.positions[row] < table.dims[0], "positions", places.positions[row],
            "it must be 0 to " + std::to_string(table.dims[0] - 1));
  }
  return places;
}

// scale * embedding[id] + position_table[position]: [N], [N] -> [N, width]. The weight is packed as for a product.
class Embed {
 public:
  static constexpr const char* kName = "Embed";
  static constexpr Port kInputs[] = {{kInt64}, {kInt32}, {kFloat32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Embed(const Attributes& attributes)
      : width_(attributes.Size("width")), vocab_(attributes.Size("vocab")), scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Places places = CheckedPlaces(call, 3, vocab_, width_);
    const FloatWeight weight = CheckedWeight(call.Input(2, "weight", 3), {}, width_, vocab_);
    auto* out = static_cast<float*>(call.Output(0, {places.rows, width_}));
    const Kernels& kernels = ActiveKernels();
    ForRows(call, places.rows, width_, [&](int64_t row) {
      kernels.embed(weight, places.ids[row], scale_, places.Position(row), out + row * width_);
    });
  }

 private:
  int64_t width_, vocab_;
  float scale_;
};

class QuantizedEmbed {
 public:
  static constexpr const char* kName = "QuantizedEmbed";
  static constexpr Port kInputs[] = {{kInt64}, {kInt32}, {kInt8}, {kFloat32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit QuantizedEmbed(const Attributes& attributes)
      : width_(attributes.Size("width")), vocab_(attributes.Size("vocab")), scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Places places = CheckedPlaces(call, 4, vocab_, width_);
    const QuantizedWeight weight =
        CheckedWeight(call.Input(2, "weight", 4), call.Input(3, "scales", 1), {}, {}, width_, vocab_);
    auto* out = static_cast<float*>(call.Output(0, {places.rows, width_}));
    const Kernels& kernels = ActiveKernels();
    ForRows(call, places.rows, width_, [&](int64_t row) {
      kernels.quantized_embed(weight, width_, places.ids[row], scale_, places.Position(row), out + row * width_);
    });
  }

 private:
  int64_t width_, vocab_;
  float scale_;
};

// sum = x + residual, normed = norm(sum) * weight + bias: [N, M] each (Ba et al. 2016; Zhang and Sennrich 2019).
class AddNorm {
 public:
  static constexpr const char* kName = "AddNorm";
  static constexpr Port kInputs[] = {{kFloat32}, {kFloat32, kOptional}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}, {kFloat32, kOptional}};

  explicit AddNorm(const Attributes& attributes) : epsilon_(attributes.Float("epsilon")) {
    const std::string kind = attributes.String("kind");
    if (kind != "layer" && kind != "rms") throw OperatorError("kind is " + kind + "; it must be layer or rms");
    is_layer_ = kind == "layer";
  }

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const int64_t rows = x.dims[0], width = x.dims[1];
    const Tensor residual = call.OptionalInput(1, "residual", 2);
    if (residual) {
      Require(residual.dims[0] == rows, "rows of residual", residual.dims[0], "it must be those of x");
      Require(residual.dims[1] == width, "width of residual", residual.dims[1], "it must be that of x");
    }
    const float* weight = Parameter(call, 2, "weight", width);
    const float* bias = Parameter(call, 3, "bias", width);
    auto* normed = static_cast<float*>(call.Output(0, {rows, width}));
    auto* sum = static_cast<float*>(call.Output(1, {rows, width}));
    const Kernels& kernels = ActiveKernels();
    const auto norm = is_layer_ ? kernels.layer_norm : kernels.rms_norm;
    ForRows(call, rows, width, [&](int64_t row) {
      const int64_t at = row * width;
      norm(x.as<float>() + at, residual ? residual.as<float>() + at : nullptr, weight, bias, epsilon_, width,
           normed + at, sum != nullptr ? sum + at : nullptr);
    });
  }

 private:
  static const float* Parameter(const Call& call, size_t index, const char* name, int64_t width) {
    const Tensor tensor = call.OptionalInput(index, name, 1);
    if (tensor) Require(tensor.dims[0] == width, name, tensor.dims[0], "its length must be the width of x");
    return tensor.as<float>();
  }

  float epsilon_;
  bool is_layer_ = false;
};

// Rotary positions (Su et al. 2021, section 3.4) on the queries and keys of qkv [N, 3 H D]; values are unchanged.
class Rotary {
 public:
  static constexpr const char* kName = "Rotary";
  static constexpr Port kInputs[] = {{kFloat32}, {kInt32}, {kFloat32}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Rotary(const Attributes& attributes) : heads_(attributes.Size("num_heads")) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2), positions = call.Input(1, "positions", 1);
    const Tensor table = call.Input(2, "table", 2);
    const int64_t rows = qkv.dims[0], width = qkv.dims[1] / (3 * heads_);
    Require(qkv.dims[1] == 3 * heads_ * width && width > 0 && width % 2 == 0, "width of qkv", qkv.dims[1],
            "it must be 3 * num_heads times an even number");
    Require(positions.dims[0] == rows, "length of positions", positions.dims[0], "it must be the rows of qkv");
    Require(table.dims[1] == width, "width of table", table.dims[1], "it must be that of a head");
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t position = positions.as<int32_t>()[row];
      Require(position >= 0 && position < table.dims[0], "positions", position,
              "it must be 0 to " + std::to_string(table.dims[0] - 1));
    }
    auto* out = static_cast<float*>(call.Output(0, {rows, qkv.dims[1]}));
    const Kernels& kernels = ActiveKernels();
    ForRows(call, rows, qkv.dims[1], [&](int64_t row) {
      float* to = out + row * qkv.dims[1];
      std::memcpy(to, qkv.as<float>() + row * qkv.dims[1], static_cast<size_t>(qkv.dims[1]) * sizeof(float));
      const float* angles = table.as<float>() + positions.as<int32_t>()[row] * width;
      for (int64_t head = 0; head < 2 * heads_; ++head) kernels.rotate(to + head * width, angles, width);
    });
  }

 private:
  int64_t heads_;
};

}  // namespace

std::vector<const OrtCustomOp*> RowOperators() {
  static const Registration<Embed> embed;
  static const Registration<QuantizedEmbed> quantized;
  static const Registration<AddNorm> norm;
  static const Registration<Rotary> rotary;
  return {&embed, &quantized, &norm, &rotary};
}

}  // namespace antiphon
