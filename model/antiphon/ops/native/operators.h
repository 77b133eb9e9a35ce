// Every operator of this library, by family, and the division of work that is done row by row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "operator.h"

namespace antiphon {

std::vector<const OrtCustomOp*> RowOperators();
std::vector<const OrtCustomOp*> AttentionOperators();
std::vector<const OrtCustomOp*> SampleOperators();
std::vector<const OrtCustomOp*> SublayerOperators();
std::vector<const OrtCustomOp*> RecurrenceOperators();

// Calls body(row) for every row of a tensor [rows, width], on several threads when it is large.
template <typename Body>
void ForRows(const Call& call, int64_t rows, int64_t width, const Body& body) {
  constexpr int64_t kTaskElements = 16384;
  const int64_t share = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(width, 1));
  call.Parallel(static_cast<size_t>((rows + share - 1) / share), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * share;
    for (int64_t row = begin; row < std::min(begin + share, rows); ++row) body(row);
  });
}

}  // namespace antiphon
