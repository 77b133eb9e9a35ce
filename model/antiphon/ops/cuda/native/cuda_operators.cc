// Kernels of the nodes for GPUs: grids, sizes of outputs, and what is refused beyond the declared axes. The cache is
// [num_blocks, L, 2, H, 16, D].
#include <algorithm>

#include "cuda_operator.h"
#include "cuda_operators.h"

namespace antiphon {

namespace {

constexpr int64_t kMaxSplits = 8;

int64_t Reach(const Tensor& bias_table) { return bias_table ? bias_table.dims[1] / 2 : 0; }

void RequireLayer(int64_t layer, int64_t num_layers) {
  Require(layer >= 0 && layer < num_layers, "layer", layer, "the cache has no such layer");
}

template <ElementType T>
struct CudaEmbed : CudaOperator<CudaEmbedNode<T>> {
  using CudaOperator<CudaEmbedNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    void* out = this->Output(call, 0, {in.N, in.M});
    this->Launch(call, {in.N, 1, 1}, CudaEmbedNode<T>::Embed(this->settings(), in, out, in.M));
  }
};

template <ElementType T>
struct CudaAddNorm : CudaOperator<CudaAddNormNode<T>> {
  using CudaOperator<CudaAddNormNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    void* normed = this->Output(call, 0, {in.N, in.M});
    void* total = this->Output(call, 1, {in.N, in.M});
    this->Launch(call, {in.N, 1, 1}, CudaAddNormNode<T>::AddNorm(this->settings(), in, normed, total, in.M));
  }
};

template <ElementType T>
class CudaActivate : public CudaOperator<CudaActivateNode<T>> {
 public:
  explicit CudaActivate(const Attributes& attributes)
      : CudaOperator<CudaActivateNode<T>>(attributes), activation_(IndexOf(this->settings().activation)) {}

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    const int64_t factor = this->settings().gated ? 2 : 1, width = in.x.dims[1] / factor;
    RequireSize("x", in.x, 1, factor * width);
    void* out = this->Output(call, 0, {in.N, width});
    this->Launch(call, {in.N, CeilDiv(width, kBlockColumns), 1},
                 CudaActivateNode<T>::Activate(this->settings(), in, out, width, activation_));
  }

 private:
  static int64_t IndexOf(const std::string& name) {
    for (size_t index = 0; index < std::size(kActivations); ++index) {
      if (name == kActivations[index]) return static_cast<int64_t>(index);
    }
    throw OperatorError("activation " + name + " is unknown");
  }

  int64_t activation_;
};

template <ElementType T>
struct CudaRotary : CudaOperator<CudaRotaryNode<T>> {
  using CudaOperator<CudaRotaryNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    CompiledWidth(in.D);
    const int64_t num_heads = this->settings().num_heads;
    void* out = this->Output(call, 0, {in.N, 3 * num_heads * in.D});
    this->Launch(call, {in.N, 3 * num_heads, 1}, CudaRotaryNode<T>::Rotary(this->settings(), in, out, in.D));
  }
};

template <ElementType T>
struct CudaPackedAttention : CudaOperator<CudaPackedAttentionNode<T>> {
  using CudaOperator<CudaPackedAttentionNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    CompiledWidth(in.D);
    const int64_t num_heads = this->settings().num_heads;
    void* out = this->Output(call, 0, {in.N, num_heads * in.D});
    const auto values =
        CudaPackedAttentionNode<T>::PackedAttention(this->settings(), in, out, in.D, Reach(in.bias_table));
    this->Launch(call, {in.W, num_heads, 1}, values, in.D);
  }
};

template <ElementType T>
struct CudaPagedWrite : CudaOperator<CudaPagedWriteNode<T>> {
  using CudaOperator<CudaPagedWriteNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    const auto& settings = this->settings();
    CompiledWidth(in.D);
    RequireLayer(settings.layer, in.L);
    RequireSize("kv", in.kv, 1, (in.Z == 3 ? 3 : 2) * settings.num_heads * in.D);
    void* written = this->Output(call, 0, {1});
    this->Launch(call, {in.N, settings.num_heads, 1},
                 CudaPagedWriteNode<T>::PagedWrite(settings, in, written, in.Z, in.X, in.D, in.L));
  }
};

template <ElementType T>
class CudaPagedAttention : public CudaOperator<CudaPagedAttentionNode<T>> {
 public:
  using CudaOperator<CudaPagedAttentionNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    const auto& settings = this->settings();
    CompiledWidth(in.D);
    RequireLayer(settings.layer, in.L);
    const int64_t heads = settings.num_heads, states = heads * in.D, stride = in.query.dims[1];
    const int64_t splits = Splits(in.N * heads, in.X);
    Require(stride >= states, "axis 1 of query", stride, "it holds less than the queries");
    Require(!in.bias || in.bias.dims[0] >= states, "axis 0 of bias", in.bias.dims[0], "it holds less than the queries");
    void* out = this->Output(call, 0, {in.N, states});
    void* sums = this->Output(call, 1, {splits > 1 ? in.N : 1, heads, splits, in.D + 2});
    const auto values = CudaPagedAttentionNode<T>::PagedAttention(settings, in, out, sums, in.X, stride, in.D, in.L,
                                                                  Reach(in.bias_table), splits);
    this->Launch(call, {in.N, heads, splits}, values, in.D);
    if (splits == 1) return;
    this->Launch(call, {in.N, heads, 1}, CudaPagedAttentionNode<T>::MergeSplits(settings, in, out, sums, in.D, splits),
                 in.D);
  }

 private:
  // Few tokens leave multiprocessors idle: then several programs share the positions of one, two blocks each at least.
  int64_t Splits(int64_t programs, int64_t table_width) const {
    const int64_t wanted = 2 * this->multiprocessors();
    return std::clamp<int64_t>(CeilDiv(wanted, std::max<int64_t>(programs, 1)), 1,
                               std::clamp<int64_t>(table_width / 2, 1, kMaxSplits));
  }
};

