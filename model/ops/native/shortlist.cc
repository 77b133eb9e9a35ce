#include "shortlist.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace antiphon {

namespace {

// A value that at least `count` values reach: the count-th largest of the chunks' maxima.
float Threshold(const ValueRow& row, int64_t count) {
  const int64_t chunks = ChunksOf(row.vocab);
  if (count > chunks) return -std::numeric_limits<float>::infinity();
  const Scratch<float> maxima(static_cast<size_t>(chunks));
  std::copy(row.chunk_largest, row.chunk_largest + chunks, maxima.data());
  std::nth_element(maxima.data(), maxima.data() + count - 1, maxima.data() + chunks, std::greater<float>());
  return maxima[static_cast<size_t>(count - 1)];
}

}  // namespace

Shortlist::Shortlist(const Kernels& kernels, const ValueRow& row, int64_t count)
    : entries_(static_cast<size_t>(row.vocab)) {
  const Scratch<int32_t> ids(static_cast<size_t>(row.vocab));
  const int64_t found = kernels.at_least(row.values, row.vocab, Threshold(row, count), ids.data(), row.vocab);
  for (int64_t index = 0; index < found; ++index) {
    const int32_t id = ids[static_cast<size_t>(index)];
    entries_[static_cast<size_t>(index)] = {row.values[id], id};
  }
  size_ = std::min(count, found);
  if (size_ < found) std::nth_element(begin(), begin() + size_, begin() + found, IsLikelier);
}

}  // namespace antiphon
