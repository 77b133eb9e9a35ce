#include "sampling_arrays.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace antiphon {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int64_t kCandidates = 1024;  // allowed for any vocabulary: a beam requests up to 16 * (2 + 16)
constexpr float kLargest = std::numeric_limits<float>::max();

// An operand with one row of parameters for each sample.
template <typename T>
const T* Params(const Call& call, size_t index, const char* name, int64_t count, int64_t columns) {
  const Tensor tensor = call.Input(index, name, 2);
  Require(tensor.dims[0] == count, {"rows of ", name}, tensor.dims[0], "they must be the number of picks");
  Require(tensor.dims[1] == columns, {"columns of ", name}, tensor.dims[1],
          [&] { return "they must be " + std::to_string(columns); });
  return tensor.as<T>();
}

void RequireOfSample(bool ok, const char* name, int64_t sample, const char* allowed) {
  Require(ok, {name, " of sample"}, sample, allowed);
}

// An edited value: never NaN, and never above the largest float, so that weights are numbers.
float Edited(float value, const Edit& edit) {
  const float biased = value + edit.bias;
  const float penalised = biased > 0.0f ? biased / edit.penalty : biased * edit.penalty;
  return std::min(std::min(penalised, kLargest) + edit.shift, kLargest);
}

}  // namespace

SamplingArrays::SamplingArrays(const Call& call, size_t first, int64_t tokens, int64_t vocab) {
  const Tensor positions = call.Input(first, "positions", 1), picks = call.Input(first + 1, "picks", 1);
  Require(positions.dims[0] == tokens, "length of positions", positions.dims[0], "it must be the rows of hidden");
  count_ = picks.dims[0];
  positions_ = positions.as<int32_t>();
  picks_ = picks.as<int32_t>();
  float_params_ = Params<float>(call, first + 2, "float_params", count_, kNumFloatParams);
  int_params_ = Params<int64_t>(call, first + 3, "int_params", count_, kNumIntParams);
  const Tensor offsets = call.Input(first + 4, "edit_offsets", 1), ids = call.Input(first + 5, "edit_ids", 1);
  const Tensor values = call.Input(first + 6, "edit_values", 2);
  Require(offsets.dims[0] == count_ + 1, "length of edit_offsets", offsets.dims[0],
          "it must be the number of picks and 1");
  Require(values.dims[0] == ids.dims[0] || values.dims[0] == 0, "rows of edit_values", values.dims[0],
          "they must be the number of edit_ids, or 0");
  Require(values.dims[1] == 3, "width of edit_values", values.dims[1], "it must be 3");
  edit_offsets_ = offsets.as<int32_t>();
  edit_ids_ = ids.as<int32_t>();
  edit_values_ = values.dims[0] == 0 ? nullptr : values.as<float>();
  for (int64_t i = 0; i < count_; ++i) {
    CheckSample(i, tokens, vocab);
    most_logprobs_ = std::max(most_logprobs_, num_logprobs(i));
  }
  CheckEdits(ids.dims[0], vocab);
  only_forbids_.resize(static_cast<size_t>(count_));
  num_selected_.resize(static_cast<size_t>(count_));
  for (int64_t i = 0; i < count_; ++i) {
    only_forbids_[static_cast<size_t>(i)] = OnlyForbids(i);
    num_selected_[static_cast<size_t>(i)] = is_selected(i) ? CheckedSelection(i) : 0;
  }
}

bool SamplingArrays::OnlyForbids(int64_t i) const {
  constexpr int64_t kMost = 64;
  const int64_t begin = first_edit(i), end = end_of_edits(i);
  if (end == begin || end - begin > kMost || is_exclusive(i) || is_sampled(i)) return false;
  if (forced_id(i) >= 0 || needs_log_sum(i)) return false;
  for (int64_t index = begin; index < end; ++index) {
    const Edit values = edit(index);
    if (values.bias != 0.0f || values.penalty != 1.0f || values.shift != -kInfinity) return false;
  }
  return true;
}

int64_t SamplingArrays::CheckedSelection(int64_t i) const {
  const int32_t *begin = edit_ids_ + first_edit(i), *end = edit_ids_ + end_of_edits(i);
  const int32_t* last = std::is_sorted_until(begin, end, [](int32_t a, int32_t b) { return a <= b; });
  const int64_t size = last - begin;
  Require(size > 0, "edits of a selected sample", i, "it must have an edit for each token of its vocabulary");
  for (const int32_t* other = last; other < end; ++other) {
    Require(std::binary_search(begin, last, *other), "edit_ids", *other, "it must be one of the sample's vocabulary");
  }
  if (forced_id(i) >= 0) {
    Require(std::binary_search(begin, last, static_cast<int32_t>(forced_id(i))), "forced_id", forced_id(i),
            "it must be one of the sample's vocabulary");
  }
  return size;
}

bool SamplingArrays::are_all_selected() const {
  for (int64_t i = 0; i < count_; ++i) {
    if (!is_selected(i)) return false;
  }
  return true;
}

int64_t SamplingArrays::index_of(int64_t i, int64_t id) const {
  const int32_t *begin = selected_ids(i), *end = begin + num_selected(i);
  const int32_t* found = std::lower_bound(begin, end, static_cast<int32_t>(id));
  return found == end || *found != id ? -1 : found - begin;
}

Edit SamplingArrays::edit(int64_t edit) const {
  if (edit_values_ == nullptr) return {0.0f, 1.0f, 0.0f};
  const float* values = edit_values_ + 3 * edit;
  return {values[0], values[1], values[2]};
}

