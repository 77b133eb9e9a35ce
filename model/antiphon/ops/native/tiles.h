// Division of rows into tiles, whose heights are template arguments of the inner loops. Included by one file per
// instruction set; simd.h lists the rules for such files.
#pragma once

#include <cstdint>

#include "simd.h"

namespace antiphon {
namespace {

template <int height>
struct Height {
  static constexpr int value = height;
};

// Calls body(first row, height) for as few tiles as possible, at most `most` rows high. Their heights differ by one at
// most: a low tile has too few sums to hide the latency of an instruction.
template <typename Body>
ANTIPHON_INLINE void ForTiles(int64_t rows, int64_t most, const Body& body) {
  int64_t first = 0;
  for (int64_t tiles = (rows + most - 1) / most; tiles > 0; --tiles) {
    const int64_t height = (rows - first + tiles - 1) / tiles;
    body(first, static_cast<int>(height));
    first += height;
  }
}

// Calls body(constant) with a height of 1 .. Most as a template argument.
template <int Most, typename Body>
ANTIPHON_INLINE void WithHeight(int height, const Body& body) {
  if constexpr (Most > 1) {
    if (height < Most) return WithHeight<Most - 1>(height, body);
  }
  body(Height<Most>{});
}

}  // namespace
}  // namespace antiphon
