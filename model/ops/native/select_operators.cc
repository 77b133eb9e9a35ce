// Select and QuantizedSelect, the end of a step: from the hidden state of each row's last token to its next token.
//
// The logits of a chunk of columns live only until they are summarised; whole rows are kept only for rows that sample
// or whose likeliest tokens are asked for. The chunks are fixed, so sums over the vocabulary have one order.
#include <cmath>
#include <cstring>
#include <string>

#include "operators.h"
#include "product.h"
#include "sampling.h"
#include "workspace.h"

namespace antiphon {

namespace {

constexpr int64_t kChunkPanels = 16;
constexpr int64_t kChunk = kChunkPanels * kPanel;

// The per-row inputs of both operators, from index `first` on, checked against each other.
struct Rows {
  const int32_t* offsets;
  const int32_t* positions;
  const float* temperatures;
  const int32_t* top_ks;
  const float* top_ps;
  const int64_t* seeds;
  int64_t count;
  int64_t num_logprobs;  // -1: none

  Rows(const Call& call, size_t first, int64_t tokens, int64_t vocab) {
    const Tensor ends = call.Input(first, "offsets", 1), places = call.Input(first + 1, "positions", 1);
    count = ends.dims[0] - 1;
    offsets = ends.as<int32_t>();
    positions = places.as<int32_t>();
    Require(count >= 0, "length of offsets", ends.dims[0], "it must be at least 1");
    Require(places.dims[0] == tokens, "length of positions", places.dims[0], "it must be the rows of hidden");
    temperatures = OfRows<float>(call, first + 2, "temperatures");
    top_ks = OfRows<int32_t>(call, first + 3, "top_ks");
    top_ps = OfRows<float>(call, first + 4, "top_ps");
    seeds = OfRows<int64_t>(call, first + 5, "seeds");
    const Tensor asked = call.Input(first + 6, "num_logprobs", 1);
    Require(asked.dims[0] == 1, "length of num_logprobs", asked.dims[0], "it must be 1");
    num_logprobs = asked.as<int32_t>()[0];
    Require(num_logprobs >= -1 && num_logprobs <= vocab, "num_logprobs", num_logprobs,
            "it must be -1 to " + std::to_string(vocab));
    for (int64_t row = 0; row < count; ++row) CheckRow(row, tokens);
  }

  int64_t LastToken(int64_t row) const { return offsets[row + 1] - 1; }
  bool IsSampled(int64_t row) const { return temperatures[row] > 0.0f; }
  bool NeedsLogits(int64_t row) const { return num_logprobs > 0 || IsSampled(row); }

 private:
  template <typename T>
  const T* OfRows(const Call& call, size_t index, const char* name) const {
    const Tensor tensor = call.Input(index, name, 1);
    Require(tensor.dims[0] == count, name, tensor.dims[0], "its length must be the number of rows");
    return tensor.as<T>();
  }

