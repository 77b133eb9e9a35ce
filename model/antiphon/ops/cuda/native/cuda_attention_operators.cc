// Nodes of attention: within packed sequences, and over the blocks of a cache [num_blocks, L, 2, H, 16, D].
#include <algorithm>

#include "cuda_operator.h"
#include "cuda_operators.h"

namespace antiphon {

namespace {

constexpr int64_t kBlockSize = 16;
constexpr int64_t kMaxSplits = 8;

// The axes of a cache that a node uses. Throws OperatorError for another layout.
struct CacheAxes {
  CacheAxes(const Tensor& cache, int64_t num_heads, int64_t layer) : num_layers(cache.dims[1]), width(cache.dims[5]) {
    RequireSize("cache", cache, 2, 2);
    RequireSize("cache", cache, 3, num_heads);
    RequireSize("cache", cache, 4, kBlockSize);
    CompiledWidth(width);
    Require(layer >= 0 && layer < num_layers, "layer", layer, "the cache has no such layer");
  }

  int64_t num_layers, width;
};

int64_t Reach(const Tensor& bias_table) { return bias_table ? bias_table.dims[1] / 2 : 0; }

template <ElementType T>
class CudaPackedAttention : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPackedAttention";
  static constexpr Port kInputs[] = {{T},      {T, kOptional},        {kInt32},
                                     {kInt32}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{T}};

  explicit CudaPackedAttention(const Attributes& attributes)
      : CudaOperator<T>({{"packed_attention",
                          "out:p qkv:p bias:p offsets:p tiles:p bias_table:p slopes:p num_heads:i width:a reach:i"
                          " scale:f flags:i"}}),
        num_heads_(attributes.Size("num_heads")),
        scale_(attributes.Float("scale")),
        is_causal_(attributes.Int("causal") != 0) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor offsets = call.Input(2, "offsets", 1), tiles = call.Input(3, "tiles", 2);
    const Tensor table = call.OptionalInput(4, "bias_table", 2), slopes = call.OptionalInput(5, "slopes", 1);
    const int64_t tokens = qkv.dims[0], width = qkv.dims[1] / (3 * num_heads_);
    RequireSize("qkv", qkv, 1, 3 * num_heads_ * width);
    CompiledWidth(width);
    RequireSize("bias", bias, 0, qkv.dims[1]);
    RequireSize("tiles", tiles, 1, 2);
    RequireSize("bias_table", table, 0, num_heads_);
    RequireSize("slopes", slopes, 0, num_heads_);
    void* out = this->Output(call, 0, {tokens, num_heads_ * width});
    const int64_t flags = Flags({bool(bias), bool(table), bool(slopes), is_causal_});
    this->Launch(call, "packed_attention", {tiles.dims[0], num_heads_, 1},
                 {out, qkv.data, bias.data, offsets.data, tiles.data, table.data, slopes.data, num_heads_, width,
                  Reach(table), scale_, flags},
                 width);
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
      : CudaOperator<T>({{"paged_write",
                          "written:p cache:p kv:p bias:p tables:p rows:p positions:p parts:i table_width:i num_heads:i"
                          " width:a num_layers:i layer:i flags:i"}}),
        num_heads_(attributes.Size("num_heads")),
        layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    const Tensor kv = call.Input(0, "kv", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor cache = call.Input(2, "cache", 6), tables = call.Input(3, "tables", 2);
    const Tensor rows = call.Input(4, "rows", 1), positions = call.Input(5, "positions", 1);
    const CacheAxes axes(cache, num_heads_, layer_);
    const int64_t tokens = kv.dims[0], parts = kv.dims[1] / (num_heads_ * axes.width) == 3 ? 3 : 2;
    RequireSize("kv", kv, 1, parts * num_heads_ * axes.width);
    RequireSize("bias", bias, 0, kv.dims[1]);
    RequireSize("rows", rows, 0, tokens);
    RequireSize("positions", positions, 0, tokens);
    void* written = this->Output(call, 0, {1});
    this->Launch(call, "paged_write", {tokens, num_heads_, 1},
                 {written, cache.data, kv.data, bias.data, tables.data, rows.data, positions.data, parts,
                  tables.dims[1], num_heads_, axes.width, axes.num_layers, layer_, Flags({bool(bias)})});
  }

