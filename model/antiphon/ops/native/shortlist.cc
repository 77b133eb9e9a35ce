#include "shortlist.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace antiphon {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A value that at least `count` values reach: the count-th largest of the chunks' maxima, or of those of panels where a
// row has fewer chunks.
float Threshold(const ValueRow& row, int64_t count) {
  const int64_t chunks = ChunksOf(row.vocab), panels = row.vocab / kPanel;
  if (count > std::max(chunks, panels)) return -kInfinity;
  const int64_t size = count > chunks ? panels : chunks;
  const Scratch<float> maxima(static_cast<size_t>(size));
  if (count > chunks) {
    for (int64_t panel = 0; panel < panels; ++panel) {
      const float* values = row.values + panel * kPanel;
      maxima[static_cast<size_t>(panel)] = *std::max_element(values, values + kPanel);
    }
  } else {
    std::copy(row.chunk_largest, row.chunk_largest + chunks, maxima.data());
  }
  std::nth_element(maxima.data(), maxima.data() + count - 1, maxima.data() + size, std::greater<float>());
  return maxima[static_cast<size_t>(count - 1)];
}

float Without(float value, double taken) { return static_cast<float>(static_cast<double>(value) - taken); }

// A bound below every value that can become as large as `threshold` becomes once `taken` is subtracted: two units in
// the last place of the result are more than rounding can hide.
float BelowEquals(float threshold, double taken) {
  if (taken == 0.0 || std::isinf(threshold)) return threshold;
  const float result = std::fabs(Without(threshold, taken));
  const double unit = static_cast<double>(std::nextafter(result, kInfinity)) - static_cast<double>(result);
  return std::nextafter(Without(threshold, 2.0 * unit), -kInfinity);
}

}  // namespace

Shortlist::Shortlist(const Kernels& kernels, const ValueRow& row, int64_t count, double taken)
    : entries_(static_cast<size_t>(row.vocab)) {
  const float threshold = BelowEquals(Threshold(row, count), taken);
  const Scratch<int32_t> ids(static_cast<size_t>(kChunk));
  int64_t found = 0;
  for (int64_t chunk = 0; chunk < ChunksOf(row.vocab); ++chunk) {
    if (row.chunk_largest[chunk] < threshold) continue;
    const int64_t first = chunk * kChunk, columns = std::min(kChunk, row.vocab - first);
    const int64_t passed = kernels.at_least(row.values + first, columns, threshold, ids.data(), columns);
    for (int64_t index = 0; index < passed; ++index) {
      const auto id = static_cast<int32_t>(first) + ids[static_cast<size_t>(index)];
      entries_[static_cast<size_t>(found++)] = {Without(row.values[id], taken), id};
    }
  }
  size_ = std::min(count, found);
  if (size_ < found) std::nth_element(begin(), begin() + size_, begin() + found, IsLikelier);
}

}  // namespace antiphon
