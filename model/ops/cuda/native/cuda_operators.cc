// Nodes for GPUs: each describes its outputs and launches its kernel. Sizes come from the shapes; values are not seen,
// since they are on the device: service/runtime/cuda/batch_check.py checks them before a step.
#include "cuda_operators.h"

#include <algorithm>
#include <array>
#include <string>

#include "../../native/operator.h"
#include "kernel_library.h"

namespace antiphon {

namespace {

// Mirrors kernel_list.py and nodes.py.
constexpr int64_t kBlockColumns = 1024;
constexpr int64_t kVocabularyPart = 4096;
constexpr int64_t kBlockSize = 16;
constexpr int64_t kMaxSplits = 8;
constexpr std::array<int64_t, 5> kHeadWidths = {16, 32, 64, 128, 256};
constexpr std::array<const char*, 6> kActivations = {"none", "relu", "gelu", "gelu_tanh", "silu", "tanh"};

template <ElementType T>
constexpr const char* TypeName() {
  return T == kBfloat16 ? "bfloat16" : T == kFloat16 ? "float16" : "float32";
}

int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

// 1 for the first that is given, 2 for the second, 4 for the third, and so on.
int64_t Flags(std::initializer_list<bool> given) {
  int64_t flags = 0, bit = 1;
  for (const bool one : given) {
    if (one) flags |= bit;
    bit <<= 1;
  }
  return flags;
}

KernelLibrary& Kernels() {
  KernelLibrary* loaded = LoadedKernels();
  if (loaded == nullptr) throw OperatorError("no kernels for GPUs are loaded");
  return *loaded;
}

int64_t HeadWidth(int64_t width) {
  for (const int64_t compiled : kHeadWidths) {
    if (width <= compiled && width % kBlockSize == 0 && width > 0) return compiled;
  }
  Refuse("width of a head", width, "it must be a multiple of 16 up to 256");
}

// Base: names and launches the variants of an element type.
template <ElementType T>
class CudaOperator {
 public:
  static constexpr const char* kProvider = "CUDAExecutionProvider";

