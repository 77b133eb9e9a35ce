// Products of a layer and the gate after them: Linear, QuantizedLinear, NibbleLinear and Gate.
#include "operators.h"
#include "product.h"

namespace antiphon {

namespace {

// act(x W + b): x [N, K], W packed -> [N, width].
class Linear {
 public:
  static constexpr const char* kName = "Linear";
  static constexpr Port kInputs[] = {{kFloat32}, {kFloat32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit Linear(const Attributes& attributes)
      : width_(attributes.Size("width")), activation_(ActivationNamed(attributes.String("activation"))) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const FloatWeight weight =
        CheckedWeight(call.Input(1, "weight", 3), call.OptionalInput(2, "bias", 1), x.dims[1], width_);
    auto* out = static_cast<float*>(call.Output(0, {x.dims[0], width_}));
    if (x.dims[0] > 0) Multiply(call, x.as<float>(), x.dims[0], weight, activation_, out);
  }

 private:
  int64_t width_;
  Activation activation_;
};

// The same with int8 weights; every row of x is quantised with its own scale.
class QuantizedLinear {
 public:
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr Port kInputs[] = {{kFloat32}, {kInt8}, {kFloat32}, {kInt32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit QuantizedLinear(const Attributes& attributes)
      : width_(attributes.Size("width")), activation_(ActivationNamed(attributes.String("activation"))) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const QuantizedWeight weight =
        CheckedWeight(call.Input(1, "weight", 4), call.Input(2, "scales", 1), call.Input(3, "column_sums", 1),
                      call.OptionalInput(4, "bias", 1), x.dims[1], width_);
    auto* out = static_cast<float*>(call.Output(0, {x.dims[0], width_}));
    if (x.dims[0] > 0) Multiply(call, x.as<float>(), x.dims[0], x.dims[1], weight, activation_, out);
  }

 private:
  int64_t width_;
  Activation activation_;
};

// The same with 4-bit weights in groups of inputs.
class NibbleLinear {
 public:
  static constexpr const char* kName = "NibbleLinear";
  static constexpr Port kInputs[] = {{kFloat32}, {kInt8}, {kFloat16}, {kFloat32}, {kFloat32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit NibbleLinear(const Attributes& attributes)
      : width_(attributes.Size("width")), activation_(ActivationNamed(attributes.String("activation"))) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const NibbleWeight weight =
        CheckedWeight(call.Input(1, "weight", 4), call.Input(2, "ratios", 3), call.Input(3, "scales", 1),
                      call.Input(4, "offsets", 1), call.OptionalInput(5, "bias", 1), x.dims[1], width_);
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
  static const Registration<Linear> linear;
  static const Registration<QuantizedLinear> quantized;
  static const Registration<NibbleLinear> nibble;
  static const Registration<Gate> gate;
  return {&linear, &quantized, &nibble, &gate};
}

}  // namespace antiphon
