#include "product.h"

#include <algorithm>

namespace antiphon {

namespace {

// Rates of one core, measured on a Xeon with AMX; they decide only the number of tasks.
constexpr double kBytesPerNs = 20.0;           // weights streamed
constexpr double kQuantizedMacsPerNs = 500.0;  // int8 products
constexpr double kFloatMacsPerNs = 40.0;
constexpr double kQuantizedPerNs = 8.0;  // activations quantised
constexpr double kTaskNs = 1500.0;       // starting a task costs about 1 us; waiting for the last task costs more
constexpr size_t kMaxTasks = 32;

// From this number of rows, a task takes some rows and every column, if the weights stay in its core's cache.
constexpr int64_t kRowBlock = 64;
constexpr int64_t kCachedWeightBytes = 3 << 19;

// Panels of a task: a multiple of those that the kernels compute at once.
constexpr int64_t kTaskPanels = 4;

constexpr int64_t kMaxInputs = 65536;  // 65536 * 255 * 127 still fits the 32-bit sums

void CheckDims(const Tensor& tensor, Name name, std::initializer_list<int64_t> dims) {
  size_t axis = 0;
  for (const int64_t dim : dims) {
    if (tensor.dims[axis] != dim) {
      Refuse(name.text() + " dimension " + std::to_string(axis), tensor.dims[axis],
             "it must be " + std::to_string(dim));
    }
    ++axis;
  }
}

const float* CheckedBias(const Tensor& bias, int64_t outputs, const char* prefix) {
  if (!bias) return nullptr;
  CheckDims(bias, {prefix, "bias"}, {outputs});
  return bias.as<float>();
}

// Calls body(begin, end) for even shares of 0 .. count - 1, each a multiple of `step` but the last.
template <typename Body>
void Share(const Call& call, int64_t count, int64_t step, size_t tasks, const Body& body) {
  if (count == 0) return;
  const int64_t steps = (count + step - 1) / step;
  const int64_t share = (steps + static_cast<int64_t>(tasks) - 1) / static_cast<int64_t>(tasks) * step;
  call.Parallel(static_cast<size_t>((count + share - 1) / share), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * share;
    body(begin, std::min(begin + share, count));
  });
}

using QuantizeKernel = decltype(Kernels::quantize);

void QuantizeRows(const Call& call, QuantizeKernel quantize, const float* x, int64_t inputs, int64_t padded_inputs,
                  const QuantizedRows& rows) {
  const size_t tasks = TasksFor(static_cast<double>(rows.rows * padded_inputs) / kQuantizedPerNs);
  Share(call, rows.rows, 1, tasks,
        [&](int64_t begin, int64_t end) { quantize(x, inputs, padded_inputs, rows, begin, end); });
}

// Product of any weight that needs quantised rows; the weight occupies weight_bytes.
template <typename Weight, typename Product>
void MultiplyQuantized(const Call& call, const float* x, int64_t rows, int64_t inputs, const Weight& weight,
                       int64_t weight_bytes, Activation activation, float* out, QuantizeKernel quantize,
                       Product product) {
  const int64_t panels = RoundUp(weight.outputs, kPanel) / kPanel, padded = weight.padded_inputs;
  if (rows >= 2 * kRowBlock && weight_bytes <= kCachedWeightBytes) {
    Share(call, rows, kRowBlock, kMaxTasks, [&](int64_t begin, int64_t end) {
      const QuantizedBuffer buffer(end - begin, padded, weight.outliers);
      quantize(x + begin * inputs, inputs, padded, buffer.rows(), 0, end - begin);
      product(buffer.rows(), weight, activation, 0, panels, out + begin * weight.outputs, weight.outputs);
    });
    return;
  }
  const QuantizedBuffer buffer(rows, padded, weight.outliers);
  QuantizeRows(call, quantize, x, inputs, padded, buffer.rows());
  const double macs = static_cast<double>(rows) * static_cast<double>(panels * kPanel * padded);
  const size_t tasks = TasksFor(std::max(macs / kQuantizedMacsPerNs, static_cast<double>(weight_bytes) / kBytesPerNs));
  Share(call, panels, kTaskPanels, tasks, [&](int64_t begin, int64_t end) {
    product(buffer.rows(), weight, activation, begin, end, out + begin * kPanel, weight.outputs);
  });
}

}  // namespace

size_t TasksFor(double nanoseconds) {
  return std::clamp(static_cast<size_t>(nanoseconds / kTaskNs), size_t{1}, kMaxTasks);
}

Activation ActivationNamed(const std::string& name) {
  if (name == "none") return Activation::kNone;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "silu") return Activation::kSilu;
  if (name == "tanh") return Activation::kTanh;
  if (name == "gelu_sigmoid") return Activation::kGeluSigmoid;
  throw OperatorError("activation is " + name + "; it must be none, relu, gelu, gelu_tanh, silu, tanh or gelu_sigmoid");
}

FloatWeight CheckedWeight(const Tensor& weight, const Tensor& bias, int64_t inputs, int64_t outputs,
                          const char* prefix) {
  CheckDims(weight, {prefix, "weight"}, {RoundUp(outputs, kPanel) / kPanel, inputs, kPanel});
  return {weight.as<float>(), CheckedBias(bias, outputs, prefix), inputs, outputs};
}

