// From one row of logits to a token: temperature, then top-k, then top-p of what top-k left, then one draw. The same
// steps as service/sampler.py, which tests hold it to.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace antiphon {

struct SamplingParams {
  float temperature;  // above 0
  int32_t top_k;      // 0: off
  float top_p;        // 1: off
};

// One row's logits and the largest of each `chunk` columns of them.
struct LogitRow {
  const float* logits;
  int64_t vocab;
  const float* chunk_largest;
  int64_t chunks;
  float largest;
};

struct Candidate {
  float logit;
  int32_t id;
};

// In [0, 1): Philox 4x64-10 (Salmon et al. 2011) with key `seed`, first word at counter `position`.
double UniformAt(uint64_t seed, uint64_t position);

// Draws a token. Allocates from the workspace; throws std::runtime_error when that is refused.
int64_t SampleRow(const Kernels& kernels, const LogitRow& row, const SamplingParams& params, double uniform);

// The `count` likeliest tokens, best first, ties by lowest id, into out [count]; count is at most vocab.
void LikeliestTokens(const Kernels& kernels, const LogitRow& row, int64_t count, Candidate* out);

}  // namespace antiphon
