// PagedWrite: a source's keys and values go into the blocks of the cache.
#include "operators.h"
#include "paged_rows.h"

namespace antiphon {

namespace {

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
  static const Registration<PagedWrite> write;
  return {&write};
}

}  // namespace antiphon
