// Division of a product's work into tasks.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"
#include "operator.h"
#include "workspace.h"

namespace antiphon {

// Throws OperatorError for another name than none, relu, gelu, gelu_tanh, silu, tanh, gelu_sigmoid.
Activation ActivationNamed(const std::string& name);

// The packed weights of a call, checked against `inputs` and `outputs`; bias can be an absent Tensor. prefix: of the
// names of these inputs.
FloatWeight CheckedWeight(const Tensor& weight, const Tensor& bias, int64_t inputs, int64_t outputs,
                          const char* prefix = "");
QuantizedWeight CheckedWeight(const Tensor& weight, const Tensor& scales, const Tensor& column_sums, const Tensor& bias,
                              int64_t inputs, int64_t outputs, const char* prefix = "");
NibbleWeight CheckedWeight(const Tensor& weight, const Tensor& ratios, const Tensor& scales, const Tensor& offsets,
                           const Tensor& bias, int64_t inputs, int64_t outputs, const char* prefix = "");

// Outliers of a product with `inputs` inputs; both tensors can be absent, and are so together.
Outliers CheckedOutliers(const Tensor& columns, const Tensor& weight, int64_t inputs, int64_t outputs,
                         const char* prefix = "");

// out [rows, outputs] = act(x [rows, inputs] W + b). Rows and columns are divided into independent tasks.
void Multiply(const Call& call, const float* x, int64_t rows, int64_t inputs, const FloatWeight& weight,
              Activation activation, float* out);
void Multiply(const Call& call, const float* x, int64_t rows, int64_t inputs, const QuantizedWeight& weight,
              Activation activation, float* out);
void Multiply(const Call& call, const float* x, int64_t rows, int64_t inputs, const NibbleWeight& weight,
              Activation activation, float* out);

// Quantised rows and their memory.
class QuantizedBuffer {
 public:
  QuantizedBuffer(int64_t rows, int64_t padded_inputs, const Outliers& outliers);
  QuantizedRows rows() const { return rows_; }

 private:
  Scratch<uint8_t> data_;
  Scratch<float> steps_;
  Scratch<int32_t> zeros_;
  Scratch<int32_t> mask_;
  Scratch<float> outliers_;
  QuantizedRows rows_;
};

// Quantises all rows of x, on this thread or, where there are many rows, on all threads.
void QuantizeAll(const Call& call, const float* x, int64_t inputs, int64_t padded_inputs, const QuantizedRows& rows);

// Number of tasks to start for work that one thread would do in about this many nanoseconds.
size_t TasksFor(double nanoseconds);

}  // namespace antiphon
