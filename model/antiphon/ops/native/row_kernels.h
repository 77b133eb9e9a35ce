// Kernels of single rows: norms, gates, embeddings, rotary positions, and reductions over logits. Included by one file
// per instruction set; simd.h lists the rules for such files.
#pragma once

#include "kernels.h"
#include "linear_kernels.h"
#include "simd.h"

namespace antiphon {
namespace {

// Calls body(offset, lanes used) for every vector of a row of `width` numbers.
template <typename Body>
ANTIPHON_INLINE void Vectors(int64_t width, const Body& body) {
  int64_t k = 0;
  for (; width - k >= kLanes; k += kLanes) body(k, kLanes);
  if (k < width) body(k, static_cast<int>(width - k));
}

// Stores x + residual in `sum`, or, where that is null, in `normed` until the norm overwrites it; returns the address.
ANTIPHON_INLINE float* AddResidual(const float* x, const float* residual, int64_t width, float* normed, float* sum) {
  float* to = sum != nullptr ? sum : normed;
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 v = LoadPart(x + k, part);
    StorePart(to + k, residual != nullptr ? v + LoadPart(residual + k, part) : v, part);
  });
  return to;
}

ANTIPHON_INLINE void ScaleAndShift(const float* from, float mean, float factor, const float* weight, const float* bias,
                                   int64_t width, float* to) {
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    F32 v = (LoadPart(from + k, part) - mean) * factor;
    if (weight != nullptr) v *= LoadPart(weight + k, part);
    if (bias != nullptr) v += LoadPart(bias + k, part);
    StorePart(to + k, v, part);
  });
}

ANTIPHON_INLINE float InverseRoot(float square, float epsilon) { return 1.0f / __builtin_sqrtf(square + epsilon); }

void LayerNorm(const float* x, const float* residual, const float* weight, const float* bias, float epsilon,
               int64_t width, float* normed, float* sum) {
  const float* added = AddResidual(x, residual, width, normed, sum);
  F32 total = {}, squares = {};
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY { total += LoadPart(added + k, part); });
  const float mean = Sum(total) / static_cast<float>(width);
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 v = LoadPart(added + k, part) - mean;
    squares += part == kLanes ? v * v : Select(Iota() < part, v * v, F32{});
  });
  const float factor = InverseRoot(Sum(squares) / static_cast<float>(width), epsilon);
  ScaleAndShift(added, mean, factor, weight, bias, width, normed);
}

void RmsNorm(const float* x, const float* residual, const float* weight, const float* bias, float epsilon,
             int64_t width, float* normed, float* sum) {
  const float* added = AddResidual(x, residual, width, normed, sum);
  F32 squares = {};
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 v = LoadPart(added + k, part);
    squares += v * v;
  });
  const float factor = InverseRoot(Sum(squares) / static_cast<float>(width), epsilon);
  ScaleAndShift(added, 0.0f, factor, weight, bias, width, normed);
}

void GateRow(const float* gate, const float* linear, Activation activation, int64_t width, float* out) {
  WithActivation(activation, [&](auto constant) {
    Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
      const F32 opened = Activate<decltype(constant)::value>(LoadPart(gate + k, part));
      StorePart(out + k, opened * LoadPart(linear + k, part), part);
    });
  });
}

void Ssru(const float* gates, const float* before, int64_t width, float* state, float* out) {
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 forget = 1.0f / (1.0f + Exp(-LoadPart(gates + width + k, part)));
    F32 v = (1.0f - forget) * LoadPart(gates + k, part);
    if (before != nullptr) v += forget * LoadPart(before + k, part);
    StorePart(state + k, v, part);
    StorePart(out + k, Max(v, F32{}), part);
  });
}

void Average(const float* x, const float* before, int64_t position, int64_t width, float* state, float* out) {
  const auto weight = static_cast<float>(position), count = static_cast<float>(position + 1);
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    F32 v = LoadPart(x + k, part);
    if (position > 0) v = (weight * LoadPart(before + k, part) + v) / count;
    StorePart(state + k, v, part);
    StorePart(out + k, v, part);
  });
}

