// The checked sampling parameters of a call's samples, and the application of a sample's edits to the model's logits.
// Names are those of model/antiphon/ops/sampling.py.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "operator.h"
#include "sampling.h"
#include "shortlist.h"
#include "workspace.h"

namespace antiphon {

// Edit of one token: its value v becomes penalised(v + bias) + shift.
struct Edit {
  float bias;
  float penalty;
  float shift;
};

// Columns of float_params and int_params, in the order of FLOAT_PARAMS and INT_PARAMS in model/antiphon/ops/sampling.py.
enum FloatParam { kTemperature, kTopP, kMinP, kTypicalP, kNumFloatParams };
enum IntParam { kTopK, kSeed, kForcedId, kNumLogprobs, kIsNormalized, kRestriction, kNumIntParams };

class SamplingArrays {
 public:
  // Reads the operands of a call, beginning at index `first`. Throws OperatorError naming a value that is out of range.
  SamplingArrays(const Call& call, size_t first, int64_t tokens, int64_t vocab);

  int64_t count() const { return count_; }
  const int32_t* picks() const { return picks_; }
  int64_t most_logprobs() const { return most_logprobs_; }  // the largest number of candidates, 0 or more

  int64_t forced_id(int64_t i) const { return integer(i, kForcedId); }        // -1: none
  int64_t num_logprobs(int64_t i) const { return integer(i, kNumLogprobs); }  // -1: none
  bool is_normalized(int64_t i) const { return integer(i, kIsNormalized) != 0; }
  bool is_exclusive(int64_t i) const { return integer(i, kRestriction) != 0; }
  // Returns true for a sample whose vocabulary is the tokens with an edit: the leading edits, by rising id.
  bool is_selected(int64_t i) const { return integer(i, kRestriction) == 2; }
  bool are_all_selected() const;
  int64_t num_selected(int64_t i) const { return num_selected_[static_cast<size_t>(i)]; }
  const int32_t* selected_ids(int64_t i) const { return edit_ids_ + first_edit(i); }
  // Index of a token among the selected ones of a sample, -1 if it is none of them.
  int64_t index_of(int64_t i, int64_t id) const;
  bool is_sampled(int64_t i) const { return real(i, kTemperature) > 0.0f; }
  // Returns false for a sample whose values are those of the logits, or of its own vocabulary's logits.
  bool is_edited(int64_t i) const {
    if (is_normalized(i) || (is_exclusive(i) && !is_selected(i))) return true;
    return edit_values_ != nullptr && end_of_edits(i) > first_edit(i);
  }
  // Returns true for a beam whose candidates are wanted and whose values need no edit but the normalisation.
  bool is_plain_beam(int64_t i) const {
    const bool is_whole = !is_exclusive(i) && end_of_edits(i) == first_edit(i);
    const bool is_plain = is_whole || (is_selected(i) && edit_values_ == nullptr);
    return is_plain && is_normalized(i) && !is_sampled(i) && forced_id(i) < 0 && num_logprobs(i) > 0;
  }
  // Returns true for a sample that needs more than the largest logit, the forced token's logit and the sum.
  bool needs_row(int64_t i) const {
    return num_logprobs(i) > 0 || (forced_id(i) < 0 && (is_sampled(i) || (is_edited(i) && !only_forbids(i))));
  }
  // Returns true for a greedy sample that needs nothing but the likeliest token besides a few forbidden ones.
  bool only_forbids(int64_t i) const { return only_forbids_[static_cast<size_t>(i)]; }
  bool needs_log_sum(int64_t i) const { return num_logprobs(i) >= 0 || is_normalized(i); }

  int64_t first_edit(int64_t i) const { return edit_offsets_[i]; }
  int64_t end_of_edits(int64_t i) const { return edit_offsets_[i + 1]; }
  int32_t edited_id(int64_t edit) const { return edit_ids_[edit]; }
  Edit edit(int64_t edit) const;

  SamplingParams sampling(int64_t i) const {
    return {real(i, kTemperature), integer(i, kTopK), real(i, kTopP), real(i, kMinP), real(i, kTypicalP)};
  }
  // The random number of a sample.
  double uniform(int64_t i) const {
    return UniformAt(static_cast<uint64_t>(integer(i, kSeed)), static_cast<uint64_t>(positions_[picks_[i]]));
  }

 private:
  float real(int64_t i, FloatParam param) const { return float_params_[i * kNumFloatParams + param]; }
  int64_t integer(int64_t i, IntParam param) const { return int_params_[i * kNumIntParams + param]; }
  void CheckSample(int64_t i, int64_t tokens, int64_t vocab) const;
  void CheckWarpers(int64_t i) const;
  void CheckEdits(int64_t room, int64_t vocab) const;
  bool OnlyForbids(int64_t i) const;
  int64_t CheckedSelection(int64_t i) const;

  int64_t count_;
  int64_t most_logprobs_ = 0;
  const int32_t* positions_;
  const int32_t* picks_;
  const float* float_params_;   // [count, kNumFloatParams]
  const int64_t* int_params_;   // [count, kNumIntParams]
  const int32_t* edit_offsets_;
  const int32_t* edit_ids_;
  const float* edit_values_;  // [E, 3], or null: all edits are neutral
  std::vector<bool> only_forbids_;
  std::vector<int64_t> num_selected_;
};

// The values that sample i reads: the model's own logits if nothing is edited, and a copy otherwise.
class EditedRow {
 public:
  // log_sum: log of the sum of exp over the row. Throws std::runtime_error when the workspace refuses memory.
  EditedRow(const Kernels& kernels, const SamplingArrays& sampling, int64_t i, const ValueRow& logits, double log_sum);

  const ValueRow& row() const { return row_; }

 private:
  void Fill(const SamplingArrays& sampling, int64_t i, const ValueRow& logits, double log_sum) const;
  void FillSelected(const SamplingArrays& sampling, int64_t i, const ValueRow& logits, double taken) const;
  void Summarize(const Kernels& kernels);

  Scratch<float> values_;
  Scratch<float> largest_;
  ValueRow row_;
};

}  // namespace antiphon