void SamplingArrays::CheckSample(int64_t i, int64_t tokens, int64_t vocab) const {
  Require(picks_[i] >= 0 && picks_[i] < tokens, "picks", picks_[i],
          [&] { return "it must be below " + std::to_string(tokens); });
  Require(forced_id(i) >= -1 && forced_id(i) < vocab, "forced_id", forced_id(i),
          [&] { return "it must be -1 or below " + std::to_string(vocab); });
  const int64_t most = std::max(vocab, kCandidates);
  Require(num_logprobs(i) >= -1 && num_logprobs(i) <= most, "num_logprobs", num_logprobs(i),
          [&] { return "it must be -1 to " + std::to_string(most); });
  Require((integer(i, kIsNormalized) & ~1) == 0, "is_normalized", integer(i, kIsNormalized), "it must be 0 or 1");
  const int64_t restriction = integer(i, kRestriction);
  Require(restriction >= 0 && restriction <= 2, "restriction", restriction, "it must be 0, 1 or 2");
  CheckWarpers(i);
}

void SamplingArrays::CheckWarpers(int64_t i) const {
  // Written so that NaN is refused.
  RequireOfSample(real(i, kTemperature) >= 0.0f, "temperature", i, "it must be 0 or more");
  Require(integer(i, kTopK) >= 0, "top_k", integer(i, kTopK), "it must be 0 or more");
  RequireOfSample(real(i, kTopP) >= 0.0f, "top_p", i, "it must be 0 or more");
  RequireOfSample(real(i, kMinP) >= 0.0f && real(i, kMinP) <= 1.0f, "min_p", i, "it must be 0 to 1");
  RequireOfSample(real(i, kTypicalP) >= 0.0f, "typical_p", i, "it must be 0 or more");
}

void SamplingArrays::CheckEdits(int64_t room, int64_t vocab) const {
  Require(edit_offsets_[0] == 0, "edit_offsets", edit_offsets_[0], "the first must be 0");
  for (int64_t i = 0; i < count_; ++i) {
    Require(edit_offsets_[i + 1] >= edit_offsets_[i] && edit_offsets_[i + 1] <= room, "edit_offsets",
            edit_offsets_[i + 1], [&] { return "they must rise, to " + std::to_string(room) + " at most"; });
  }
  for (int64_t index = 0; index < edit_offsets_[count_]; ++index) {
    const Edit values = edit(index);
    Require(edit_ids_[index] >= 0 && edit_ids_[index] < vocab, "edit_ids", edit_ids_[index],
            [&] { return "it must be below " + std::to_string(vocab); });
    const bool is_legal = values.bias < kInfinity && values.shift < kInfinity;
    Require(is_legal && values.penalty > 0.0f && values.penalty < kInfinity, "edit_values of edit", index,
            "bias and shift must be below infinity, the penalty above 0");
  }
}

EditedRow::EditedRow(const Kernels& kernels, const SamplingArrays& sampling, int64_t i, const ValueRow& logits,
                     double log_sum)
    : values_(static_cast<size_t>(sampling.is_edited(i) ? logits.vocab : 0)),
      largest_(static_cast<size_t>(sampling.is_edited(i) ? ChunksOf(logits.vocab) : 0)),
      row_(logits) {
  if (!sampling.is_edited(i)) return;
  Fill(sampling, i, logits, log_sum);
  Summarize(kernels);
}

void EditedRow::Fill(const SamplingArrays& sampling, int64_t i, const ValueRow& logits, double log_sum) const {
  const double taken = sampling.is_normalized(i) ? log_sum : 0.0;
  if (sampling.is_selected(i)) return FillSelected(sampling, i, logits, taken);
  const auto value = [&](int64_t id) { return static_cast<float>(static_cast<double>(logits.values[id]) - taken); };
  const int64_t begin = sampling.first_edit(i), end = sampling.end_of_edits(i);
  if (sampling.is_exclusive(i)) {
    std::fill(values_.data(), values_.data() + logits.vocab, -kInfinity);
    for (int64_t edit = begin; edit < end; ++edit) {
      const int32_t id = sampling.edited_id(edit);
      values_[static_cast<size_t>(id)] = value(id);
    }
  } else {
    for (int64_t id = 0; id < logits.vocab; ++id) values_[static_cast<size_t>(id)] = value(id);
  }
  for (int64_t edit = begin; edit < end; ++edit) {
    float& edited = values_[static_cast<size_t>(sampling.edited_id(edit))];
    edited = Edited(edited, sampling.edit(edit));
  }
}

// A selected sample's row has the values of its own vocabulary; edit number k is that of value k.
void EditedRow::FillSelected(const SamplingArrays& sampling, int64_t i, const ValueRow& logits, double taken) const {
  const int64_t begin = sampling.first_edit(i), end = sampling.end_of_edits(i);
  for (int64_t index = 0; index < logits.vocab; ++index) {
    values_[static_cast<size_t>(index)] = static_cast<float>(static_cast<double>(logits.values[index]) - taken);
  }
  for (int64_t edit = begin; edit < end; ++edit) {
    const int64_t own = edit - begin;
    const int64_t index = own < logits.vocab ? own : sampling.index_of(i, sampling.edited_id(edit));
    float& edited = values_[static_cast<size_t>(index)];
    edited = Edited(edited, sampling.edit(edit));
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
