// Packed weights among the inputs of a node, by precision, so that one operator is written once for all precisions.
#pragma once

#include <array>

#include "operator.h"
#include "product.h"

namespace antiphon {

// A reader of weights has
//   kPrecision: index of the node's name;  Weight: the packed weight;  kPorts: its inputs, the bias last;
//   kOutlierPorts: optional inputs at the end of the node;
//   Read(call, first, outliers, prefix, inputs, outputs): the weight whose inputs begin at `first`, and those of its
//   outliers at `outliers`; prefix: of their names.
constexpr std::array<Port, 2> kOptionalOutliers = {{{kInt32, kOptional}, {kFloat32, kOptional}}};

inline Outliers ReadOutliers(const Call& call, size_t first, const char* prefix, int64_t inputs,
                             int64_t outputs) {
  return CheckedOutliers(call.OptionalInput(first, {prefix, "outlier_inputs"}, 1),
                         call.OptionalInput(first + 1, {prefix, "outlier_weight"}, 3), inputs, outputs,
                         prefix);
}

struct Float32Inputs {
  static constexpr size_t kPrecision = 0;
  using Weight = FloatWeight;
  static constexpr std::array<Port, 2> kPorts = {{{kFloat32}, {kFloat32, kOptional}}};
  static constexpr std::array<Port, 0> kOutlierPorts{};

  static Weight Read(const Call& call, size_t first, size_t, const char* prefix, int64_t inputs,
                     int64_t outputs) {
    return CheckedWeight(call.Input(first, {prefix, "weight"}, 3),
                         call.OptionalInput(first + 1, {prefix, "bias"}, 1), inputs, outputs, prefix);
  }
};

// int8 weights; every row of activations is quantised with its own scale.
struct Int8Inputs {
  static constexpr size_t kPrecision = 1;
  using Weight = QuantizedWeight;
  static constexpr std::array<Port, 4> kPorts = {{{kInt8}, {kFloat32}, {kInt32}, {kFloat32, kOptional}}};
  static constexpr auto kOutlierPorts = kOptionalOutliers;

  static Weight Read(const Call& call, size_t first, size_t outliers, const char* prefix, int64_t inputs,
                     int64_t outputs) {
    Weight weight =
        CheckedWeight(call.Input(first, {prefix, "weight"}, 4),
                      call.Input(first + 1, {prefix, "scales"}, 1),
                      call.Input(first + 2, {prefix, "column_sums"}, 1),
                      call.OptionalInput(first + 3, {prefix, "bias"}, 1), inputs, outputs, prefix);
    weight.outliers = ReadOutliers(call, outliers, prefix, inputs, outputs);
    return weight;
  }
};

// 4-bit weights in groups of inputs.
struct Int4Inputs {
  static constexpr size_t kPrecision = 2;
  using Weight = NibbleWeight;
  static constexpr std::array<Port, 5> kPorts = {
      {{kInt8}, {kFloat16}, {kFloat32}, {kFloat32}, {kFloat32, kOptional}}};
  static constexpr auto kOutlierPorts = kOptionalOutliers;

  static Weight Read(const Call& call, size_t first, size_t outliers, const char* prefix, int64_t inputs,
                     int64_t outputs) {
    Weight weight =
        CheckedWeight(call.Input(first, {prefix, "weight"}, 4),
                      call.Input(first + 1, {prefix, "ratios"}, 3),
                      call.Input(first + 2, {prefix, "scales"}, 1),
                      call.Input(first + 3, {prefix, "offsets"}, 1),
                      call.OptionalInput(first + 4, {prefix, "bias"}, 1), inputs, outputs, prefix);
    weight.outliers = ReadOutliers(call, outliers, prefix, inputs, outputs);
    return weight;
  }
};

}  // namespace antiphon
