// Whole sublayers as one operator each: products, attention or activation, residual sum and the next norm.
//
// Every row goes through the kernels of the separate operators in their order, so the results are theirs, bit for bit.
// Products divide their work among the threads as separate operators do. Tiles of rows that one thread would take
// through the whole sublayer were slower: their weights do not stay in the second-level cache. The figures are in
// docs/decisions/kernels.md.
#include "operators.h"
#include "packed_heads.h"
#include "paged_rows.h"
#include "residual_norm.h"
#include "rotation.h"
#include "weight_inputs.h"

namespace antiphon {

namespace {

// x and residual, then the inputs of two weights, weight and bias of the norm, and others.
template <typename Inputs, size_t Count>
constexpr auto SublayerPorts(const std::array<Port, Count>& others) {
  constexpr std::array<Port, 2> kStates = {{{kFloat32}, {kFloat32}}};
  constexpr std::array<Port, 2> kNorm = {{{kFloat32, kOptional}, {kFloat32, kOptional}}};
  return JoinPorts(kStates, Inputs::kPorts, Inputs::kPorts, kNorm, others, Inputs::kOutlierPorts,
                   Inputs::kOutlierPorts);
}

constexpr std::array<Port, 0> kNoPorts{};

// Positions of the inputs in SublayerPorts.
template <typename Inputs>
struct At {
  static constexpr size_t kFirstWeight = 2;
  static constexpr size_t kSecondWeight = kFirstWeight + Inputs::kPorts.size();
  static constexpr size_t kNorm = kSecondWeight + Inputs::kPorts.size();
  static constexpr size_t kOthers = kNorm + 2;
  // Of a node with `ports` inputs.
  static constexpr size_t FirstOutliers(size_t ports) { return ports - 2 * Inputs::kOutlierPorts.size(); }
  static constexpr size_t SecondOutliers(size_t ports) { return ports - Inputs::kOutlierPorts.size(); }
};

// Products around the attention of a sublayer, its residual and its norm.
template <typename Inputs>
class AttentionProducts {
 public:
  // ports: number of the node's inputs. projected: outputs of the first weight; attended: inputs of the second one, H D.
  AttentionProducts(const Call& call, size_t ports, const NormKind& kind, const char* first_prefix, int64_t projected,
                    int64_t attended)
      : x_(call.Input(0, "x", 2)),
        projected_(projected),
        attended_(attended),
        first_(Inputs::Read(call, At<Inputs>::kFirstWeight, At<Inputs>::FirstOutliers(ports), first_prefix, x_.dims[1],
                            projected)),
        second_(Inputs::Read(call, At<Inputs>::kSecondWeight, At<Inputs>::SecondOutliers(ports), "out_", attended,
                             x_.dims[1])),
        norm_(call, kind, call.Input(1, "residual", 2), x_.dims[0], x_.dims[1], At<Inputs>::kNorm, "norm_") {}

  // attend(projected rows, out) computes the attention.
  template <typename Attend>
  void Run(const Call& call, const Attend& attend) const {
    const int64_t tokens = x_.dims[0], width = x_.dims[1];
    if (tokens > 0) {
      const Scratch<float> room(static_cast<size_t>(tokens * (projected_ + attended_)));
      float *projected = room.data(), *out = projected + tokens * projected_;
      Multiply(call, x_.as<float>(), tokens, width, first_, Activation::kNone, projected);
      attend(projected, out);
      Multiply(call, out, tokens, attended_, second_, Activation::kNone, norm_.normed());
    }
    norm_.Run(call, norm_.normed());
  }

 private:
  Tensor x_;
  int64_t projected_, attended_;
  typename Inputs::Weight first_, second_;
  ResidualNorm norm_;
};

// norm(residual + act(x W1 + b1) W2 + b2), or with a gate between the products.
template <typename Inputs>
class FeedForwardSublayer {
 public:
  static constexpr const char* kNames[] = {"FeedForwardSublayer", "QuantizedFeedForwardSublayer",
                                           "NibbleFeedForwardSublayer"};
  static constexpr const char* kName = kNames[Inputs::kPrecision];
  static constexpr auto kInputs = SublayerPorts<Inputs>(kNoPorts);
  static constexpr Port kOutputs[] = {{kFloat32}, {kFloat32, kOptional}};