QuantizedWeight CheckedWeight(const Tensor& weight, const Tensor& scales, const Tensor& column_sums, const Tensor& bias,
                              int64_t inputs, int64_t outputs, const char* prefix) {
  Require(inputs <= kMaxInputs, "inputs", inputs, [&] { return "it must be at most " + std::to_string(kMaxInputs); });
  const int64_t columns = RoundUp(outputs, kPanel), padded = RoundUp(inputs, kDepth);
  CheckDims(weight, {prefix, "weight"}, {columns / kPanel, padded / 4, kPanel, 4});
  CheckDims(scales, {prefix, "scales"}, {columns});
  if (column_sums) CheckDims(column_sums, {prefix, "column_sums"}, {columns});
  return {weight.as<int8_t>(), scales.as<float>(), column_sums.as<int32_t>(), CheckedBias(bias, outputs, prefix),
          padded, outputs};
}

NibbleWeight CheckedWeight(const Tensor& weight, const Tensor& ratios, const Tensor& scales, const Tensor& offsets,
                           const Tensor& bias, int64_t inputs, int64_t outputs, const char* prefix) {
  Require(inputs <= kMaxInputs, "inputs", inputs, [&] { return "it must be at most " + std::to_string(kMaxInputs); });
  const int64_t columns = RoundUp(outputs, kPanel), padded = RoundUp(inputs, kDepth);
  CheckDims(weight, {prefix, "weight"}, {columns / kPanel, padded / 8, kPanel, 4});
  CheckDims(ratios, {prefix, "ratios"}, {columns / kPanel, padded / kNibbleGroup, kPanel});
  CheckDims(scales, {prefix, "scales"}, {columns});
  CheckDims(offsets, {prefix, "offsets"}, {columns});
  return {weight.as<uint8_t>(), ratios.as<uint16_t>(), scales.as<float>(), offsets.as<float>(),
          CheckedBias(bias, outputs, prefix), padded, outputs};
}

Outliers CheckedOutliers(const Tensor& columns, const Tensor& weight, int64_t inputs, int64_t outputs,
                         const char* prefix) {
  if (!columns && !weight) return {};
  const Name inputs_name(prefix, "outlier_inputs"), weight_name(prefix, "outlier_weight");
  if (!columns) throw OperatorError(inputs_name.text() + " is missing beside " + weight_name.text());
  if (!weight) throw OperatorError(weight_name.text() + " is missing beside " + inputs_name.text());
  const int64_t count = columns.dims[0];
  CheckDims(weight, weight_name, {RoundUp(outputs, kPanel) / kPanel, count, kPanel});
  const auto* ids = columns.as<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] < 0 || ids[i] >= inputs) {
      Refuse(inputs_name.text(), ids[i], "it must be 0 to " + std::to_string(inputs - 1));
    }
  }
  return {ids, weight.as<float>(), count};
}

QuantizedBuffer::QuantizedBuffer(int64_t rows, int64_t padded_inputs, const Outliers& outliers)
    : data_(static_cast<size_t>(RoundUp(rows, kPanel) * padded_inputs)),
      steps_(static_cast<size_t>(rows)),
      zeros_(static_cast<size_t>(rows)),
      mask_(static_cast<size_t>(outliers.count > 0 ? padded_inputs : 0)),
      outliers_(static_cast<size_t>(rows * outliers.count)),
      rows_{data_.data(),     steps_.data(), zeros_.data(),    rows,
            outliers.columns, mask_.data(),  outliers_.data(), outliers.count} {
  if (outliers.count == 0) return;
  std::fill_n(mask_.data(), padded_inputs, -1);
  for (int64_t i = 0; i < outliers.count; ++i) mask_[static_cast<size_t>(outliers.columns[i])] = 0;
}

void QuantizeAll(const Call& call, const float* x, int64_t inputs, int64_t padded_inputs, const QuantizedRows& rows) {
  QuantizeRows(call, ActiveKernels().quantize, x, inputs, padded_inputs, rows);
}

void Multiply(const Call& call, const float* x, int64_t rows, int64_t, const FloatWeight& weight,
              Activation activation, float* out) {
  const Kernels& kernels = ActiveKernels();
  const int64_t panels = RoundUp(weight.outputs, kPanel) / kPanel;
  const double macs = static_cast<double>(rows) * static_cast<double>(panels * kPanel * weight.inputs);
  const double bytes = 4.0 * static_cast<double>(panels * kPanel * weight.inputs);
  if (rows >= 2 * kRowBlock && bytes <= kCachedWeightBytes) {
    Share(call, rows, kRowBlock, kMaxTasks, [&](int64_t begin, int64_t end) {
      kernels.float_product(x + begin * weight.inputs, end - begin, weight, activation, 0, panels,
                            out + begin * weight.outputs, weight.outputs);
    });
    return;
  }
  const size_t tasks = TasksFor(std::max(macs / kFloatMacsPerNs, bytes / kBytesPerNs));
  Share(call, panels, kTaskPanels, tasks, [&](int64_t begin, int64_t end) {
    kernels.float_product(x, rows, weight, activation, begin, end, out + begin * kPanel, weight.outputs);
  });
}

void Multiply(const Call& call, const float* x, int64_t rows, int64_t inputs, const QuantizedWeight& weight,
              Activation activation, float* out) {
  const Kernels& kernels = ActiveKernels();
  const int64_t bytes = RoundUp(weight.outputs, kPanel) * weight.padded_inputs;
  MultiplyQuantized(call, x, rows, inputs, weight, bytes, activation, out, kernels.quantize,
                    kernels.quantized_product);
}

void Multiply(const Call& call, const float* x, int64_t rows, int64_t inputs, const NibbleWeight& weight,
              Activation activation, float* out) {
  const Kernels& kernels = ActiveKernels();
  const int64_t bytes = RoundUp(weight.outputs, kPanel) * (weight.padded_inputs / 2 + weight.padded_inputs / 16);
  MultiplyQuantized(call, x, rows, inputs, weight, bytes, activation, out, kernels.quantize_by_row,
                    kernels.nibble_product);
}

}  // namespace antiphon
