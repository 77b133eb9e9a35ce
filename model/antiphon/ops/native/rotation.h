// Rotary positions (Su et al. 2021, section 3.4) of queries and keys.
#pragma once

#include <string>

#include "kernels.h"
#include "operator.h"
#include "operators.h"

namespace antiphon {

// Optional inputs of a node that rotate its queries and keys: positions [tokens], and rotary_table [P, D], cosines and
// then sines of the angles of each position.
class Rotation {
 public:
  // The arguments `positions` and `table` are indices of inputs. width: D. Throws OperatorError unless they fit.
  Rotation(const Call& call, size_t positions, size_t table, int64_t tokens, int64_t width)
      : table_(call.OptionalInput(table, "rotary_table", 2)), tokens_(tokens), width_(width) {
    if (!table_) return;
    Require(table_.dims[1] == width, "width of rotary_table", table_.dims[1], "it must be that of a head");
    Require(width % 2 == 0, "width of rotary_table", width, "it must be even");
    positions_ = call.Input(positions, "positions", 1);
    Require(positions_.dims[0] == tokens, "length of positions", positions_.dims[0], "it must be the number of tokens");
    for (int64_t token = 0; token < tokens; ++token) {
      Require(Position(token) >= 0 && Position(token) < table_.dims[0], "positions", Position(token),
              [&] { return "it must be 0 to " + std::to_string(table_.dims[0] - 1); });
    }
  }

  // Rotates the queries and keys of all tokens, [tokens, 3 H D], in place.
  void Run(const Call& call, int64_t heads, float* qkv) const {
    if (!table_) return;
    const int64_t stride = 3 * heads * width_;
    ForRows(call, tokens_, stride, [&](int64_t token) {
      const float* angles = table_.as<float>() + Position(token) * width_;
      float* head = qkv + token * stride;
      for (int64_t end = 2 * heads; end > 0; --end, head += width_) ActiveKernels().rotate(head, angles, width_);
    });
  }

 private:
  int64_t Position(int64_t token) const { return positions_.as<int32_t>()[token]; }

  Tensor table_;
  Tensor positions_;
  int64_t tokens_;
  int64_t width_;
};

}  // namespace antiphon
