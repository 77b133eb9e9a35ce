// Residual sum and the norm after it: the end of every sublayer.
#pragma once

#include <string>

#include "kernels.h"
#include "operator.h"
#include "operators.h"

namespace antiphon {

// Attributes of a norm. Throws OperatorError for another kind than layer and rms.
struct NormKind {
  float epsilon;
  bool is_layer;

  explicit NormKind(const Attributes& attributes) : epsilon(attributes.Float("epsilon")) {
    const std::string kind = attributes.String("kind");
    if (kind != "layer" && kind != "rms") throw OperatorError("kind is " + kind + "; it must be layer or rms");
    is_layer = kind == "layer";
  }
};

// sum = x + residual, normed = norm(sum) * weight + bias, over rows of `width` numbers.
class ResidualNorm {
 public:
  // Reads weight and bias of the norm from the inputs `first` and `first` + 1, both optional, and makes the node's first
  // output, `normed`. prefix: of the names of these inputs. residual can be absent.
  ResidualNorm(const Call& call, const NormKind& kind, const Tensor& residual, int64_t rows, int64_t width,
               size_t first, const char* prefix)
      : kind_(kind),
        width_(width),
        residual_(CheckedResidual(residual, rows, width)),
        weight_(Parameter(call, first, prefix, "weight", width)),
        bias_(Parameter(call, first + 1, prefix, "bias", width)),
        rows_(rows),
        normed_(static_cast<float*>(call.Output(0, {rows, width}))) {}

  // The output, which can hold x until Run.
  float* normed() const { return normed_; }

  // Makes the second output, the sum, where a node reads it: not before, since its memory can be that of earlier steps.
  void Run(const Call& call, const float* x) const {
    auto* sum = static_cast<float*>(call.Output(1, {rows_, width_}));
    const Kernels& kernels = ActiveKernels();
    const auto norm = kind_.is_layer ? kernels.layer_norm : kernels.rms_norm;
    ForRows(call, rows_, width_, [&](int64_t row) {
      const int64_t at = row * width_;
      norm(x + at, residual_ == nullptr ? nullptr : residual_ + at, weight_, bias_, kind_.epsilon, width_,
           normed_ + at, sum == nullptr ? nullptr : sum + at);
    });
  }

 private:
  static const float* CheckedResidual(const Tensor& residual, int64_t rows, int64_t width) {
    if (!residual) return nullptr;
    Require(residual.dims[0] == rows, "rows of residual", residual.dims[0], "it must be those of x");
    Require(residual.dims[1] == width, "width of residual", residual.dims[1], "it must be that of x");
    return residual.as<float>();
  }

  static const float* Parameter(const Call& call, size_t index, const char* prefix, const char* name, int64_t width) {
    const Name full(prefix, name);
    const Tensor tensor = call.OptionalInput(index, full, 1);
    if (tensor) Require(tensor.dims[0] == width, full, tensor.dims[0], "its length must be the width of x");
    return tensor.as<float>();
  }

  NormKind kind_;
  int64_t width_;
  const float* residual_;
  const float* weight_;
  const float* bias_;
  int64_t rows_;
  float* normed_;
};

}  // namespace antiphon
