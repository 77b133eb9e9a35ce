// Operators of attention outside of sublayers: DisentangledAttention of packed sequences, and PagedWrite, which stores a
// source's keys and values in the blocks of the cache.
#include "operators.h"
#include "packed_heads.h"
#include "paged_rows.h"

namespace antiphon {

namespace {

// softmax(scale (Q K^T + scores of relative positions)) V within each packed sequence (He et al. 2021, section 3.1):
// qkv [N, 3 H D] -> [N, H D].
class DisentangledAttention {
 public:
  static constexpr const char* kName = "DisentangledAttention";
  static constexpr Port kInputs[] = {{kFloat32}, {kInt32}, {kInt32}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit DisentangledAttention(const Attributes& attributes)
      : heads_(attributes.Size("num_heads")), scale_(attributes.Float("scale")) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2);
    const Packing packing = CheckedPacking(call.Input(1, "offsets", 1), qkv.dims[0]);
    const int64_t width = HeadWidth("qkv", qkv.dims[1], 3, heads_);
    const RelativeTables relative(call.Input(2, "position_rows", 1), call.OptionalInput(3, "position_keys", 2),
                                  call.OptionalInput(4, "position_queries", 2), heads_ * width);
    auto* out = static_cast<float*>(call.Output(0, {qkv.dims[0], heads_ * width}));
    PackedHeads(qkv.as<float>(), packing, heads_, width, scale_, 0.0f, false).Attend(call, nullptr, relative, out);
  }

 private:
  int64_t heads_;
  float scale_;
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
      const PagedHead<Element> view = tables.Head(pool, sequence, head, width, 1.0f, 0.0f);
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

std::vector<const OrtCustomOp*> AttentionOperators() {
  static const Registration<DisentangledAttention> disentangled;
  static const Registration<PagedWrite> write;
  return {&disentangled, &write};
}

}  // namespace antiphon