 protected:
  static void Launch(const Call& call, const char* kernel, const Grid& grid, const LaunchArguments& arguments,
                     int64_t head_width = 0) {
    std::string variant = std::string(kernel) + "." + TypeName<T>();
    if (head_width != 0) variant += "." + std::to_string(HeadWidth(head_width));
    Kernels().Launch(variant, grid, arguments, call.GpuStream());
  }
};

template <ElementType T>
class CudaEmbed : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaEmbed";
  static constexpr Port kInputs[] = {{kInt32},           {kInt32},           {T},                 {T, kOptional},
                                     {kInt32, kOptional}, {kInt32, kOptional}, {kInt32, kOptional}, {T, kOptional}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaEmbed(const Attributes& attributes) : scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Tensor tokens = call.Input(0, "tokens", 1), positions = call.Input(1, "positions", 1);
    const Tensor weight = call.Input(2, "weight", 2), table = call.OptionalInput(3, "position_table", 2);
    const Tensor rows = call.OptionalInput(4, "rows", 1), previous = call.OptionalInput(5, "previous", 1);
    const Tensor types = call.OptionalInput(6, "types", 1), type_table = call.OptionalInput(7, "type_table", 2);
    const int64_t width = weight.dims[1];
    void* out = call.Output(0, {tokens.dims[0], width});
    LaunchArguments arguments;
    arguments.Pointer("out", out)
        .Pointer("tokens", tokens.data)
        .Pointer("positions", positions.data)
        .Pointer("weight", weight.data)
        .Pointer("position_table", table.data)
        .Pointer("rows", rows.data)
        .Pointer("previous", previous.data)
        .Pointer("types", types.data)
        .Pointer("type_table", type_table.data)
        .Int("width", width)
        .Float("scale", scale_)
        .Int("flags", Flags({bool(table), rows && previous, types && type_table}));
    this->Launch(call, "embed", {tokens.dims[0], 1, 1}, arguments);
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
      : epsilon_(attributes.Float("epsilon")), is_rms_(attributes.String("kind") == "rms") {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor residual = call.OptionalInput(2, "residual", 2), weight = call.OptionalInput(3, "weight", 1);
    const Tensor norm_bias = call.OptionalInput(4, "norm_bias", 1);
    void* normed = call.Output(0, {x.dims[0], x.dims[1]});
    void* total = call.Output(1, {x.dims[0], x.dims[1]});
    LaunchArguments arguments;
    arguments.Pointer("normed", normed)
        .Pointer("total", total)
        .Pointer("x", x.data)
        .Pointer("bias", bias.data)
        .Pointer("residual", residual.data)
        .Pointer("weight", weight.data)
        .Pointer("norm_bias", norm_bias.data)
        .Int("width", x.dims[1])
        .Float("epsilon", epsilon_)
        .Int("flags", Flags({bool(bias), bool(residual), bool(weight), bool(norm_bias), is_rms_}));
    this->Launch(call, "add_norm", {x.dims[0], 1, 1}, arguments);
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
      : activation_(IndexOf(attributes.String("activation"))), is_gated_(attributes.Int("gated") != 0) {}

  void Run(const Call& call) const {
    const Tensor x = call.Input(0, "x", 2), bias = call.OptionalInput(1, "bias", 1);
    const int64_t width = is_gated_ ? x.dims[1] / 2 : x.dims[1];
    void* out = call.Output(0, {x.dims[0], width});
    LaunchArguments arguments;
    arguments.Pointer("out", out)
        .Pointer("x", x.data)
        .Pointer("bias", bias.data)
        .Int("width", width)
        .Int("activation", activation_)
        .Int("flags", Flags({bool(bias), is_gated_}));
    this->Launch(call, "activate", {x.dims[0], CeilDiv(width, kBlockColumns), 1}, arguments);
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

  explicit CudaRotary(const Attributes& attributes) : num_heads_(attributes.Size("num_heads")) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor positions = call.Input(2, "positions", 1), table = call.Input(3, "table", 2);
    HeadWidth(table.dims[1]);
    void* out = call.Output(0, {qkv.dims[0], qkv.dims[1]});
    LaunchArguments arguments;
    arguments.Pointer("out", out)
        .Pointer("qkv", qkv.data)
        .Pointer("bias", bias.data)
        .Pointer("positions", positions.data)
        .Pointer("table", table.data)
        .Int("num_heads", num_heads_)
        .Int("width", table.dims[1])
        .Int("flags", Flags({bool(bias)}));
    this->Launch(call, "rotary", {qkv.dims[0], 3 * num_heads_, 1}, arguments);
  }

 private:
  int64_t num_heads_;
};

template <ElementType T>
class CudaPackedAttention : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPackedAttention";
  static constexpr Port kInputs[] = {{T},      {T, kOptional},        {kInt32},
                                     {kInt32}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaPackedAttention(const Attributes& attributes)
      : num_heads_(attributes.Size("num_heads")),
        scale_(attributes.Float("scale")),
        is_causal_(attributes.Int("causal") != 0) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor offsets = call.Input(2, "offsets", 1), tiles = call.Input(3, "tiles", 2);
    const Tensor table = call.OptionalInput(4, "bias_table", 2), slopes = call.OptionalInput(5, "slopes", 1);
    const int64_t width = qkv.dims[1] / (3 * num_heads_);
    void* out = call.Output(0, {qkv.dims[0], num_heads_ * width});
    LaunchArguments arguments;
    arguments.Pointer("out", out)
        .Pointer("qkv", qkv.data)
        .Pointer("bias", bias.data)
        .Pointer("offsets", offsets.data)
        .Pointer("tiles", tiles.data)
        .Pointer("bias_table", table.data)
        .Pointer("slopes", slopes.data)
        .Int("num_heads", num_heads_)
        .Int("width", width)
        .Int("reach", table ? table.dims[1] / 2 : 0)
        .Float("scale", scale_)
        .Int("flags", Flags({bool(bias), bool(table), bool(slopes), is_causal_}));
    this->Launch(call, "packed_attention", {tiles.dims[0], num_heads_, 1}, arguments, width);
  }

 private:
  int64_t num_heads_;
  float scale_;
  bool is_causal_;
};

template <ElementType T>
class CudaPagedWrite : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPagedWrite";
  static constexpr Port kInputs[] = {{T}, {T, kOptional}, {T}, {kInt32}, {kInt32}, {kInt32}};
  static constexpr Port kOutputs[] = {{kInt32}};

