// Nodes that compute each token or sample by itself.
#include <algorithm>
#include <array>

#include "cuda_operator.h"
#include "cuda_operators.h"

namespace antiphon {

namespace {

// Mirrors kernel_list.py and nodes.py.
constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kVocabularyPart = 4096;
constexpr int64_t kMaxParts = 128;
constexpr int64_t kFloatParams = 4, kIntParams = 6, kEditValues = 3;
constexpr std::array<const char*, 6> kActivations = {"none", "relu", "gelu", "gelu_tanh", "silu", "tanh"};

template <ElementType T>
class CudaEmbed : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaEmbed";
  static constexpr Port kInputs[] = {{kInt32},            {kInt32},            {T},                 {T, kOptional},
                                     {kInt32, kOptional}, {kInt32, kOptional}, {kInt32, kOptional}, {T, kOptional}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaEmbed(const Attributes& attributes)
      : CudaOperator<T>({{"embed",
                          "out:p tokens:p positions:p weight:p position_table:p rows:p previous:p types:p type_table:p"
                          " width:a scale:f flags:i"}}),
        scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Tensor tokens = call.Input(0, "tokens", 1), positions = call.Input(1, "positions", 1);
    const Tensor weight = call.Input(2, "weight", 2), table = call.OptionalInput(3, "position_table", 2);
    const Tensor rows = call.OptionalInput(4, "rows", 1), previous = call.OptionalInput(5, "previous", 1);
    const Tensor types = call.OptionalInput(6, "types", 1), type_table = call.OptionalInput(7, "type_table", 2);
    const int64_t count = tokens.dims[0], width = weight.dims[1];
    RequireSize("positions", positions, 0, count);
    RequireSize("position_table", table, 1, width);
    RequireSize("rows", rows, 0, count);
    RequireSize("types", types, 0, count);
    RequireSize("type_table", type_table, 1, width);
    void* out = this->Output(call, 0, {count, width});
    const int64_t flags = Flags({bool(table), rows && previous, types && type_table});
    this->Launch(call, "embed", {count, 1, 1},
                 {out, tokens.data, positions.data, weight.data, table.data, rows.data, previous.data, types.data,
                  type_table.data, width, scale_, flags});
  }

 private:
  float scale_;
};

template <ElementType T>
class CudaAddNorm : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaAddNorm";
  static constexpr Port kInputs[] = {{T}, {T, kOptional}, {T, kOptional}, {T, kOptional}, {T, kOptional}};
  static constexpr Port kOutputs[] = {{T}, {T}};

  explicit CudaAddNorm(const Attributes& attributes)
      : CudaOperator<T>({{"add_norm",
                          "normed:p total:p x:p bias:p residual:p weight:p norm_bias:p width:a epsilon:f flags:i"}}),
        epsilon_(attributes.Float("epsilon")),
        is_rms_(attributes.String("kind") == "rms") {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor residual = call.OptionalInput(2, "residual", 2), weight = call.OptionalInput(3, "weight", 1);
    const Tensor norm_bias = call.OptionalInput(4, "norm_bias", 1);
    const int64_t count = x.dims[0], width = x.dims[1];
    RequireSize("bias", bias, 0, width);
    RequireSize("residual", residual, 0, count);
    RequireSize("residual", residual, 1, width);
    RequireSize("weight", weight, 0, width);
    RequireSize("norm_bias", norm_bias, 0, width);
    void* normed = this->Output(call, 0, {count, width});
    void* total = this->Output(call, 1, {count, width});
    const int64_t flags = Flags({bool(bias), bool(residual), bool(weight), bool(norm_bias), is_rms_});
    this->Launch(
        call, "add_norm", {count, 1, 1},
        {normed, total, x.data, bias.data, residual.data, weight.data, norm_bias.data, width, epsilon_, flags});
  }

 private:
  float epsilon_;
  bool is_rms_;
};

template <ElementType T>
class CudaActivate : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaActivate";
  static constexpr Port kInputs[] = {{T}, {T, kOptional}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaActivate(const Attributes& attributes)
      : CudaOperator<T>({{"activate", "out:p x:p bias:p width:a activation:i flags:i"}}),
        activation_(IndexOf(attributes.String("activation"))),
        is_gated_(attributes.Int("gated") != 0) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2), bias = call.OptionalInput(1, "bias", 1);
    const int64_t count = x.dims[0], width = is_gated_ ? x.dims[1] / 2 : x.dims[1];
    RequireSize("x", x, 1, is_gated_ ? 2 * width : width);
    RequireSize("bias", bias, 0, x.dims[1]);
    void* out = this->Output(call, 0, {count, width});
    this->Launch(call, "activate", {count, CeilDiv(width, kBlockColumns), 1},
                 {out, x.data, bias.data, width, activation_, Flags({bool(bias), is_gated_})});
  }

 private:
  static int64_t IndexOf(const std::string& name) {
    for (size_t index = 0; index < kActivations.size(); ++index) {
      if (name == kActivations[index]) return static_cast<int64_t>(index);
    }
    throw OperatorError("activation " + name + " is unknown");
  }

  int64_t activation_;
  bool is_gated_;
};

