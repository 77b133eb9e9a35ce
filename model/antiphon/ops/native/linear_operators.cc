// Products: Linear, QuantizedLinear and NibbleLinear.
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

}  // namespace

std::vector<const OrtCustomOp*> LinearOperators() {
  static const Registration<Linear<Float32Inputs>> linear;
  static const Registration<Linear<Int8Inputs>> quantized;
  static const Registration<Linear<Int4Inputs>> nibble;
  return {&linear, &quantized, &nibble};
}

}  // namespace antiphon
