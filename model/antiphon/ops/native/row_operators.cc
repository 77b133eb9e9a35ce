// Operators that treat each token by itself: Embed, QuantizedEmbed, AddNorm and Rotary.
#include <cstring>
#include <string>

#include "operators.h"
#include "product.h"
#include "rotary_table.h"
#include "residual_norm.h"

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
    const RotaryTable rotary(table, "table", width);
    rotary.Check(positions.as<int32_t>(), rows);
    auto* out = static_cast<float*>(call.Output(0, {rows, qkv.dims[1]}));
    ForRows(call, rows, qkv.dims[1], [&](int64_t row) {
      float* to = out + row * qkv.dims[1];
      std::memcpy(to, qkv.as<float>() + row * qkv.dims[1], static_cast<size_t>(qkv.dims[1]) * sizeof(float));
      rotary.Rotate(positions.as<int32_t>()[row], heads_, to);
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