 private:
  int64_t num_heads_, layer_;
};

template <ElementType T>
class CudaPagedAttention : public CudaOperator<T> {
 public:
  static constexpr const char* kName = "CudaPagedAttention";
  static constexpr Port kInputs[] = {
      {T},      {T, kOptional},      {T},                   {kInt32},             {kInt32},
      {kInt32}, {kInt32, kOptional}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{T}, {kFloat32}};

  explicit CudaPagedAttention(const Attributes& attributes)
      : CudaOperator<T>({{"paged_attention",
                          "out:p sums:p query:p bias:p cache:p tables:p rows:p lengths:p bias_table:p slopes:p"
                          " table_width:i query_stride:a num_heads:i width:a num_layers:i layer:i reach:i num_splits:i"
                          " scale:f flags:i"},
                         {"merge_splits", "out:p sums:p num_heads:i width:a num_splits:i"}}),
        num_heads_(attributes.Size("num_heads")),
        layer_(attributes.Int("layer")),
        scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Tensor query = call.Input(0, "query", 2), bias = call.OptionalInput(1, "bias", 1);
    const Tensor cache = call.Input(2, "cache", 6), tables = call.Input(3, "tables", 2);
    const Tensor rows = call.Input(4, "rows", 1), lengths = call.Input(5, "lengths", 1);
    const Tensor table = call.OptionalInput(7, "bias_table", 2), slopes = call.OptionalInput(8, "slopes", 1);
    const CacheAxes axes(cache, num_heads_, layer_);
    const int64_t tokens = query.dims[0], states = num_heads_ * axes.width;
    const int64_t splits = Splits(tokens, tables.dims[1]);
    Require(query.dims[1] >= states, "axis 1 of query", query.dims[1], "it holds less than the queries");
    Require(!bias || bias.dims[0] >= states, "axis 0 of bias", bias.dims[0], "it holds less than the queries");
    RequireSize("rows", rows, 0, tokens);
    RequireSize("lengths", lengths, 0, tokens);
    RequireSize("bias_table", table, 0, num_heads_);
    RequireSize("slopes", slopes, 0, num_heads_);
    void* out = this->Output(call, 0, {tokens, states});
    void* sums = this->Output(call, 1, {splits > 1 ? tokens : 1, num_heads_, splits, axes.width + 2});
    this->Launch(call, "paged_attention", {tokens, num_heads_, splits},
                 {out, sums, query.data, bias.data, cache.data, tables.data, rows.data, lengths.data, table.data,
                  slopes.data, tables.dims[1], query.dims[1], num_heads_, axes.width, axes.num_layers, layer_,
                  Reach(table), splits, scale_, Flags({bool(bias), bool(table), bool(slopes)})},
                 axes.width);
    if (splits == 1) return;
    this->Launch(call, "merge_splits", {tokens, num_heads_, 1}, {out, sums, num_heads_, axes.width, splits},
                 axes.width);
  }

 private:
  // Few tokens leave multiprocessors idle: then several programs share the positions of one, two blocks each at least.
  int64_t Splits(int64_t tokens, int64_t table_width) const {
    const int64_t wanted = 2 * this->multiprocessors(), programs = std::max<int64_t>(tokens * num_heads_, 1);
    return std::clamp<int64_t>(CeilDiv(wanted, programs), 1, std::clamp<int64_t>(table_width / 2, 1, kMaxSplits));
  }

  int64_t num_heads_, layer_;
  float scale_;
};

}  // namespace

std::vector<const OrtCustomOp*> CudaAttentionOperators() {
  std::vector<const OrtCustomOp*> all;
  AppendOperator<CudaPackedAttention>(&all);
  AppendOperator<CudaPagedWrite>(&all);
  AppendOperator<CudaPagedAttention>(&all);
  return all;
}

}  // namespace antiphon