ANTIPHON_INLINE void ScaleAndPlace(float* row, int64_t width, float scale, const float* position) {
  Vectors(width, [&](int64_t k, int part) ANTIPHON_BODY {
    F32 v = LoadPart(row + k, part) * scale;
    if (position != nullptr) v += LoadPart(position + k, part);
    StorePart(row + k, v, part);
  });
}

void EmbedFloat(const FloatWeight& weight, int64_t column, float scale, const float* position, float* out) {
  const float* from = weight.data + column / kPanel * weight.inputs * kPanel + column % kPanel;
  for (int64_t k = 0; k < weight.inputs; ++k) out[k] = from[k * kPanel];
  ScaleAndPlace(out, weight.inputs, scale, position);
}

void EmbedQuantized(const QuantizedWeight& weight, int64_t inputs, int64_t column, float scale, const float* position,
                    float* out) {
  const int8_t* from = weight.data + column / kPanel * weight.padded_inputs * kPanel + column % kPanel * 4;
  for (int64_t k = 0; k < inputs; ++k) out[k] = static_cast<float>(from[k / 4 * 4 * kPanel + k % 4]);
  ScaleAndPlace(out, inputs, scale * weight.scales[column], position);
}

void Rotate(float* vector, const float* table, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = vector[i], second = vector[half + i], cos = table[i], sin = table[half + i];
    vector[i] = first * cos - second * sin;
    vector[half + i] = second * cos + first * sin;
  }
}

LogitSummary Summarize(const float* logits, int64_t columns, bool with_sum) {
  F32 largest = Splat(-kInfinity);
  I32 where = {}, invalid = {};
  Vectors(columns, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 loaded = LoadPart(logits + k, part);
    const F32 v = part == kLanes ? loaded : Select(Iota() < part, loaded, Splat(-kInfinity));
    invalid |= v != v;
    where = Select(v > largest, Iota() + static_cast<int32_t>(k), where);
    largest = Max(v, largest);
  });
  LogitSummary summary{Largest(largest), 0, 0.0f, Bits(invalid) != 0};
  summary.index = Smallest(Select(largest == summary.largest, where, I32{} + INT32_MAX));
  if (with_sum) {
    F32 sum = {};
    Vectors(columns, [&](int64_t k, int part) ANTIPHON_BODY {
      const F32 weight = Exp(LoadPart(logits + k, part) - summary.largest);
      sum += part == kLanes ? weight : Select(Iota() < part, weight, F32{});
    });
    summary.sum = Sum(sum);
  }
  return summary;
}

void Boltzmann(const float* logits, int64_t columns, float largest, float inverse_temperature, float* weights) {
  Vectors(columns, [&](int64_t k, int part) ANTIPHON_BODY {
    StorePart(weights + k, Exp((LoadPart(logits + k, part) - largest) * inverse_temperature), part);
  });
}

int64_t AtLeast(const float* logits, int64_t columns, float threshold, int32_t* indices, int64_t room) {
  int64_t count = 0;
  Vectors(columns, [&](int64_t k, int part) ANTIPHON_BODY {
    const F32 v = LoadPart(logits + k, part);
    const I32 passed = part == kLanes ? (v >= threshold) : (Iota() < part) & (v >= threshold);
    for (uint32_t bits = Bits(passed); bits != 0; bits &= bits - 1) {
      if (count < room) indices[count] = static_cast<int32_t>(k) + __builtin_ctz(bits);
      ++count;
    }
  });
  return count;
}

void CapRow(float* values, int64_t count, float cap) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int part = static_cast<int>(count - i < kLanes ? count - i : kLanes);
    StorePart(values + i, Capped(LoadPart(values + i, part), cap), part);
  }
}

}  // namespace
}  // namespace antiphon
