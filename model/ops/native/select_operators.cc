// Select and QuantizedSelect, the end of a step: they sample the next token after each picked token.
//
// The logits of a chunk of columns are kept only until they are summarised. Whole rows are kept only for choices that
// need more than the largest logit and the forced token's. Chunks are fixed, so sums over the vocabulary have one order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "choices.h"
#include "operators.h"
#include "product.h"
#include "sampling.h"
#include "shortlist.h"
#include "workspace.h"

namespace antiphon {

namespace {

constexpr int64_t kNotFinite = -1;
constexpr int64_t kNoneAllowed = -2;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Hidden states of the picked tokens, [choices, width]: the tensor itself where all tokens are picked in order.
class PickedHidden {
 public:
  PickedHidden(const Tensor& hidden, const Choices& choices)
      : gathered_(IsAsItLies(hidden, choices) ? 0 : static_cast<size_t>(choices.count() * hidden.dims[1])),
        data_(hidden.as<float>()) {
    const int64_t width = hidden.dims[1];
    if (IsAsItLies(hidden, choices) || width == 0) return;
    for (int64_t i = 0; i < choices.count(); ++i) {
      std::memcpy(gathered_.data() + i * width, data_ + choices.picks()[i] * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
    data_ = gathered_.data();
  }
  const float* data() const { return data_; }

 private:
  static bool IsAsItLies(const Tensor& hidden, const Choices& choices) {
    if (hidden.dims[0] != choices.count()) return false;
    for (int64_t i = 0; i < choices.count(); ++i) {
      if (choices.picks()[i] != i) return false;
    }
    return true;
  }

  Scratch<float> gathered_;
  const float* data_;
};

// Kept parts of the logits: a summary of every choice and chunk, forced tokens' logits, and whole rows where needed.
class Logits {
 public:
  Logits(const Choices& choices, int64_t vocab)
      : choices_(choices),
        vocab_(vocab),
        chunks_(ChunksOf(vocab)),
        summaries_(static_cast<size_t>(choices.count() * chunks_)),
        largest_(static_cast<size_t>(choices.count() * chunks_)),
        given_(static_cast<size_t>(choices.count())),
        slots_(static_cast<size_t>(choices.count())),
        kept_(static_cast<size_t>(AssignSlots() * vocab)) {}

  int64_t chunks() const { return chunks_; }

  // Takes one chunk's logits, [choices, kChunk]. Called once for each chunk, from any thread.
  void Take(const Kernels& kernels, int64_t chunk, const float* logits) const {
    const int64_t first = chunk * kChunk, columns = std::min(kChunk, vocab_ - first);
    for (int64_t i = 0; i < choices_.count(); ++i, logits += kChunk) {
      const LogitSummary summary = kernels.summarize(logits, columns, choices_.needs_log_sum(i));
      summaries_[static_cast<size_t>(i * chunks_ + chunk)] = summary;
      largest_[static_cast<size_t>(i * chunks_ + chunk)] = summary.largest;
      const int64_t place = choices_.given(i) - first;
      if (place >= 0 && place < columns) given_[static_cast<size_t>(i)] = logits[place];
      if (slots_[static_cast<size_t>(i)] < 0) continue;
      std::memcpy(kept_.data() + slots_[static_cast<size_t>(i)] * vocab_ + first, logits,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }

  struct Best {
    int64_t id;  // kNotFinite where the logits are not finite
    float logit;
    double log_sum;  // log of the sum of exp over the vocabulary; 0 where the choice does not need it
  };

  Best BestOf(int64_t i) const {
    const LogitSummary* chunk = summaries_.data() + i * chunks_;
    Best best{0, -kInfinity, 0.0};
    bool is_valid = true;
    for (int64_t index = 0; index < chunks_; ++index) {
      is_valid = is_valid && chunk[index].invalid == 0;
      if (chunk[index].largest > best.logit) best = {index * kChunk + chunk[index].index, chunk[index].largest, 0.0};
    }
    if (!is_valid || !std::isfinite(best.logit)) return {kNotFinite, best.logit, 0.0};
    if (choices_.needs_log_sum(i)) {
      double sum = 0;
      for (int64_t index = 0; index < chunks_; ++index) {
        if (chunk[index].largest == -kInfinity) continue;  // nothing to add, and its own sum is not a number
        sum += static_cast<double>(chunk[index].sum) * std::exp(static_cast<double>(chunk[index].largest) - best.logit);
      }
      best.log_sum = best.logit + std::log(sum);
    }
    return best;
  }

  float GivenOf(int64_t i) const { return given_[static_cast<size_t>(i)]; }

  // The whole row of a choice that needs it.
  ValueRow Row(int64_t i, const Best& best) const {
    return {kept_.data() + slots_[static_cast<size_t>(i)] * vocab_, vocab_, largest_.data() + i * chunks_, best.logit,
            best.id};
  }

 private:
  int64_t AssignSlots() const {
    int64_t used = 0;
    for (int64_t i = 0; i < choices_.count(); ++i) {
      slots_[static_cast<size_t>(i)] = choices_.needs_row(i) ? used++ : -1;
    }
    return used;
  }

  const Choices& choices_;
  int64_t vocab_;
  int64_t chunks_;
  Scratch<LogitSummary> summaries_;
  Scratch<float> largest_;
  Scratch<float> given_;
  Scratch<int64_t> slots_;
  Scratch<float> kept_;
};

// The five outputs of a call.
class Draw {
 public:
  Draw(const Call& call, const Choices& choices) : width_(choices.most_logprobs()) {
    const int64_t count = choices.count();
    token_ids_ = static_cast<int64_t*>(call.Output(0, {count}));
    logprobs_ = static_cast<float*>(call.Output(1, {count}));
    top_ids_ = static_cast<int64_t*>(call.Output(2, {count, width_}));
    top_logprobs_ = static_cast<float*>(call.Output(3, {count, width_}));
    top_scores_ = static_cast<float*>(call.Output(4, {count, width_}));
  }

  // Makes choice i.
  void Make(const Kernels& kernels, const Choices& choices, const Logits& logits, int64_t i) const {
    Leave(i);
    const Logits::Best best = logits.BestOf(i);
    token_ids_[i] = best.id;
    if (best.id < 0) return;
    if (!choices.needs_row(i)) {
      if (choices.given(i) >= 0) token_ids_[i] = choices.given(i);
      Judge(choices, i, choices.given(i) >= 0 ? logits.GivenOf(i) : best.logit, best.log_sum);
      return;
    }
    const ValueRow own = logits.Row(i, best);
    const EditedRow edited(kernels, choices, i, own, best.log_sum);
    token_ids_[i] = TokenOf(kernels, choices, i, edited.row());
    if (token_ids_[i] >= 0) Judge(choices, i, own.values[token_ids_[i]], best.log_sum);
    List(kernels, choices, i, edited.row(), own, best.log_sum);
  }

 private:
  // Values of outputs that were not requested or not found.
  void Leave(int64_t i) const {
    if (logprobs_ != nullptr) logprobs_[i] = 0.0f;
    for (int64_t place = i * width_; place < (i + 1) * width_; ++place) {
      if (top_ids_ != nullptr) top_ids_[place] = -1;
      if (top_logprobs_ != nullptr) top_logprobs_[place] = 0.0f;
      if (top_scores_ != nullptr) top_scores_[place] = -kInfinity;
    }
  }

  void Judge(const Choices& choices, int64_t i, float logit, double log_sum) const {
    if (logprobs_ != nullptr && choices.num_logprobs(i) >= 0) logprobs_[i] = static_cast<float>(logit - log_sum);
  }

  static int64_t TokenOf(const Kernels& kernels, const Choices& choices, int64_t i, const ValueRow& row) {
    if (choices.given(i) >= 0) return choices.given(i);
    if (row.largest == -kInfinity) return kNoneAllowed;
    if (!choices.is_sampled(i)) return row.likeliest;
    return SampleRow(kernels, row, choices.sampling(i), choices.uniform(i));
  }

  // Lists the candidates of choice i: the largest of `row`, with their log-probabilities by the model's logits in `own`.
  void List(const Kernels& kernels, const Choices& choices, int64_t i, const ValueRow& row, const ValueRow& own,
            double log_sum) const {
    if (choices.num_logprobs(i) <= 0) return;
    const Shortlist list(kernels, row, std::min(choices.num_logprobs(i), row.vocab));
    std::sort(list.begin(), list.end(), IsLikelier);
    int64_t place = i * width_;
    for (const Candidate* candidate = list.begin(); candidate < list.end(); ++candidate, ++place) {
      if (candidate->value == -kInfinity) return;
      const double taken = choices.is_normalized(i) ? 0.0 : log_sum;
      if (top_ids_ != nullptr) top_ids_[place] = candidate->id;
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

// Runs product(chunk, first panel, last panel, out) for every chunk and chooses from its results.
template <typename Product>
void Choose(const Call& call, const Choices& choices, int64_t vocab, const Product& product) {
  const Kernels& kernels = ActiveKernels();
  const Draw draw(call, choices);
  if (choices.count() == 0) return;
  const Logits logits(choices, vocab);
  const int64_t panels = RoundUp(vocab, kPanel) / kPanel;
  call.Parallel(static_cast<size_t>(logits.chunks()), [&](size_t task) {
    const auto chunk = static_cast<int64_t>(task);
    const Scratch<float> columns(static_cast<size_t>(choices.count() * kChunk));
    product(chunk * kChunkPanels, std::min((chunk + 1) * kChunkPanels, panels), columns.data());
    logits.Take(kernels, chunk, columns.data());
  });
  const auto make = [&](size_t i) { draw.Make(kernels, choices, logits, static_cast<int64_t>(i)); };
  bool is_heavy = false;
  for (int64_t i = 0; i < choices.count(); ++i) is_heavy = is_heavy || choices.needs_row(i);
  if (is_heavy) {
    call.Parallel(static_cast<size_t>(choices.count()), make);
  } else {
    for (int64_t i = 0; i < choices.count(); ++i) make(static_cast<size_t>(i));
  }
}

class Select {
 public:
  static constexpr const char* kName = "Select";
  static constexpr Port kInputs[] = {
      {kFloat32}, {kFloat32},  // hidden, weight; then those of Choices; bias
      {kInt32}, {kInt32}, {kFloat32}, {kInt32}, {kFloat32}, {kFloat32}, {kFloat32}, {kInt64},
      {kInt64}, {kInt32}, {kInt32}, {kInt32}, {kInt32}, {kInt32}, {kFloat32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kInt64}, {kFloat32}, {kInt64}, {kFloat32}, {kFloat32}};

  explicit Select(const Attributes& attributes) : vocab_(attributes.Size("vocab")) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2);
    const FloatWeight weight =
        CheckedWeight(call.Input(1, "weight", 3), call.OptionalInput(17, "bias", 1), hidden.dims[1], vocab_);
    const Choices choices(call, 2, hidden.dims[0], vocab_);
    const PickedHidden picked(hidden, choices);
    Choose(call, choices, vocab_, [&](int64_t begin, int64_t end, float* out) {
      ActiveKernels().float_product(picked.data(), choices.count(), weight, Activation::kNone, begin, end, out, kChunk);
    });
  }

 private:
  int64_t vocab_;
};

class QuantizedSelect {
 public:
  static constexpr const char* kName = "QuantizedSelect";
  static constexpr Port kInputs[] = {
      {kFloat32}, {kInt8}, {kFloat32}, {kInt32},  // hidden, weight, scales, column_sums; then those of Choices; bias
      {kInt32}, {kInt32}, {kFloat32}, {kInt32}, {kFloat32}, {kFloat32}, {kFloat32}, {kInt64},
      {kInt64}, {kInt32}, {kInt32}, {kInt32}, {kInt32}, {kInt32}, {kFloat32}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kInt64}, {kFloat32}, {kInt64}, {kFloat32}, {kFloat32}};

  explicit QuantizedSelect(const Attributes& attributes) : vocab_(attributes.Size("vocab")) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2);
    const QuantizedWeight weight =
        CheckedWeight(call.Input(1, "weight", 4), call.Input(2, "scales", 1), call.Input(3, "column_sums", 1),
                      call.OptionalInput(19, "bias", 1), hidden.dims[1], vocab_);
    const Choices choices(call, 4, hidden.dims[0], vocab_);
    const PickedHidden picked(hidden, choices);
    const QuantizedBuffer buffer(choices.count(), weight.padded_inputs);
    QuantizeAll(call, picked.data(), hidden.dims[1], weight.padded_inputs, buffer.rows());
    Choose(call, choices, vocab_, [&](int64_t begin, int64_t end, float* out) {
      ActiveKernels().quantized_product(buffer.rows(), weight, Activation::kNone, begin, end, out, kChunk);
    });
  }

 private:
  int64_t vocab_;
};

}  // namespace

std::vector<const OrtCustomOp*> SelectOperators() {
  static const Registration<Select> select;
  static const Registration<QuantizedSelect> quantized;
  return {&select, &quantized};
}

}  // namespace antiphon
