// PagedSelfAttention and PagedCrossAttention (decoder), PagedWrite (a source's keys and values): attention over blocks.
#include "operators.h"
#include "paged_rows.h"

namespace antiphon {

namespace {

// Appends the keys and values of new tokens to their row's cache, then attends over it: qkv [N, 3 H D] -> [N, H D].
class PagedSelfAttention {
 public:
  static constexpr const char* kName = "PagedSelfAttention";
  static constexpr auto kInputs = JoinPorts(std::array<Port, 1>{{{kFloat32}}}, kSelfRowsPorts);
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit PagedSelfAttention(const Attributes& attributes)
      : heads_(attributes.Size("num_heads")), scale_(attributes.Float("scale")), layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2);
    const int64_t width = HeadWidth("qkv", qkv.dims[1], 3, heads_);
    const Pool pool(call.Input(1, "cache", 5), layer_, heads_, width);
    pool.is_half ? Attend<uint16_t>(call, pool, qkv, width) : Attend<float>(call, pool, qkv, width);
  }

 private:
  template <typename Element>
  void Attend(const Call& call, const Pool& pool, const Tensor& qkv, int64_t width) const {
    const SelfRows<Element> rows(call, 1, pool, qkv.dims[0], width, scale_);
    auto* out = static_cast<float*>(call.Output(0, {qkv.dims[0], heads_ * width}));
    rows.Attend(call, qkv.as<float>(), out);
  }

  int64_t heads_;
  float scale_;
  int64_t layer_;
};

// Attends from every token over the cached source of its row: query [N, H D] -> [N, H D].
class PagedCrossAttention {
 public:
  static constexpr const char* kName = "PagedCrossAttention";
  static constexpr auto kInputs = JoinPorts(std::array<Port, 1>{{{kFloat32}}}, kCrossRowsPorts);
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit PagedCrossAttention(const Attributes& attributes)
      : heads_(attributes.Size("num_heads")), scale_(attributes.Float("scale")), layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    const Tensor query = call.Input(0, "query", 2);
    const int64_t width = HeadWidth("query", query.dims[1], 1, heads_);
    const Pool pool(call.Input(1, "cache", 5), layer_, heads_, width);
    pool.is_half ? Attend<uint16_t>(call, pool, query, width) : Attend<float>(call, pool, query, width);
  }

 private:
  template <typename Element>
  void Attend(const Call& call, const Pool& pool, const Tensor& query, int64_t width) const {
    const CrossRows<Element> rows(call, 1, pool, query.dims[0], width, scale_);
    auto* out = static_cast<float*>(call.Output(0, {query.dims[0], heads_ * width}));
    rows.Attend(call, query.as<float>(), out);
  }

  int64_t heads_;
  float scale_;
  int64_t layer_;
};

// Writes the keys and values of packed sequences into their blocks, beginning at position 0: kv [N, 2 H D] -> N.
class PagedWrite {
 public:
  static constexpr const char* kName = "PagedWrite";
  static constexpr Port kInputs[] = {{kFloat32}, {kAnyElement}, {kInt32}, {kInt32}, {kInt32, kOptional}};
  static constexpr Port kOutputs[] = {{kInt32}};

  explicit PagedWrite(const Attributes& attributes)
      : heads_(attributes.Size("num_heads")), layer_(attributes.Int("layer")) {}

  void Run(const Call& call) const {
    const Tensor kv = call.Input(0, "kv", 2);
    const int64_t width = HeadWidth("kv", kv.dims[1], 2, heads_);
    const Pool pool(call.Input(1, "cache", 5), layer_, heads_, width);
    pool.is_half ? Write<uint16_t>(call, pool, kv, width) : Write<float>(call, pool, kv, width);
    *static_cast<int32_t*>(call.Output(0, {1})) = static_cast<int32_t>(kv.dims[0]);
  }

 private:
  template <typename Element>
  void Write(const Call& call, const Pool& pool, const Tensor& kv, int64_t width) const {
    const Packing packing = CheckedPacking(call.Input(3, "offsets", 1), kv.dims[0]);
    const Tables<Element> tables(pool, call.Input(2, "block_tables", 2), packing.sequences,
                                 [&](int64_t sequence) { return packing.length(sequence); });
    const auto& kernels = Paged(ActiveKernels(), Element{});
    const double macs = static_cast<double>(kv.size()) * 4;  // cost of storing one number
    ForHeads(call, packing.sequences, heads_, macs, 0, [&](int64_t sequence, int64_t head, float*) {
      const PagedHead<Element> view = tables.Head(pool, sequence, head, width, 1.0f);
      for (int64_t first = 0; first < packing.length(sequence); first += kBlockSize) {
        const float* key = kv.as<float>() + (packing.begin(sequence) + first) * kv.dims[1] + head * width;
        const int64_t count = std::min(kBlockSize, packing.length(sequence) - first);
        kernels.fill(view, first / kBlockSize, count, key, key + heads_ * width, kv.dims[1]);
      }
    });
  }

  int64_t heads_, layer_;
};

}  // namespace

std::vector<const OrtCustomOp*> PagedOperators() {
  static const Registration<PagedSelfAttention> self_attention;
  static const Registration<PagedCrossAttention> cross_attention;
  static const Registration<PagedWrite> write;
  return {&self_attention, &cross_attention, &write};
}

}  // namespace antiphon
