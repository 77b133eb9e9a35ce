#include "choices.h"

#include <algorithm>
#include <limits>
#include <string>

namespace antiphon {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kCandidates = 1024;  // may be asked for of any vocabulary: a beam asks for 16 * (2 + 16) at most
constexpr float kLargest = std::numeric_limits<float>::max();

// An operand with one value for each choice.
template <typename T>
const T* OfChoices(const Call& call, size_t index, const char* name, int64_t count) {
  const Tensor tensor = call.Input(index, name, 1);
  Require(tensor.dims[0] == count, name, tensor.dims[0], "its length must be the number of picks");
  return tensor.as<T>();
}

void RequireOfChoice(bool ok, const char* name, int64_t choice, const char* allowed) {
  Require(ok, (std::string(name) + " of choice").c_str(), choice, allowed);
}

// An edited value: never NaN, and never above the largest float, so that weights are numbers.
float Edited(float value, const Edit& edit) {
  const float biased = value + edit.bias;
  const float penalised = biased > 0.0f ? biased / edit.penalty : biased * edit.penalty;
  return std::min(std::min(penalised, kLargest) + edit.shift, kLargest);
}

}  // namespace

Choices::Choices(const Call& call, size_t first, int64_t tokens, int64_t vocab) {
  const Tensor positions = call.Input(first, "positions", 1), picks = call.Input(first + 1, "picks", 1);
  Require(positions.dims[0] == tokens, "length of positions", positions.dims[0], "it must be the rows of hidden");
  count_ = picks.dims[0];
  positions_ = positions.as<int32_t>();
  picks_ = picks.as<int32_t>();
  temperatures_ = OfChoices<float>(call, first + 2, "temperatures", count_);
  top_ks_ = OfChoices<int32_t>(call, first + 3, "top_ks", count_);
  top_ps_ = OfChoices<float>(call, first + 4, "top_ps", count_);
  min_ps_ = OfChoices<float>(call, first + 5, "min_ps", count_);
  typical_ps_ = OfChoices<float>(call, first + 6, "typical_ps", count_);
  seeds_ = OfChoices<int64_t>(call, first + 7, "seeds", count_);
  given_ids_ = OfChoices<int64_t>(call, first + 8, "given_ids", count_);
  num_logprobs_ = OfChoices<int32_t>(call, first + 9, "num_logprobs", count_);
  is_normalized_ = OfChoices<int32_t>(call, first + 10, "is_normalized", count_);
  is_exclusive_ = OfChoices<int32_t>(call, first + 11, "is_exclusive", count_);
  const Tensor offsets = call.Input(first + 12, "edit_offsets", 1), ids = call.Input(first + 13, "edit_ids", 1);
  const Tensor values = call.Input(first + 14, "edit_values", 2);
  Require(offsets.dims[0] == count_ + 1, "length of edit_offsets", offsets.dims[0],
          "it must be the number of picks and 1");
  Require(values.dims[0] == ids.dims[0], "rows of edit_values", values.dims[0], "they must be the number of edit_ids");
  Require(values.dims[1] == 3, "width of edit_values", values.dims[1], "it must be 3");
  edit_offsets_ = offsets.as<int32_t>();
  edit_ids_ = ids.as<int32_t>();
  edit_values_ = values.as<float>();
  for (int64_t i = 0; i < count_; ++i) {
    CheckChoice(i, tokens, vocab);
    most_logprobs_ = std::max(most_logprobs_, num_logprobs(i));
  }
  CheckEdits(ids.dims[0], vocab);
}

Edit Choices::edit(int64_t edit) const {
  const float* values = edit_values_ + 3 * edit;
  return {values[0], values[1], values[2]};
}

void Choices::CheckChoice(int64_t i, int64_t tokens, int64_t vocab) const {
  Require(picks_[i] >= 0 && picks_[i] < tokens, "picks", picks_[i], "it must be below " + std::to_string(tokens));
  Require(given_ids_[i] >= -1 && given_ids_[i] < vocab, "given_ids", given_ids_[i],
          "it must be -1 or below " + std::to_string(vocab));
  const int64_t most = std::max(vocab, kCandidates);
  Require(num_logprobs_[i] >= -1 && num_logprobs_[i] <= most, "num_logprobs", num_logprobs_[i],
          "it must be -1 to " + std::to_string(most));
  Require((is_normalized_[i] & ~1) == 0, "is_normalized", is_normalized_[i], "it must be 0 or 1");
  Require((is_exclusive_[i] & ~1) == 0, "is_exclusive", is_exclusive_[i], "it must be 0 or 1");
  CheckWarpers(i);
}