  explicit CudaPagedWrite(const Attributes& attributes)
      : num_heads_(attributes.Size("num_heads")), layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    const Tensor kv = call.Input(0, "kv", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor cache = call.Input(2, "cache", 6), tables = call.Input(3, "tables", 2);
    const Tensor rows = call.Input(4, "rows", 1), positions = call.Input(5, "positions", 1);
    const int64_t width = cache.dims[5];
    HeadWidth(width);
    void* written = call.Output(0, {1});
    LaunchArguments arguments;
    arguments.Pointer("written", written)
        .Pointer("cache", cache.data)
        .Pointer("kv", kv.data)
        .Pointer("bias", bias.data)
        .Pointer("tables", tables.data)
        .Pointer("rows", rows.data)
        .Pointer("positions", positions.data)
        .Int("parts", kv.dims[1] / (num_heads_ * width))
        .Int("table_width", tables.dims[1])
        .Int("num_heads", num_heads_)
        .Int("width", width)
        .Int("num_layers", cache.dims[1])
        .Int("layer", layer_)
        .Int("flags", Flags({bool(bias)}));
    this->Launch(call, "paged_write", {kv.dims[0], num_heads_, 1}, arguments);
  }

 private:
  int64_t num_heads_, layer_;
};

template <ElementType T>
class CudaPagedAttention : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPagedAttention";
  static constexpr Port kInputs[] = {{T},      {T, kOptional},      {T},                   {kInt32},             {kInt32},
                                     {kInt32}, {kInt32, kOptional}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{T}, {kFloat32}};

  explicit CudaPagedAttention(const Attributes& attributes)
      : num_heads_(attributes.Size("num_heads")),
        layer_(attributes.Int("layer")),
        scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Tensor query = call.Input(0, "query", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor cache = call.Input(2, "cache", 6), tables = call.Input(3, "tables", 2);
    const Tensor rows = call.Input(4, "rows", 1), lengths = call.Input(5, "lengths", 1);
    const Tensor table = call.OptionalInput(7, "bias_table", 2), slopes = call.OptionalInput(8, "slopes", 1);
    const int64_t tokens = query.dims[0], width = cache.dims[5], splits = Splits(tokens, tables.dims[1]);
    void* out = call.Output(0, {tokens, num_heads_ * width});
    void* sums = call.Output(1, {splits > 1 ? tokens : 1, num_heads_, splits, width + 2});
    LaunchArguments arguments;
    arguments.Pointer("out", out)
        .Pointer("sums", sums)
        .Pointer("query", query.data)
        .Pointer("bias", bias.data)
        .Pointer("cache", cache.data)
        .Pointer("tables", tables.data)
        .Pointer("rows", rows.data)
        .Pointer("lengths", lengths.data)
        .Pointer("bias_table", table.data)
        .Pointer("slopes", slopes.data)
        .Int("table_width", tables.dims[1])
        .Int("query_stride", query.dims[1])
        .Int("num_heads", num_heads_)
        .Int("width", width)
        .Int("num_layers", cache.dims[1])
        .Int("layer", layer_)
        .Int("reach", table ? table.dims[1] / 2 : 0)
        .Int("num_splits", splits)
        .Float("scale", scale_)
        .Int("flags", Flags({bool(bias), bool(table), bool(slopes)}));
    this->Launch(call, "paged_attention", {tokens, num_heads_, splits}, arguments, width);
    if (splits == 1) return;
    LaunchArguments merged;
    merged.Pointer("out", out).Pointer("sums", sums);
    merged.Int("num_heads", num_heads_).Int("width", width).Int("num_splits", splits);
    this->Launch(call, "merge_splits", {tokens, num_heads_, 1}, merged, width);
  }

 private:
  // Few tokens leave multiprocessors idle: then several programs share the positions of one, two blocks each at least.
  int64_t Splits(int64_t tokens, int64_t table_width) const {
    const int64_t wanted = 2 * Kernels().multiprocessors(), programs = std::max<int64_t>(tokens * num_heads_, 1);
    return std::clamp<int64_t>(CeilDiv(wanted, programs), 1, std::clamp<int64_t>(table_width / 2, 1, kMaxSplits));
  }

  int64_t num_heads_, layer_;
  float scale_;
};

template <ElementType T>
class CudaPick : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPick";
  static constexpr Port kInputs[] = {{T}, {kInt32}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaPick(const Attributes&) {}

  void Run(const Call& call) const {
    const Tensor hidden = call.Input(0, "hidden", 2), picks = call.Input(1, "picks", 1);
    void* out = call.Output(0, {picks.dims[0], hidden.dims[1]});
    LaunchArguments arguments;
    arguments.Pointer("out", out).Pointer("hidden", hidden.data).Pointer("picks", picks.data);
    arguments.Int("width", hidden.dims[1]);
    this->Launch(call, "pick", {picks.dims[0], 1, 1}, arguments);
  }
};

