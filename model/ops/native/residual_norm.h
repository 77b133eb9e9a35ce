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
  // Reads weight and bias of the norm from the inputs `first` and `first` + 1, both optional, and makes the node's
  // outputs: normed and, where a node reads it, the sum. prefix: of the names of these inputs. residual can be absent.
  ResidualNorm(const Call& call, const NormKind& kind, const Tensor& residual, int64_t rows, int64_t width,
               size_t first, const char* prefix)
      : kind_(kind),
        width_(width),
        residual_(CheckedResidual(residual, rows, width)),
        weight_(Parameter(call, first, prefix, "weight", width)),
        bias_(Parameter(call, first + 1, prefix, "bias", width)),
        normed_(static_cast<float*>(call.Output(0, {rows, width}))),
        sum_(static_cast<float*>(call.Output(1, {rows, width}))) {}

  // Rows begin .. end - 1; x holds them from its beginning.
  void Run(const Call& call, const float* x, int64_t begin, int64_t end) const {
    const Kernels& kernels = ActiveKernels();
    const auto norm = kind_.is_layer ? kernels.layer_norm : kernels.rms_norm;
    ForRows(call, end - begin, width_, [&](int64_t row) {
      const int64_t at = (begin + row) * width_;
      norm(x + row * width_, residual_ == nullptr ? nullptr : residual_ + at, weight_, bias_, kind_.epsilon, width_,
           normed_ + at, sum_ == nullptr ? nullptr : sum_ + at);
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
    const std::string full = std::string(prefix) + name;
    const Tensor tensor = call.OptionalInput(index, full.c_str(), 1);
    if (tensor) Require(tensor.dims[0] == width, full.c_str(), tensor.dims[0], "its length must be the width of x");
    return tensor.as<float>();
  }

  NormKind kind_;
  int64_t width_;
  const float* residual_;
  const float* weight_;
  const float* bias_;
  float* normed_;
  float* sum_;
};

}  // namespace antiphon