  void CheckRow(int64_t row, int64_t tokens) const {
    Require(offsets[row + 1] > offsets[row] && offsets[row] >= 0 && offsets[row + 1] <= tokens, "offsets",
            offsets[row + 1], "they must rise, to " + std::to_string(tokens) + " at most");
    Require(temperatures[row] >= 0.0f, "temperatures of row", row, "it must be 0 or more");
    Require(top_ps[row] >= 0.0f, "top_ps of row", row, "it must be 0 to 1");
    Require(top_ks[row] >= 0, "top_ks", top_ks[row], "it must be 0 or more");
  }
};

// Hidden states of the last tokens, [rows, width]: the tensor itself where every row has one token.
class LastHidden {
 public:
  LastHidden(const Tensor& hidden, const Rows& rows)
      : gathered_(hidden.dims[0] == rows.count ? 0 : static_cast<size_t>(rows.count * hidden.dims[1])),
        data_(hidden.as<float>()) {
    if (hidden.dims[0] == rows.count || hidden.size() == 0) return;
    const int64_t width = hidden.dims[1];
    for (int64_t row = 0; row < rows.count; ++row) {
      std::memcpy(gathered_.data() + row * width, data_ + rows.LastToken(row) * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
    data_ = gathered_.data();
  }
  const float* data() const { return data_; }

 private:
  Scratch<float> gathered_;
  const float* data_;
};

// What is kept of the logits: a summary of every row and chunk, and whole rows where needed.
class Logits {
 public:
  Logits(const Rows& rows, int64_t vocab)
      : rows_(rows),
        vocab_(vocab),
        chunks_((vocab + kChunk - 1) / kChunk),
        summaries_(static_cast<size_t>(rows.count * chunks_)),
        largest_(static_cast<size_t>(rows.count * chunks_)),
        slots_(static_cast<size_t>(rows.count)),
        kept_(static_cast<size_t>(AssignSlots() * vocab)) {}

  int64_t chunks() const { return chunks_; }

  // Takes one chunk's logits, [rows, kChunk]. Called once for each chunk, from any thread.
  void Take(const Kernels& kernels, int64_t chunk, const float* logits) const {
    const int64_t columns = std::min(kChunk, vocab_ - chunk * kChunk);
    for (int64_t row = 0; row < rows_.count; ++row, logits += kChunk) {
      const LogitSummary summary = kernels.summarize(logits, columns, rows_.num_logprobs >= 0);
      summaries_[static_cast<size_t>(row * chunks_ + chunk)] = summary;
      largest_[static_cast<size_t>(row * chunks_ + chunk)] = summary.largest;
      if (slots_[static_cast<size_t>(row)] < 0) continue;
      std::memcpy(kept_.data() + slots_[static_cast<size_t>(row)] * vocab_ + chunk * kChunk, logits,
                  static_cast<size_t>(columns) * sizeof(float));
    }
  }

  struct Best {
    int64_t id;  // -1: the logits are not finite
    float logit;
    double log_sum;  // log of the sum of exp over the vocabulary
  };

  Best BestOf(int64_t row) const {
    const LogitSummary* chunk = summaries_.data() + row * chunks_;
    Best best{0, -std::numeric_limits<float>::infinity(), 0.0};
    bool is_valid = true;
    for (int64_t index = 0; index < chunks_; ++index) {
      is_valid = is_valid && chunk[index].invalid == 0;
      if (chunk[index].largest > best.logit) best = {index * kChunk + chunk[index].index, chunk[index].largest, 0.0};
    }
    if (!is_valid || !std::isfinite(best.logit)) return {-1, best.logit, 0.0};
    if (rows_.num_logprobs >= 0) {
      double sum = 0;
      for (int64_t index = 0; index < chunks_; ++index) {
        sum += static_cast<double>(chunk[index].sum) * std::exp(static_cast<double>(chunk[index].largest) - best.logit);
      }
      best.log_sum = best.logit + std::log(sum);
    }
    return best;
  }

  LogitRow Row(int64_t row, float largest) const {
    return {kept_.data() + slots_[static_cast<size_t>(row)] * vocab_, vocab_, largest_.data() + row * chunks_, chunks_,
            largest};
  }

 private:
  int64_t AssignSlots() const {
    int64_t used = 0;
    for (int64_t row = 0; row < rows_.count; ++row) {
      slots_[static_cast<size_t>(row)] = rows_.NeedsLogits(row) ? used++ : -1;
    }
    return used;
  }

  const Rows& rows_;
  int64_t vocab_;
  int64_t chunks_;
  Scratch<LogitSummary> summaries_;
  Scratch<float> largest_;
  Scratch<int64_t> slots_;
  Scratch<float> kept_;
};

// The four outputs of a call.
struct Choice {
  int64_t* token_ids;
  float* logprobs;
  int64_t* top_ids;
  float* top_logprobs;
  int64_t top;

  Choice(const Call& call, const Rows& rows) : top(std::max<int64_t>(rows.num_logprobs, 0)) {
    token_ids = static_cast<int64_t*>(call.Output(0, {rows.count}));
    logprobs = static_cast<float*>(call.Output(1, {rows.count}));
    top_ids = static_cast<int64_t*>(call.Output(2, {rows.count, top}));
    top_logprobs = static_cast<float*>(call.Output(3, {rows.count, top}));
  }

  void Make(const Kernels& kernels, const Rows& rows, const Logits& logits, int64_t row) const {
    const Logits::Best best = logits.BestOf(row);
    token_ids[row] = best.id;
    float chosen = best.logit;
    if (best.id >= 0 && rows.IsSampled(row)) {
      const LogitRow whole = logits.Row(row, best.logit);
      const double uniform =
          UniformAt(static_cast<uint64_t>(rows.seeds[row]), static_cast<uint64_t>(rows.positions[rows.LastToken(row)]));
      token_ids[row] = SampleRow(kernels, whole, {rows.temperatures[row], rows.top_ks[row], rows.top_ps[row]}, uniform);
      chosen = whole.logits[token_ids[row]];
    }
    if (logprobs != nullptr) {
      const bool is_asked = rows.num_logprobs >= 0 && best.id >= 0;
      logprobs[row] = is_asked ? static_cast<float>(chosen - best.log_sum) : 0.0f;
    }
    List(kernels, logits, best, row);
  }

 private:
  void List(const Kernels& kernels, const Logits& logits, const Logits::Best& best, int64_t row) const {
    if (top == 0 || top_ids == nullptr || top_logprobs == nullptr) return;
    const Scratch<Candidate> likeliest(static_cast<size_t>(top));
    if (best.id >= 0) LikeliestTokens(kernels, logits.Row(row, best.logit), top, likeliest.data());
    for (int64_t rank = 0; rank < top; ++rank) {
      const Candidate candidate = best.id >= 0 ? likeliest[static_cast<size_t>(rank)] : Candidate{0.0f, -1};
      top_ids[row * top + rank] = candidate.id;
      top_logprobs[row * top + rank] = static_cast<float>(candidate.logit - best.log_sum);
    }
  }
};

// Runs product(chunk, first panel, last panel, out) for every chunk and chooses from what it wrote.
template <typename Product>
void Choose(const Call& call, const Rows& rows, int64_t vocab, const Product& product) {
  const Kernels& kernels = ActiveKernels();
  const Choice choice(call, rows);
  if (rows.count == 0) return;
  const Logits logits(rows, vocab);
  const int64_t panels = RoundUp(vocab, kPanel) / kPanel;
  call.Parallel(static_cast<size_t>(logits.chunks()), [&](size_t task) {
    const auto chunk = static_cast<int64_t>(task);
    const Scratch<float> columns(static_cast<size_t>(rows.count * kChunk));
    product(chunk * kChunkPanels, std::min((chunk + 1) * kChunkPanels, panels), columns.data());
    logits.Take(kernels, chunk, columns.data());
  });
  bool is_heavy = rows.num_logprobs >= 0;
  for (int64_t row = 0; row < rows.count; ++row) is_heavy = is_heavy || rows.IsSampled(row);
  if (is_heavy) {
    call.Parallel(static_cast<size_t>(rows.count),
                  [&](size_t row) { choice.Make(kernels, rows, logits, static_cast<int64_t>(row)); });
  } else {
    for (int64_t row = 0; row < rows.count; ++row) choice.Make(kernels, rows, logits, row);
  }
}

class Select {
 public:
  static constexpr const char* kName = "Select";
  static constexpr Port kInputs[] = {{kFloat32}, {kFloat32}, {kInt32}, {kInt32}, {kFloat32},
                                     {kInt32},   {kFloat32}, {kInt64}, {kInt32}};
  static constexpr Port kOutputs[] = {{kInt64}, {kFloat32}, {kInt64}, {kFloat32}};

  explicit Select(const Attributes& attributes) : vocab_(attributes.Size("vocab")) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2);
    const FloatWeight weight = CheckedWeight(call.Input(1, "weight", 3), {}, hidden.dims[1], vocab_);
    const Rows rows(call, 2, hidden.dims[0], vocab_);
    const LastHidden last(hidden, rows);
    Choose(call, rows, vocab_, [&](int64_t begin, int64_t end, float* out) {
      ActiveKernels().float_product(last.data(), rows.count, weight, Activation::kNone, begin, end, out, kChunk);
    });
  }

 private:
  int64_t vocab_;
};

class QuantizedSelect {
 public:
  static constexpr const char* kName = "QuantizedSelect";
  static constexpr Port kInputs[] = {{kFloat32}, {kInt8},  {kFloat32}, {kInt32},   {kInt32}, {kInt32},
                                     {kFloat32}, {kInt32}, {kFloat32}, {kInt64}, {kInt32}};
  static constexpr Port kOutputs[] = {{kInt64}, {kFloat32}, {kInt64}, {kFloat32}};

  explicit QuantizedSelect(const Attributes& attributes) : vocab_(attributes.Size("vocab")) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2);
    const QuantizedWeight weight = CheckedWeight(call.Input(1, "weight", 4), call.Input(2, "scales", 1),
                                                 call.Input(3, "column_sums", 1), {}, hidden.dims[1], vocab_);
    const Rows rows(call, 4, hidden.dims[0], vocab_);
    const LastHidden last(hidden, rows);
    const QuantizedBuffer buffer(rows.count, weight.padded_inputs);
    QuantizeAll(call, last.data(), hidden.dims[1], weight.padded_inputs, buffer.rows());
    Choose(call, rows, vocab_, [&](int64_t begin, int64_t end, float* out) {
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