  explicit FeedForwardSublayer(const Attributes& attributes)
      : norm_(attributes),
        activation_(ActivationNamed(attributes.String("activation"))),
        is_gated_(attributes.Int("gated") != 0),
        inner_width_(attributes.Size("inner_width")) {
    Require(!is_gated_ || inner_width_ % 2 == 0, "inner_width", inner_width_, "it must be even with a gate");
  }

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const int64_t rows = x.dims[0], width = x.dims[1], outer_inputs = is_gated_ ? inner_width_ / 2 : inner_width_;
    const auto inner = Inputs::Read(call, At<Inputs>::kFirstWeight, At<Inputs>::FirstOutliers(kInputs.size()), "inner_",
                                    width, inner_width_);
    const auto outer = Inputs::Read(call, At<Inputs>::kSecondWeight, At<Inputs>::SecondOutliers(kInputs.size()),
                                    "outer_", outer_inputs, width);
    const ResidualNorm norm(call, norm_, call.Input(1, "residual", 2), rows, width, At<Inputs>::kNorm, "norm_");
    if (rows > 0) {
      const Scratch<float> states(static_cast<size_t>(rows * inner_width_));
      Multiply(call, x.as<float>(), rows, width, inner, is_gated_ ? Activation::kNone : activation_, states.data());
      if (is_gated_) Gate(call, rows, states.data());
      Multiply(call, states.data(), rows, outer_inputs, outer, Activation::kNone, norm.normed());
    }
    norm.Run(call, norm.normed());
  }

 private:
  // Rows [inner_width_] become rows [inner_width_ / 2], one after another from the beginning. A row's result never
  // reaches the inputs of a later row, and is written behind what its own gate has read.
  void Gate(const Call& call, int64_t rows, float* states) const {
    const int64_t half = inner_width_ / 2;
    const Kernels& kernels = ActiveKernels();
    ForRows(call, rows, inner_width_, [&](int64_t row) {
      float* gate = states + row * inner_width_;
      kernels.gate(gate, gate + half, activation_, half, gate);
    });
    for (int64_t row = 1; row < rows; ++row) {
      std::memmove(states + row * half, states + row * inner_width_, static_cast<size_t>(half) * sizeof(float));
    }
  }

  NormKind norm_;
  Activation activation_;
  bool is_gated_;
  int64_t inner_width_;
};

// norm(residual + attention of packed sequences over themselves).
template <typename Inputs>
class PackedAttentionSublayer {
 public:
  static constexpr const char* kNames[] = {"PackedAttentionSublayer", "QuantizedPackedAttentionSublayer",
                                           "NibblePackedAttentionSublayer"};
  static constexpr const char* kName = kNames[Inputs::kPrecision];
  static constexpr auto kInputs = SublayerPorts<Inputs>(std::array<Port, 5>{
      {{kInt32}, {kFloat32, kOptional}, {kFloat32, kOptional}, {kInt32, kOptional}, {kFloat32, kOptional}}});
  static constexpr Port kOutputs[] = {{kFloat32}, {kFloat32, kOptional}};

  explicit PackedAttentionSublayer(const Attributes& attributes)
      : norm_(attributes),
        heads_(attributes.Size("num_heads")),
        scale_(attributes.Float("scale")),
        cap_(attributes.Float("cap", 0.0f)),
        causal_(attributes.Int("causal") != 0),
        projected_(attributes.Size("qkv_width")) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2);
    const int64_t width = HeadWidth("qkv_width", projected_, 3, heads_);
    constexpr size_t kOffsets = At<Inputs>::kOthers;
    const Packing packing = CheckedPacking(call.Input(kOffsets, "offsets", 1), x.dims[0]);
    const Biases biases(call, kOffsets + 1, kOffsets + 2, heads_);
    const Rotation rotation(call, kOffsets + 3, kOffsets + 4, x.dims[0], width);
    const AttentionProducts<Inputs> products(call, kInputs.size(), norm_, "qkv_", projected_, heads_ * width);
    products.Run(call, [&](float* qkv, float* out) {
      rotation.Run(call, heads_, qkv);
      PackedHeads(qkv, packing, heads_, width, scale_, cap_, causal_).Attend(call, &biases, RelativeTables(), out);
    });
  }

 private:
  NormKind norm_;
  int64_t heads_;
  float scale_;
  float cap_;
  bool causal_;
  int64_t projected_;
};