void Choices::CheckWarpers(int64_t i) const {
  // Said so that NaN is refused.
  RequireOfChoice(temperatures_[i] >= 0.0f, "temperatures", i, "it must be 0 or more");
  Require(top_ks_[i] >= 0, "top_ks", top_ks_[i], "it must be 0 or more");
  RequireOfChoice(top_ps_[i] >= 0.0f, "top_ps", i, "it must be 0 or more");
  RequireOfChoice(min_ps_[i] >= 0.0f && min_ps_[i] <= 1.0f, "min_ps", i, "it must be 0 to 1");
  RequireOfChoice(typical_ps_[i] >= 0.0f, "typical_ps", i, "it must be 0 or more");
}

void Choices::CheckEdits(int64_t room, int64_t vocab) const {
  Require(edit_offsets_[0] == 0, "edit_offsets", edit_offsets_[0], "the first must be 0");
  for (int64_t i = 0; i < count_; ++i) {
    Require(edit_offsets_[i + 1] >= edit_offsets_[i] && edit_offsets_[i + 1] <= room, "edit_offsets",
            edit_offsets_[i + 1], "they must rise, to " + std::to_string(room) + " at most");
  }
  for (int64_t index = 0; index < edit_offsets_[count_]; ++index) {
    const Edit values = edit(index);
    Require(edit_ids_[index] >= 0 && edit_ids_[index] < vocab, "edit_ids", edit_ids_[index],
            "it must be below " + std::to_string(vocab));
    const bool is_legal = values.bias < kInfinity && values.shift < kInfinity;
    Require(is_legal && values.penalty > 0.0f && values.penalty < kInfinity, "edit_values of edit", index,
            "bias and shift must be below infinity, the penalty above 0");
  }
}

EditedRow::EditedRow(const Kernels& kernels, const Choices& choices, int64_t i, const ValueRow& logits, double log_sum)
    : values_(static_cast<size_t>(choices.is_edited(i) ? logits.vocab : 0)),
      largest_(static_cast<size_t>(choices.is_edited(i) ? ChunksOf(logits.vocab) : 0)),
      row_(logits) {
  if (!choices.is_edited(i)) return;
  Fill(choices, i, logits, log_sum);
  Summarize(kernels);
}

void EditedRow::Fill(const Choices& choices, int64_t i, const ValueRow& logits, double log_sum) const {
  const double taken = choices.is_normalized(i) ? log_sum : 0.0;
  const auto value = [&](int64_t id) { return static_cast<float>(static_cast<double>(logits.values[id]) - taken); };
  const int64_t begin = choices.first_edit(i), end = choices.end_of_edits(i);
  if (choices.is_exclusive(i)) {
    std::fill(values_.data(), values_.data() + logits.vocab, -kInfinity);
    for (int64_t edit = begin; edit < end; ++edit) {
      const int32_t id = choices.edited_id(edit);
      values_[static_cast<size_t>(id)] = value(id);
    }
  } else {
    for (int64_t id = 0; id < logits.vocab; ++id) values_[static_cast<size_t>(id)] = value(id);
  }
  for (int64_t edit = begin; edit < end; ++edit) {
    float& edited = values_[static_cast<size_t>(choices.edited_id(edit))];
    edited = Edited(edited, choices.edit(edit));
  }
}

void EditedRow::Summarize(const Kernels& kernels) {
  row_ = {values_.data(), row_.vocab, largest_.data(), -kInfinity, 0};
  for (int64_t chunk = 0; chunk < ChunksOf(row_.vocab); ++chunk) {
    const int64_t first = chunk * kChunk;
    const LogitSummary found =
        kernels.summarize(row_.values + first, std::min(kChunk, row_.vocab - first), /*with_sum=*/false);
    largest_[static_cast<size_t>(chunk)] = found.largest;
    if (found.largest <= row_.largest) continue;
    row_.largest = found.largest;
    row_.likeliest = first + found.index;
  }
}

}  // namespace antiphon