template <ElementType T>
class CudaRotary : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaRotary";
  static constexpr Port kInputs[] = {{T}, {T, kOptional}, {kInt32}, {kFloat32}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaRotary(const Attributes& attributes)
      : CudaOperator<T>({{"rotary", "out:p qkv:p bias:p positions:p table:p num_heads:i width:a flags:i"}}),
        num_heads_(attributes.Size("num_heads")) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor positions = call.Input(2, "positions", 1), table = call.Input(3, "table", 2);
    const int64_t count = qkv.dims[0], width = table.dims[1];
    CompiledWidth(width);
    RequireSize("qkv", qkv, 1, 3 * num_heads_ * width);
    RequireSize("bias", bias, 0, qkv.dims[1]);
    RequireSize("positions", positions, 0, count);
    void* out = this->Output(call, 0, {count, qkv.dims[1]});
    this->Launch(
        call, "rotary", {count, 3 * num_heads_, 1},
        {out, qkv.data, bias.data, positions.data, table.data, num_heads_, width, Flags({bool(bias)})});
  }

 private:
  int64_t num_heads_;
};

template <ElementType T>
class CudaPick : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPick";
  static constexpr Port kInputs[] = {{T}, {kInt32}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaPick(const Attributes&) : CudaOperator<T>({{"pick", "out:p hidden:p picks:p width:a"}}) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2), picks = call.Input(1, "picks", 1);
    void* out = this->Output(call, 0, {picks.dims[0], hidden.dims[1]});
    this->Launch(call, "pick", {picks.dims[0], 1, 1}, {out, hidden.data, picks.data, hidden.dims[1]});
  }
};

template <ElementType T>
class CudaSample : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaSample";
  static constexpr Port kInputs[] = {{T},      {T, kOptional}, {kInt32}, {kFloat32}, {kInt64},
                                     {kInt32}, {kInt32},       {kInt32}, {kFloat32}, {kInt32}};
  static constexpr Port kOutputs[] = {{kInt32}, {kFloat32}, {kInt32}, {kFloat32}, {kFloat32}, {kFloat32}, {kFloat32}};

  explicit CudaSample(const Attributes&)
      : CudaOperator<T>({{"vocabulary",
                          "parts:p values:p logits:p bias:p float_params:p int_params:p edit_offsets:p vocab_size:i"
                          " flags:i"},
                         {"sample",
                          "token_ids:p logprobs:p top_ids:p top_logprobs:p top_scores:p values:p parts:p logits:p"
                          " bias:p positions:p float_params:p int_params:p edit_offsets:p edit_ids:p edit_rounds:p"
                          " edit_values:p vocab_size:i num_parts:i num_candidates:i flags:i"}}) {}

  void Run(const Call& call) const {
    const Tensor logits = call.Input(0, "logits", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor positions = call.Input(2, "positions", 1), floats = call.Input(3, "float_params", 2);
    const Tensor ints = call.Input(4, "int_params", 2), offsets = call.Input(5, "edit_offsets", 1);
    const Tensor ids = call.Input(6, "edit_ids", 1), rounds = call.Input(7, "edit_rounds", 1);
    const Tensor edits = call.Input(8, "edit_values", 2), candidates = call.Input(9, "candidates", 1);
    const int64_t count = logits.dims[0], vocab = logits.dims[1], width = candidates.dims[0];
    const int64_t num_parts = CeilDiv(vocab, kVocabularyPart), flags = Flags({bool(bias)});
    Require(num_parts <= kMaxParts, "axis 1 of logits", vocab, "it must be at most 524288");
    RequireSize("bias", bias, 0, vocab);
    RequireSize("positions", positions, 0, count);
    RequireSize("float_params", floats, 0, count);
    RequireSize("float_params", floats, 1, kFloatParams);
    RequireSize("int_params", ints, 0, count);
    RequireSize("int_params", ints, 1, kIntParams);
    RequireSize("edit_offsets", offsets, 0, count + 1);
    RequireSize("edit_rounds", rounds, 0, ids.dims[0]);
    RequireSize("edit_values", edits, 0, ids.dims[0]);
    RequireSize("edit_values", edits, 1, kEditValues);
    void* token_ids = this->Output(call, 0, {count});
    void* logprobs = this->Output(call, 1, {count});
    void* top_ids = this->Output(call, 2, {count, width});
    void* top_logprobs = this->Output(call, 3, {count, width});
    void* top_scores = this->Output(call, 4, {count, width});
    void* values = this->Output(call, 5, {count, vocab});
    void* parts = this->Output(call, 6, {count, num_parts, 3});
    this->Launch(call, "vocabulary", {count, num_parts, 1},
                 {parts, values, logits.data, bias.data, floats.data, ints.data, offsets.data, vocab, flags});
    this->Launch(call, "sample", {count, 1, 1},
                 {token_ids, logprobs, top_ids, top_logprobs, top_scores, values, parts, logits.data, bias.data,
                  positions.data, floats.data, ints.data, offsets.data, ids.data, rounds.data, edits.data, vocab,
                  num_parts, width, flags});
  }
};

}  // namespace

std::vector<const OrtCustomOp*> CudaRowOperators() {
  std::vector<const OrtCustomOp*> all;
  AppendOperator<CudaEmbed>(&all);
  AppendOperator<CudaAddNorm>(&all);
  AppendOperator<CudaActivate>(&all);
  AppendOperator<CudaRotary>(&all);
  AppendOperator<CudaPick>(&all);
  AppendOperator<CudaSample>(&all);
  return all;
}

}  // namespace antiphon
