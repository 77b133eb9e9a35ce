#include "shortlist.h"

#include <algorithm>
#include <functional>

#include "cut.h"

namespace antiphon {

namespace {

// The count-th largest of the chunks' maxima, which at least `count` values reach.
float Threshold(const ValueRow& row, int64_t count) {
  const int64_t chunks = ChunksOf(row.vocab);
  const Scratch<float> maxima(static_cast<size_t>(chunks));
  std::copy(row.chunk_largest, row.chunk_largest + chunks, maxima.data());
  std::nth_element(maxima.data(), maxima.data() + count - 1, maxima.data() + chunks, std::greater<float>());
  return maxima[static_cast<size_t>(count - 1)];
}

bool HasLowerId(const Candidate& a, const Candidate& b) { return a.id < b.id; }

}  // namespace

Shortlist::Shortlist(const Kernels& kernels, const ValueRow& row, int64_t count)
    : entries_(static_cast<size_t>(row.vocab)) {
  if (count <= ChunksOf(row.vocab)) {
    TakeFew(kernels, row, count);
  } else {
    TakeMany(row, std::min(count, row.vocab));
  }
}

void Shortlist::TakeFew(const Kernels& kernels, const ValueRow& row, int64_t count) {
  const Scratch<int32_t> ids(static_cast<size_t>(row.vocab));
  const int64_t found = kernels.at_least(row.values, row.vocab, Threshold(row, count), ids.data(), row.vocab);
  for (int64_t index = 0; index < found; ++index) {
    const int32_t id = ids[static_cast<size_t>(index)];
    entries_[static_cast<size_t>(index)] = {row.values[id], id};
  }
  size_ = count;
  if (size_ == found) return;
  std::nth_element(begin(), end(), begin() + found, IsLikelier);
  std::sort(begin(), end(), HasLowerId);
}

void Shortlist::TakeMany(const ValueRow& row, int64_t count) {
  const Scratch<float> ranks(static_cast<size_t>(row.vocab));
  for (int64_t id = 0; id < row.vocab; ++id) ranks[static_cast<size_t>(id)] = row.largest - row.values[id];
  const auto key = [&](int64_t id) { return DescendingKey(row.values[id]); };
  const auto one = [](int64_t) { return 1; };
  const auto all = [count](int64_t) { return count; };
  const Cut<uint32_t> cut = Cutter<uint32_t>::Find(ranks.data(), row.vocab, key, one, all);
  const float last = ValueOfKey(cut.last);
  int64_t ties = cut.missing;
  for (int64_t id = 0; size_ < count; ++id) {
    const bool is_last = row.values[id] == last;
    entries_[static_cast<size_t>(size_)] = {row.values[id], static_cast<int32_t>(id)};
    size_ += (row.values[id] > last) | (is_last & (ties > 0));
    ties -= is_last;
  }
}

}  // namespace antiphon
