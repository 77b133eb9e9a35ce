// Sample and QuantizedSample, the end of a step: they sample the next token after each picked token.
#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "logits.h"
#include "operators.h"
#include "product.h"
#include "sampling.h"
#include "sampling_arrays.h"
#include "shortlist.h"
#include "workspace.h"

namespace antiphon {

namespace {

// Hidden states of the picked tokens, [samples, width]: the tensor itself where all tokens are picked in order.
class PickedHidden {
 public:
  PickedHidden(const Tensor& hidden, const SamplingArrays& sampling)
      : gathered_(AreAllPickedInOrder(hidden, sampling) ? 0 : static_cast<size_t>(sampling.count() * hidden.dims[1])),
        data_(hidden.as<float>()) {
    const int64_t width = hidden.dims[1];
    if (AreAllPickedInOrder(hidden, sampling) || width == 0) return;
    for (int64_t i = 0; i < sampling.count(); ++i) {
      std::memcpy(gathered_.data() + i * width, data_ + sampling.picks()[i] * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
    data_ = gathered_.data();
  }
  const float* data() const { return data_; }

 private:
  static bool AreAllPickedInOrder(const Tensor& hidden, const SamplingArrays& sampling) {
    if (hidden.dims[0] != sampling.count()) return false;
    for (int64_t i = 0; i < sampling.count(); ++i) {
      if (sampling.picks()[i] != i) return false;
    }
    return true;
  }

  Scratch<float> gathered_;
  const float* data_;
};

// The five outputs of a call.
class Samples {
 public:
  Samples(const Call& call, const SamplingArrays& sampling) : width_(sampling.most_logprobs()) {
    const int64_t count = sampling.count();
    token_ids_ = static_cast<int64_t*>(call.Output(0, {count}));
    logprobs_ = static_cast<float*>(call.Output(1, {count}));
    top_ids_ = static_cast<int64_t*>(call.Output(2, {count, width_}));
    top_logprobs_ = static_cast<float*>(call.Output(3, {count, width_}));
    top_scores_ = static_cast<float*>(call.Output(4, {count, width_}));
  }

  // Computes sample i.
  void Make(const Kernels& kernels, const SamplingArrays& sampling, const Logits& logits, int64_t i) const {
    WriteNeutral(i);
    const Logits::Best best = logits.BestOf(kernels, i);
    token_ids_[i] = TokenAt(sampling, i, best.id);
    if (best.id < 0) return;
    if (!sampling.needs_row(i)) {
      if (sampling.forced_id(i) >= 0) token_ids_[i] = sampling.forced_id(i);
      WriteLogprob(sampling, i, sampling.forced_id(i) >= 0 ? logits.ForcedLogitOf(i) : best.logit, best.log_sum);
      return;
    }
    const ValueRow own = logits.Row(i, best);
    if (sampling.is_plain_beam(i)) return MakeBeam(kernels, sampling, i, own, best.log_sum);
    const EditedRow edited(kernels, sampling, i, own, best.log_sum);
    const int64_t index = TokenOf(kernels, sampling, i, edited.row());
    token_ids_[i] = TokenAt(sampling, i, index);
    if (index >= 0) WriteLogprob(sampling, i, own.values[index], best.log_sum);
    List(kernels, sampling, i, edited.row(), own, best.log_sum);
  }

 private:
  // The token at an index of a sample's row; a negative index has no token.
  static int64_t TokenAt(const SamplingArrays& sampling, int64_t i, int64_t index) {
    return sampling.is_selected(i) && index >= 0 ? sampling.selected_ids(i)[index] : index;
  }

  // Values of outputs that were not requested or not found.
  void WriteNeutral(int64_t i) const {
    if (logprobs_ != nullptr) logprobs_[i] = 0.0f;
    for (int64_t place = i * width_; place < (i + 1) * width_; ++place) {
      if (top_ids_ != nullptr) top_ids_[place] = -1;
      if (top_logprobs_ != nullptr) top_logprobs_[place] = 0.0f;
      if (top_scores_ != nullptr) top_scores_[place] = -kInfinity;
    }
  }

  void WriteLogprob(const SamplingArrays& sampling, int64_t i, float logit, double log_sum) const {
    if (logprobs_ != nullptr && sampling.num_logprobs(i) >= 0) logprobs_[i] = static_cast<float>(logit - log_sum);
  }

  // Computes a beam without edits: only its candidates are normalised.
  void MakeBeam(const Kernels& kernels, const SamplingArrays& sampling, int64_t i, const ValueRow& own,
                double log_sum) const {
    const Shortlist list(kernels, own, std::min(sampling.num_logprobs(i), own.vocab), log_sum);
    std::sort(list.begin(), list.end(), IsLikelier);
    token_ids_[i] = TokenAt(sampling, i, list.begin()->id);
    WriteLogprob(sampling, i, own.values[list.begin()->id], log_sum);
    Write(sampling, list, i, own, log_sum, 0.0);
  }

  static int64_t TokenOf(const Kernels& kernels, const SamplingArrays& sampling, int64_t i, const ValueRow& row) {
    const int64_t forced = sampling.forced_id(i);
    if (forced >= 0) return sampling.is_selected(i) ? sampling.index_of(i, forced) : forced;
    if (row.largest == -kInfinity) return kNoneAllowed;
    if (!sampling.is_sampled(i)) return row.likeliest;
    return SampleRow(kernels, row, sampling.sampling(i), sampling.uniform(i));
  }

  // Lists the candidates of sample i: the largest values of `row`. own: the model's logits, for log-probabilities.
  void List(const Kernels& kernels, const SamplingArrays& sampling, int64_t i, const ValueRow& row, const ValueRow& own,
            double log_sum) const {
    if (sampling.num_logprobs(i) <= 0) return;
    const Shortlist list(kernels, row, std::min(sampling.num_logprobs(i), row.vocab));
    std::sort(list.begin(), list.end(), IsLikelier);
    Write(sampling, list, i, own, log_sum, sampling.is_normalized(i) ? 0.0 : log_sum);
  }

  // Writes the candidates of sample i; a score is the value without `taken`.
  void Write(const SamplingArrays& sampling, const Shortlist& list, int64_t i, const ValueRow& own, double log_sum, double taken) const {
    int64_t place = i * width_;
    for (const Candidate* candidate = list.begin(); candidate < list.end(); ++candidate, ++place) {
      if (candidate->value == -kInfinity) return;
      if (top_ids_ != nullptr) top_ids_[place] = TokenAt(sampling, i, candidate->id);
      if (top_logprobs_ != nullptr) top_logprobs_[place] = static_cast<float>(own.values[candidate->id] - log_sum);
      if (top_scores_ != nullptr) top_scores_[place] = static_cast<float>(candidate->value - taken);
    }
  }

  int64_t width_;
  int64_t* token_ids_;
  float* logprobs_;
  int64_t* top_ids_;
  float* top_logprobs_;
  float* top_scores_;
};

// Samples from the logits that compute(logits) takes.
template <typename Compute>
void SampleAll(const Call& call, const SamplingArrays& sampling, int64_t vocab, const Compute& compute) {
  const Kernels& kernels = ActiveKernels();
  const Samples samples(call, sampling);
  if (sampling.count() == 0) return;
  const Logits logits(sampling, vocab);
  compute(logits);
  const auto make = [&](size_t i) { samples.Make(kernels, sampling, logits, static_cast<int64_t>(i)); };
  bool is_heavy = false;
  for (int64_t i = 0; i < sampling.count(); ++i) {
    is_heavy = is_heavy || (sampling.needs_row(i) && !sampling.is_selected(i));
  }
  if (is_heavy) {
    call.Parallel(static_cast<size_t>(sampling.count()), make);
  } else {
    for (int64_t i = 0; i < sampling.count(); ++i) make(static_cast<size_t>(i));
  }
}

// Computes every chunk of the logits of all samples by product(first panel, last panel, out, stride).
template <typename Product>
void ComputeChunks(const Call& call, const SamplingArrays& sampling, int64_t vocab, float cap, const Logits& logits,
                   const Product& product) {
  const Kernels& kernels = ActiveKernels();
  const int64_t panels = RoundUp(vocab, kPanel) / kPanel;
  call.Parallel(static_cast<size_t>(logits.chunks()), [&](size_t task) {
    const Scratch<float> columns(static_cast<size_t>(sampling.count() * kChunk));
    const auto chunk = static_cast<int64_t>(task);
    const int64_t begin = chunk * kChunkPanels, end = std::min(begin + kChunkPanels, panels);
    product(begin, end, columns.data(), kChunk);
    if (cap != 0.0f) kernels.cap(columns.data(), sampling.count() * kChunk, cap);
    logits.TakeSelected({nullptr, sampling.count()}, begin, end, columns.data(), kChunk);
    logits.Take(kernels, chunk, columns.data());
  });
}

// The packed weight of the product to logits, by precision, and the logits of samples. A sample with a vocabulary of its
// own needs few columns of the weight.
class Float32Logits {
 public:
  static constexpr const char* kName = "Sample";
  static constexpr std::array<Port, 1> kPorts = {{{kFloat32}}};
  struct Columns {
    explicit Columns(const Attributes&) {}
  };

  Float32Logits(const Call& call, const Tensor& bias, int64_t inputs, int64_t vocab, const Columns&)
      : weight_(CheckedWeight(call.Input(1, "weight", 3), bias, inputs, vocab)) {}

  void Sample(const Call& call, const SamplingArrays& sampling, const float* hidden, float cap) const {
    SampleAll(call, sampling, weight_.outputs, [&](const Logits& logits) {
      const SelectedPanels selected(sampling, RoundUp(weight_.outputs, kPanel) / kPanel);
      if (!selected.is_empty()) return ComputeSelected(call, sampling, selected, hidden, cap, logits);
      const auto product = [&](int64_t begin, int64_t end, float* out, int64_t stride) {
        Multiply(hidden, sampling.count(), begin, end, out, stride);
      };
      ComputeChunks(call, sampling, weight_.outputs, cap, logits, product);
    });
  }

 private:
  void Multiply(const float* rows, int64_t count, int64_t begin, int64_t end, float* out, int64_t stride) const {
    ActiveKernels().float_product(rows, count, weight_, Activation::kNone, begin, end, out, stride);
  }

  // Multiplies each panel by the rows that need it, which are copied together.
  void ComputeSelected(const Call& call, const SamplingArrays& sampling, const SelectedPanels& selected,
                       const float* hidden, float cap, const Logits& logits) const {
    const auto width = static_cast<size_t>(weight_.inputs), count = static_cast<size_t>(sampling.count());
    call.Parallel(selected.tasks(), [&](size_t task) {
      const Scratch<float> columns(count * kPanel), rows(count * width);
      selected.Run(task, [&](int64_t panel, const Subset& samples) {
        for (int64_t row = 0; row < samples.count; ++row) {
          std::memcpy(rows.data() + static_cast<size_t>(row) * width, hidden + samples[row] * weight_.inputs,
                      width * sizeof(float));
        }
        Multiply(rows.data(), samples.count, panel, panel + 1, columns.data(), kPanel);
        if (cap != 0.0f) ActiveKernels().cap(columns.data(), samples.count * kPanel, cap);
        logits.TakeSelected(samples, panel, panel + 1, columns.data(), kPanel);
      });
    });
  }

  FloatWeight weight_;
};

// A constant int8 weight column by column, since a column of a panel is spread over the whole panel. The first sample
// that has a vocabulary of its own makes it: outputs times padded inputs bytes.
class ColumnCopy {
 public:
  explicit ColumnCopy(const Attributes& attributes) : is_constant_(attributes.ConstantInputs()[1]) {}

  // Returns null for a weight that may change.
  const int8_t* Of(const QuantizedWeight& weight) const {
    if (!is_constant_) return nullptr;
    std::call_once(once_, [&] { Fill(weight); });
    return columns_.front().bytes;
  }

 private:
  struct alignas(kDepth) Line {
    int8_t bytes[kDepth];
  };

  void Fill(const QuantizedWeight& weight) const {
    const int64_t padded = weight.padded_inputs, outputs = RoundUp(weight.outputs, kPanel);
    columns_.resize(static_cast<size_t>(outputs * padded / kDepth));
    int8_t* to = columns_.front().bytes;
    for (int64_t column = 0; column < outputs; ++column) {
      const int8_t* from = weight.data + column / kPanel * padded * kPanel + column % kPanel * 4;
      for (int64_t k = 0; k < padded; k += 4) std::memcpy(to + column * padded + k, from + k * kPanel, 4);
    }
  }

  bool is_constant_;
  mutable std::once_flag once_;
  mutable std::vector<Line> columns_;
};

class Int8Logits {
 public:
  static constexpr const char* kName = "QuantizedSample";
  static constexpr std::array<Port, 3> kPorts = {{{kInt8}, {kFloat32}, {kInt32}}};
  using Columns = ColumnCopy;

  Int8Logits(const Call& call, const Tensor& bias, int64_t inputs, int64_t vocab, const Columns& columns)
      : weight_(CheckedWeight(call.Input(1, "weight", 4), call.Input(2, "scales", 1), call.Input(3, "column_sums", 1),
                              bias, inputs, vocab)),
        inputs_(inputs),
        columns_(columns) {}

  void Sample(const Call& call, const SamplingArrays& sampling, const float* hidden, float cap) const {
    const Kernels& kernels = ActiveKernels();
    SampleAll(call, sampling, weight_.outputs, [&](const Logits& logits) {
      const QuantizedBuffer buffer(sampling.count(), weight_.padded_inputs, weight_.outliers);
      const int8_t* columns = sampling.are_all_selected() ? columns_.Of(weight_) : nullptr;
      if (columns != nullptr) {
        kernels.quantize_by_row(hidden, inputs_, weight_.padded_inputs, buffer.rows(), 0, sampling.count());
        return ComputeSelected(call, sampling, buffer.rows(), columns, cap, logits);
      }
      QuantizeAll(call, hidden, inputs_, weight_.padded_inputs, buffer.rows());
      const auto product = [&](int64_t begin, int64_t end, float* out, int64_t stride) {
        kernels.quantized_product(buffer.rows(), weight_, Activation::kNone, begin, end, out, stride);
      };
      ComputeChunks(call, sampling, weight_.outputs, cap, logits, product);
    });
  }

 private:
  void ComputeSelected(const Call& call, const SamplingArrays& sampling, const QuantizedRows& rows,
                       const int8_t* columns, float cap, const Logits& logits) const {
    const Kernels& kernels = ActiveKernels();
    call.Parallel(static_cast<size_t>(sampling.count()), [&](size_t task) {
      const auto i = static_cast<int64_t>(task), count = sampling.num_selected(i);
      float* own = logits.selected(i);
      kernels.chosen_columns(rows, i, weight_, columns, sampling.selected_ids(i), count, own);
      if (cap != 0.0f) kernels.cap(own, count, cap);
    });
  }

  QuantizedWeight weight_;
  int64_t inputs_;
  const Columns& columns_;
};

template <typename Product>
class Sample {
 public:
  static constexpr const char* kName = Product::kName;
  // hidden, the weight; positions, then those of SamplingArrays; bias
  static constexpr auto kInputs = JoinPorts(
      std::array<Port, 1>{{{kFloat32}}}, Product::kPorts,
      std::array<Port, 8>{
          {{kInt32}, {kInt32}, {kFloat32}, {kInt64}, {kInt32}, {kInt32}, {kFloat32}, {kFloat32, kOptional}}});
  static constexpr Port kOutputs[] = {{kInt64}, {kFloat32}, {kInt64}, {kFloat32}, {kFloat32}};

  explicit Sample(const Attributes& attributes)
      : vocab_(attributes.Size("vocab")), cap_(attributes.Float("cap", 0.0f)), columns_(attributes) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2);
    const Product product(call, call.OptionalInput(kInputs.size() - 1, "bias", 1), hidden.dims[1], vocab_, columns_);
    const SamplingArrays sampling(call, 1 + Product::kPorts.size(), hidden.dims[0], vocab_);
    const PickedHidden picked(hidden, sampling);
    product.Sample(call, sampling, picked.data(), cap_);
  }

 private:
  int64_t vocab_;
  float cap_;
  typename Product::Columns columns_;
};

}  // namespace

std::vector<const OrtCustomOp*> SampleOperators() {
  static const Registration<Sample<Float32Logits>> sample;
  static const Registration<Sample<Int8Logits>> quantized;
  return {&sample, &quantized};
}

}  // namespace antiphon
