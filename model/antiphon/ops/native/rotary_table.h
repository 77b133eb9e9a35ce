// Rotary positions (Su et al. 2021, section 3.4) of queries and keys.
#pragma once

#include <string>

#include "kernels.h"
#include "operator.h"

namespace antiphon {

// Cosines and sines by position: [positions, D].
class RotaryTable {
 public:
  // name: of the input that holds the table. width: D. Throws OperatorError unless they fit.
  RotaryTable(const Tensor& table, const char* name, int64_t width)
      : data_(table.as<float>()), positions_(table.dims[0]), width_(width) {
    if (table) Require(table.dims[1] == width, (std::string("width of ") + name).c_str(), table.dims[1],
                       "it must be that of a head");
  }

  explicit operator bool() const { return data_ != nullptr; }

  void Check(const int32_t* positions, int64_t tokens) const {
    for (int64_t token = 0; token < tokens; ++token) {
      const int32_t position = positions[token];
      Require(position >= 0 && position < positions_, "positions", position,
              [&] { return "it must be 0 to " + std::to_string(positions_ - 1); });
    }
  }

  // Rotates the queries and keys of one token, [3 H D], in place.
  void Rotate(int32_t position, int64_t heads, float* qkv) const {
    for (int64_t head = 0; head < 2 * heads; ++head) {
      ActiveKernels().rotate(qkv + head * width_, data_ + position * width_, width_);
    }
  }

 private:
  const float* data_;
  int64_t positions_;
  int64_t width_;
};

}  // namespace antiphon
