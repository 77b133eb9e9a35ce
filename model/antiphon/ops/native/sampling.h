// Sampling of a token from one row of values: temperature, top-k, top-p, min-p and typical-p, each applied to the tokens
// that the one before kept, then one draw. Tests compare it with model/antiphon/ops/logits_warpers.py.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "shortlist.h"

namespace antiphon {

struct SamplingParams {
  float temperature;  // above 0
  int64_t top_k;      // 0: off
  float top_p;        // 1: off
  float min_p;        // 0: off
  float typical_p;    // 1: off
};

// In [0, 1): Philox 4x64-10 (Salmon et al. 2011) with key `seed`, first word at counter `position`.
double UniformAt(uint64_t seed, uint64_t position);

// Draws a token of a row whose largest value is finite. Allocates from the workspace; throws std::runtime_error when
// that is refused.
int64_t SampleRow(const Kernels& kernels, const ValueRow& row, const SamplingParams& params, double uniform);

}  // namespace antiphon