// Returns the elements of one layer in a block of the pool, which begin with two states of M float32 numbers.
template <ElementType T, typename Inputs>
int64_t StatePart(const Inputs& in) {
  const int64_t part = 2 * in.H * 16 * in.D, bytes = part * (T == kFloat32 ? 4 : 2);
  Require(bytes >= 8 * in.M, "bytes of a layer in a block of cache", bytes, "two states need more");
  return part;
}

template <ElementType T>
struct CudaSsru : CudaOperator<CudaSsruNode<T>> {
  using CudaOperator<CudaSsruNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    RequireLayer(this->settings().layer, in.L);
    const int64_t part = StatePart<T>(in);
    void* out = this->Output(call, 0, {in.N, in.M});
    this->Launch(call, {in.N, CeilDiv(in.M, kBlockColumns), 1},
                 CudaSsruNode<T>::Ssru(this->settings(), in, out, in.X, in.M, part, in.L));
  }
};

template <ElementType T>
struct CudaPagedAverage : CudaOperator<CudaPagedAverageNode<T>> {
  using CudaOperator<CudaPagedAverageNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    RequireLayer(this->settings().layer, in.L);
    const int64_t part = StatePart<T>(in);
    void* out = this->Output(call, 0, {in.N, in.M});
    this->Launch(call, {in.N, CeilDiv(in.M, kBlockColumns), 1},
                 CudaPagedAverageNode<T>::PagedAverage(this->settings(), in, out, in.X, in.M, part, in.L));
  }
};

template <ElementType T>
struct CudaGatedSum : CudaOperator<CudaGatedSumNode<T>> {
  using CudaOperator<CudaGatedSumNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    void* out = this->Output(call, 0, {in.N, in.M});
    this->Launch(call, {in.N, CeilDiv(in.M, kBlockColumns), 1},
                 CudaGatedSumNode<T>::GatedSum(this->settings(), in, out, in.M));
  }
};

template <ElementType T>
struct CudaPick : CudaOperator<CudaPickNode<T>> {
  using CudaOperator<CudaPickNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    void* out = this->Output(call, 0, {in.K, in.M});
    this->Launch(call, {in.K, 1, 1}, CudaPickNode<T>::Pick(this->settings(), in, out, in.M));
  }
};

template <ElementType T>
struct CudaSample : CudaOperator<CudaSampleNode<T>> {
  using CudaOperator<CudaSampleNode<T>>::CudaOperator;

  void Run(const Call& call) const {
    const auto in = this->Read(call);
    const auto& settings = this->settings();
    const int64_t num_parts = CeilDiv(in.V, kVocabularyPart);
    Require(num_parts <= kMaxParts, "axis 1 of logits", in.V, "it must be at most 524288");
    void* token_ids = this->Output(call, 0, {in.K});
    void* logprobs = this->Output(call, 1, {in.K});
    void* top_ids = this->Output(call, 2, {in.K, in.k});
    void* top_logprobs = this->Output(call, 3, {in.K, in.k});
    void* top_scores = this->Output(call, 4, {in.K, in.k});
    void* values = this->Output(call, 5, {in.K, in.V});
    void* parts = this->Output(call, 6, {in.K, num_parts, 3});
    this->Launch(call, {in.K, num_parts, 1}, CudaSampleNode<T>::Vocabulary(settings, in, parts, values, in.V));
    this->Launch(call, {in.K, 1, 1},
                 CudaSampleNode<T>::Sample(settings, in, token_ids, logprobs, top_ids, top_logprobs, top_scores, values,
                                           parts, in.V, num_parts, in.k));
  }
};

}  // namespace

std::vector<const OrtCustomOp*> CudaOperators() {
  std::vector<const OrtCustomOp*> all;
  AppendOperator<CudaEmbed>(&all);
  AppendOperator<CudaAddNorm>(&all);
  AppendOperator<CudaActivate>(&all);
  AppendOperator<CudaRotary>(&all);
  AppendOperator<CudaPackedAttention>(&all);
  AppendOperator<CudaPagedWrite>(&all);
  AppendOperator<CudaPagedAttention>(&all);
  AppendOperator<CudaSsru>(&all);
  AppendOperator<CudaPagedAverage>(&all);
  AppendOperator<CudaGatedSum>(&all);
  AppendOperator<CudaPick>(&all);
  AppendOperator<CudaSample>(&all);
  return all;
}

}  // namespace antiphon