// norm(residual + attention of rows over blocks): over their own ones, or over those of their sources. Attention is
// SelfAttention or CrossAttention.
template <typename Inputs, typename Attention>
class PagedSublayer {
 public:
  static constexpr const char* kName = Attention::kNames[Inputs::kPrecision];
  static constexpr auto kInputs = SublayerPorts<Inputs>(Attention::kPorts);
  static constexpr Port kOutputs[] = {{kFloat32}, {kFloat32, kOptional}};

  explicit PagedSublayer(const Attributes& attributes)
      : norm_(attributes),
        heads_(attributes.Size("num_heads")),
        scale_(attributes.Float("scale")),
        cap_(attributes.Float("cap", 0.0f)),
        layer_(attributes.Int("layer")),
        projected_(attributes.Size(Attention::kWidth)) {}

  void Run(const Call& call) const {
    const int64_t width = HeadWidth(Attention::kWidth, projected_, Attention::kParts, heads_);
    const Pool pool(call.Input(At<Inputs>::kOthers, "cache", 5), layer_, heads_, width);
    pool.is_half ? Attend<uint16_t>(call, pool, width) : Attend<float>(call, pool, width);
  }

 private:
  template <typename Element>
  void Attend(const Call& call, const Pool& pool, int64_t width) const {
    const int64_t tokens = call.Input(0, "x", 2).dims[0];
    const typename Attention::template Rows<Element> rows(call, At<Inputs>::kOthers, pool, tokens, width, scale_, cap_);
    const AttentionProducts<Inputs> products(call, kInputs.size(), norm_, Attention::kPrefix, projected_, heads_ * width);
    products.Run(call, [&](float* projected, float* out) { rows.Attend(call, projected, out); });
  }

  NormKind norm_;
  int64_t heads_;
  float scale_;
  float cap_;
  int64_t layer_;
  int64_t projected_;
};

// Rows append their new tokens, then attend over all their positions.
struct SelfAttention {
  static constexpr const char* kNames[] = {"PagedSelfAttentionSublayer", "QuantizedPagedSelfAttentionSublayer",
                                           "NibblePagedSelfAttentionSublayer"};
  static constexpr const char *kPrefix = "qkv_", *kWidth = "qkv_width";
  static constexpr int64_t kParts = 3;  // queries, keys and values
  static constexpr auto kPorts = kSelfRowsPorts;
  template <typename Element>
  using Rows = SelfRows<Element>;
};

struct CrossAttention {
  static constexpr const char* kNames[] = {"PagedCrossAttentionSublayer", "QuantizedPagedCrossAttentionSublayer",
                                           "NibblePagedCrossAttentionSublayer"};
  static constexpr const char *kPrefix = "query_", *kWidth = "query_width";
  static constexpr int64_t kParts = 1;
  static constexpr auto kPorts = kCrossRowsPorts;
  template <typename Element>
  using Rows = CrossRows<Element>;
};

template <typename Inputs>
using PagedSelfAttentionSublayer = PagedSublayer<Inputs, SelfAttention>;
template <typename Inputs>
using PagedCrossAttentionSublayer = PagedSublayer<Inputs, CrossAttention>;

template <template <typename> typename Sublayer>
void AddAllPrecisions(std::vector<const OrtCustomOp*>* operators) {
  static const Registration<Sublayer<Float32Inputs>> float32;
  static const Registration<Sublayer<Int8Inputs>> int8;
  static const Registration<Sublayer<Int4Inputs>> int4;
  operators->insert(operators->end(), {&float32, &int8, &int4});
}

}  // namespace

std::vector<const OrtCustomOp*> SublayerOperators() {
  std::vector<const OrtCustomOp*> operators;
  AddAllPrecisions<FeedForwardSublayer>(&operators);
  AddAllPrecisions<PackedAttentionSublayer>(&operators);
  AddAllPrecisions<PagedSelfAttentionSublayer>(&operators);
  AddAllPrecisions<PagedCrossAttentionSublayer>(&operators);
  return operators;
}

}  // namespace antiphon
