// Shared by the attention operators: ranges of packed sequences, heads of equal width, and score biases.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"
#include "operator.h"

namespace antiphon {

// Token range of each sequence.
struct Packing {
  const int32_t* offsets;
  int64_t sequences;

  int64_t begin(int64_t sequence) const { return offsets[sequence]; }
  int64_t end(int64_t sequence) const { return begin(sequence + 1); }
  int64_t length(int64_t sequence) const { return end(sequence) - begin(sequence); }
};

// Throws unless offsets rise from 0 to `tokens`.
inline Packing CheckedPacking(const Tensor& offsets, int64_t tokens) {
  Require(offsets.dims[0] >= 1, "length of offsets", offsets.dims[0], "it must be at least 1");
  const Packing packing{offsets.as<int32_t>(), offsets.dims[0] - 1};
  Require(packing.offsets[0] == 0, "offsets[0]", packing.offsets[0], "it must be 0");
  for (int64_t sequence = 0; sequence < packing.sequences; ++sequence) {
    Require(packing.length(sequence) >= 0, "offsets", packing.offsets[sequence + 1], "they must not fall");
  }
  const int32_t last = packing.offsets[packing.sequences];
  Require(last == tokens, "the last of offsets", last,
          [&] { return "it must be the number of tokens, " + std::to_string(tokens); });
  return packing;
}

// Heads of equal width in a row of `parts` equal parts.
inline int64_t HeadWidth(const char* name, int64_t width, int64_t parts, int64_t heads) {
  const int64_t head = width / (parts * heads);
  Require(head > 0 && width == parts * heads * head, name, width,
          [&] { return "its width must be a multiple of " + std::to_string(parts * heads); });
  return head;
}

// The score bias of every head.
struct Biases {
  const float* table = nullptr;
  int64_t reach = 0;
  const float* slopes = nullptr;

  Biases(const Call& call, size_t table_index, size_t slopes_index, int64_t heads) {
    const Tensor bias = call.OptionalInput(table_index, "bias_table", 2);
    const Tensor slope = call.OptionalInput(slopes_index, "slopes", 1);
    if (bias) {
      Require(bias.dims[0] == heads, "rows of bias_table", bias.dims[0], "it must be num_heads");
      Require(bias.dims[1] % 2 == 1, "width of bias_table", bias.dims[1], "it must be odd");
    }
    if (slope) Require(slope.dims[0] == heads, "length of slopes", slope.dims[0], "it must be num_heads");
    table = bias.as<float>();
    reach = bias ? bias.dims[1] / 2 : 0;
    slopes = slope.as<float>();
  }

  ScoreBias Of(int64_t head) const {
    const float* row = table == nullptr ? nullptr : table + head * (2 * reach + 1);
    return {row, reach, slopes == nullptr ? 0.0f : slopes[head]};
  }
};

}  // namespace antiphon
