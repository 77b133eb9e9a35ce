// Products of a layer and the gate after them: Linear, QuantizedLinear, NibbleLinear and Gate.
#include "operators.h"
#include "product.h"
#include "weight_inputs.h"

namespace antiphon {

namespace {

// act(x W + b): x [N, K], W packed -> [N, width].
template <typename Inputs>
class Linear {
 public:
  static constexpr const char* kNames[] = {"Linear", "QuantizedLinear", "NibbleLinear"};
  static constexpr const char* kName = kNames[Inputs::kPrecision];
  static constexpr auto kInputs = JoinPorts(std::array<Port, 1>{{{kFloat32}}}, Inputs::kPorts);
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Linear(const Attributes& attributes)
      : width_(attributes.Size("width")), activation_(ActivationNamed(attributes.String("activation"))) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const typename Inputs::Weight weight = Inputs::Read(call, 1, "", x.dims[1], width_);
    auto* out = static_cast<float*>(call.Output(0, {x.dims[0], width_}));
    if (x.dims[0] > 0) Multiply(call, x.as<float>(), x.dims[0], x.dims[1], weight, activation_, out);
  }

 private:
  int64_t width_;
  Activation activation_;
};

// act(first half) * second half: x [N, 2 F] -> [N, F] (Shazeer 2020).
class Gate {
 public:
  static constexpr const char* kName = "Gate";
  static constexpr Port kInputs[] = {{kFloat32}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Gate(const Attributes& attributes) : activation_(ActivationNamed(attributes.String("activation"))) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const int64_t rows = x.dims[0], width = x.dims[1] / 2;
    Require(x.dims[1] % 2 == 0, "x dimension 1", x.dims[1], "it must be even");
    auto* out = static_cast<float*>(call.Output(0, {rows, width}));
    const Kernels& kernels = ActiveKernels();
    ForRows(call, rows, width, [&](int64_t row) {
      const float* from = x.as<float>() + row * 2 * width;
      kernels.gate(from, from + width, activation_, width, out + row * width);
    });
  }

 private:
  Activation activation_;
};

}  // namespace

std::vector<const OrtCustomOp*> LinearOperators() {
  static const Registration<Linear<Float32Inputs>> linear;
  static const Registration<Linear<Int8Inputs>> quantized;
  static const Registration<Linear<Int4Inputs>> nibble;
  static const Registration<Gate> gate;
  return {&linear, &quantized, &nibble, &gate};
}

}  // namespace antiphon