template <ElementType T>
class CudaSample : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaSample";
  static constexpr Port kInputs[] = {{T},      {T, kOptional}, {kInt32}, {kFloat32}, {kInt64},
                                     {kInt32}, {kInt32},       {kInt32}, {kFloat32}, {kInt32}};
  static constexpr Port kOutputs[] = {{kInt32}, {kFloat32}, {kInt32}, {kFloat32}, {kFloat32}, {kFloat32}, {kFloat32}};

  explicit CudaSample(const Attributes&) {}

  void Run(const Call& call) const {
    const Tensor logits = call.Input(0, "logits", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor positions = call.Input(2, "positions", 1), floats = call.Input(3, "float_params", 2);
    const Tensor ints = call.Input(4, "int_params", 2), edit_offsets = call.Input(5, "edit_offsets", 1);
    const Tensor edit_ids = call.Input(6, "edit_ids", 1), edit_rounds = call.Input(7, "edit_rounds", 1);
    const Tensor edit_values = call.Input(8, "edit_values", 2), candidates = call.Input(9, "candidates", 1);
    const int64_t samples = logits.dims[0], vocab = logits.dims[1], width = candidates.dims[0];
    const int64_t num_parts = CeilDiv(vocab, kVocabularyPart), flags = Flags({bool(bias)});
    void* token_ids = call.Output(0, {samples});
    void* logprobs = call.Output(1, {samples});
    void* top_ids = call.Output(2, {samples, width});
    void* top_logprobs = call.Output(3, {samples, width});
    void* top_scores = call.Output(4, {samples, width});
    void* values = call.Output(5, {samples, vocab});
    void* parts = call.Output(6, {samples, num_parts, 3});
    LaunchArguments first;
    first.Pointer("parts", parts)
        .Pointer("values", values)
        .Pointer("logits", logits.data)
        .Pointer("bias", bias.data)
        .Pointer("float_params", floats.data)
        .Pointer("int_params", ints.data)
        .Pointer("edit_offsets", edit_offsets.data)
        .Int("vocab_size", vocab)
        .Int("flags", flags);
    this->Launch(call, "vocabulary", {samples, num_parts, 1}, first);
    LaunchArguments second;
    second.Pointer("token_ids", token_ids)
        .Pointer("logprobs", logprobs)
        .Pointer("top_ids", top_ids)
        .Pointer("top_logprobs", top_logprobs)
        .Pointer("top_scores", top_scores)
        .Pointer("values", values)
        .Pointer("parts", parts)
        .Pointer("logits", logits.data)
        .Pointer("bias", bias.data)
        .Pointer("positions", positions.data)
        .Pointer("float_params", floats.data)
        .Pointer("int_params", ints.data)
        .Pointer("edit_offsets", edit_offsets.data)
        .Pointer("edit_ids", edit_ids.data)
        .Pointer("edit_rounds", edit_rounds.data)
        .Pointer("edit_values", edit_values.data)
        .Int("vocab_size", vocab)
        .Int("num_parts", num_parts)
        .Int("num_candidates", width)
        .Int("flags", flags);
    this->Launch(call, "sample", {samples, 1, 1}, second);
  }
};

template <template <ElementType> class Operator>
void Add(std::vector<const OrtCustomOp*>* all) {
  static const Registration<Operator<kBfloat16>> bfloat16;
  static const Registration<Operator<kFloat16>> float16;
  static const Registration<Operator<kFloat32>> float32;
  all->insert(all->end(), {&bfloat16, &float16, &float32});
}

}  // namespace

std::vector<const OrtCustomOp*> CudaOperators() {
  std::vector<const OrtCustomOp*> all;
  Add<CudaEmbed>(&all);
  Add<CudaAddNorm>(&all);
  Add<CudaActivate>(&all);
  Add<CudaRotary>(&all);
  Add<CudaPackedAttention>(&all);
  Add<CudaPagedWrite>(&all);
  Add<CudaPagedAttention>(&all);
  Add<CudaPick>(&all);
  Add<CudaSample>(&all);
  return all;
}

}  // namespace antiphon
