// One row of values over the vocabulary, and its largest values, found without sorting the rest. Candidates and the
// tokens that top-k and top-p keep are subsets of these.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "workspace.h"

namespace antiphon {

constexpr int64_t kChunkPanels = 16;
constexpr int64_t kChunk = kChunkPanels * kPanel;  // columns that are summarised together

inline int64_t ChunksOf(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

// Values of every token, none of them NaN or above the largest float: logits, or edited logits.
struct ValueRow {
  const float* values;
  int64_t vocab;
  const float* chunk_largest;  // [ChunksOf(vocab)]
  float largest;
  int64_t likeliest;  // the token of the largest value, lowest on ties
};

struct Candidate {
  float value;
  int32_t id;
};

inline bool IsLikelier(const Candidate& a, const Candidate& b) {
  return a.value > b.value || (a.value == b.value && a.id < b.id);
}
inline bool HasLowerId(const Candidate& a, const Candidate& b) { return a.id < b.id; }

// The `count` likeliest tokens of a row, in no order; of equal values the lowest ids.
class Shortlist {
 public:
  // taken: subtracted from each value, in double precision, before values are compared: they are rounded to floats
  // again, so that some become equal. Throws std::runtime_error when the workspace refuses memory.
  Shortlist(const Kernels& kernels, const ValueRow& row, int64_t count, double taken = 0.0);

  Candidate* begin() const { return entries_.data(); }
  Candidate* end() const { return begin() + size_; }
  int64_t size() const { return size_; }

 private:
  Scratch<Candidate> entries_;
  int64_t size_ = 0;
};

}  // namespace antiphon
