// PagedSelfAttention and PagedCrossAttention (decoder), PagedWrite (a source's keys and values): attention over blocks.
//
// Caches are changed in place, so every value that could move a pointer out of the pool is checked before the first
// write.
#include <string>

#include "operators.h"
#include "packing.h"
#include "product.h"
#include "workspace.h"

namespace antiphon {

namespace {

constexpr double kAttentionMacsPerNs = 20.0;

std::string UpTo(int64_t last) { return "it must be 0 to " + std::to_string(last); }

// The cache pool of a call: [blocks, layers, 2, heads, 16 * padded head width].
struct Pool {
  void* data;
  bool is_half;
  int64_t blocks;
  int64_t block_elements;
  int64_t layer_offset;
  int64_t head_elements;
  int64_t heads;

  Pool(const Tensor& cache, int64_t layer, int64_t num_heads, int64_t width)
      : data(cache.data), is_half(cache.type == kFloat16), blocks(cache.dims[0]), heads(num_heads) {
    if (cache.type != kFloat32 && cache.type != kFloat16) throw OperatorError("cache must be float32 or float16");
    head_elements = kBlockSize * RoundUp(width, kPanel);
    Require(layer >= 0 && layer < cache.dims[1], "layer", layer, UpTo(cache.dims[1] - 1));
    Require(cache.dims[2] == 2, "dimension 2 of cache", cache.dims[2], "it must be 2");
    Require(cache.dims[3] == heads, "heads of cache", cache.dims[3], "it must be num_heads");
    Require(cache.dims[4] == head_elements, "width of cache", cache.dims[4],
            "it must be " + std::to_string(head_elements));
    block_elements = cache.dims[1] * 2 * heads * head_elements;
    layer_offset = layer * 2 * heads * head_elements;
  }
};

// Blocks of every row: pointers to this layer's part of each block that `lengths` positions need.
template <typename Element>
class Tables {
 public:
  // lengths(row): number of the row's positions that are read or written.
  template <typename Lengths>
  Tables(const Pool& pool, const Tensor& table, int64_t rows, const Lengths& lengths)
      : width_(table.dims[1]), pointers_(static_cast<size_t>(rows * table.dims[1])) {
    Require(table.dims[0] == rows, "rows of block_tables", table.dims[0], "it must be " + std::to_string(rows));
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t needed = RoundUp(lengths(row), kBlockSize) / kBlockSize;
      Require(needed <= width_, "width of block_tables", width_,
              std::to_string(lengths(row)) + " positions need " + std::to_string(needed));
      for (int64_t index = 0; index < needed; ++index) {
        const int32_t block = table.as<int32_t>()[row * width_ + index];
        Require(block >= 0 && block < pool.blocks, "block_tables", block, UpTo(pool.blocks - 1));
        pointers_[static_cast<size_t>(row * width_ + index)] =
            static_cast<Element*>(pool.data) + block * pool.block_elements + pool.layer_offset;
      }
    }
  }

  PagedHead<Element> Head(const Pool& pool, int64_t row, int64_t head, int64_t width, float scale) const {
    return {pointers_.data() + row * width_, head * pool.head_elements, pool.heads * pool.head_elements, width, scale};
  }

 private:
  int64_t width_;
  Scratch<Element*> pointers_;
};

const PagedKernels<float>& Paged(const Kernels& kernels, float) { return kernels.paged_float32; }
const PagedKernels<uint16_t>& Paged(const Kernels& kernels, uint16_t) { return kernels.paged_float16; }

// Calls body(row, head, scores) for every row and head. Where there are many rows, a task takes whole rows, since a
// block's heads are adjacent.
// scores: room for `positions` floats, one buffer for each task (one for each head would take the workspace's lock too
// often).
template <typename Body>
void ForHeads(const Call& call, int64_t rows, int64_t heads, double macs, int64_t positions, const Body& body) {
  if (rows == 0) return;
  const auto tasks = static_cast<int64_t>(TasksFor(macs / kAttentionMacsPerNs));
  const int64_t groups = rows >= tasks ? 1 : std::min(heads, (tasks + rows - 1) / rows);
  const int64_t share = (heads + groups - 1) / groups;  // heads of a task
  const int64_t items_per_task = std::max<int64_t>(1, rows * groups / tasks);
  const int64_t items = rows * groups;
  call.Parallel(static_cast<size_t>((items + items_per_task - 1) / items_per_task), [&](size_t task) {
    const Scratch<float> scores(static_cast<size_t>(RoundUp(positions, kBlockSize)));
    const int64_t begin = static_cast<int64_t>(task) * items_per_task;
    for (int64_t item = begin; item < std::min(begin + items_per_task, items); ++item) {
      const int64_t row = item / groups, first = item % groups * share;
      for (int64_t head = first; head < std::min(first + share, heads); ++head) body(row, head, scores.data());
    }
  });
}

// Appends the keys and values of new tokens to their row's cache, then attends over it: qkv [N, 3 H D] -> [N, H D]. A
// token at position p sees positions 0 .. p.
class PagedSelfAttention {
 public:
  static constexpr const char* kName = "PagedSelfAttention";
  static constexpr Port kInputs[] = {{kFloat32}, {kAnyElement}, {kInt32}, {kInt32},
                                     {kInt32},   {kFloat32, kOptional}, {kFloat32, kOptional}};
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
    const Packing packing = CheckedPacking(call.Input(3, "offsets", 1), qkv.dims[0]);
    const int32_t* positions = CheckedPositions(call.Input(4, "positions", 1), packing, qkv.dims[0]);
    const auto length = [&](int64_t row) -> int64_t {
      return packing.length(row) == 0 ? 0 : int64_t{positions[packing.offsets[row + 1] - 1]} + 1;
    };
    const Tables<Element> tables(pool, call.Input(2, "block_tables", 2), packing.sequences, length);
    const Biases biases(call, 5, 6, heads_);
    auto* out = static_cast<float*>(call.Output(0, {qkv.dims[0], heads_ * width}));
    double pairs = 0;  // of queries and keys
    int64_t longest = 0;
    for (int64_t row = 0; row < packing.sequences; ++row) {
      pairs += static_cast<double>(length(row) * packing.length(row));
      longest = std::max(longest, length(row));
    }
    const auto& kernels = Paged(ActiveKernels(), Element{});
    const double macs = 2 * pairs * static_cast<double>(heads_ * width);
    ForHeads(call, packing.sequences, heads_, macs, longest, [&](int64_t row, int64_t head, float* scores) {
      const PagedHead<Element> view = tables.Head(pool, row, head, width, scale_);
      const int64_t begin = packing.begin(row), end = begin + packing.length(row);
      const float* queries = qkv.as<float>() + head * width;
      for (int64_t token = begin; token < end; ++token) {
        const float* key = queries + token * qkv.dims[1] + heads_ * width;
        kernels.append(view, positions[token], key, key + heads_ * width);
      }
      for (int64_t token = begin; token < end; ++token) {
        const int64_t position = positions[token];
        kernels.attend(view, queries + token * qkv.dims[1], position + 1, position, biases.Of(head), scores,
                       out + (token * heads_ + head) * width);
      }
    });
  }

  static const int32_t* CheckedPositions(const Tensor& tensor, const Packing& packing, int64_t tokens) {
    Require(tensor.dims[0] == tokens, "length of positions", tensor.dims[0], "it must be the rows of qkv");
    const auto* positions = tensor.as<int32_t>();
    for (int64_t row = 0; row < packing.sequences; ++row) {
      for (int64_t token = packing.begin(row); token < packing.offsets[row + 1]; ++token) {
        const int64_t position = positions[token];
        Require(position >= 0, "positions", position, "it must be 0 or more");
        Require(token == packing.begin(row) || position == int64_t{positions[token - 1]} + 1, "positions", position,
                "within a row they must rise by 1");
      }
    }
    return positions;
  }

  int64_t heads_;
  float scale_;
  int64_t layer_;
};

// Attends from every token over the cached source of its row: query [N, H D] -> [N, H D].
class PagedCrossAttention {
 public:
  static constexpr const char* kName = "PagedCrossAttention";
  static constexpr Port kInputs[] = {{kFloat32}, {kAnyElement}, {kInt32}, {kInt32}, {kInt32}};
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
    const Packing packing = CheckedPacking(call.Input(3, "offsets", 1), query.dims[0]);
    const Tensor lens = call.Input(4, "source_lens", 1);
    Require(lens.dims[0] == packing.sequences, "length of source_lens", lens.dims[0],
            "it must be the number of rows, " + std::to_string(packing.sequences));
    const auto* source_lens = lens.as<int32_t>();
    double pairs = 0;  // of queries and keys
    int32_t longest = 0;
    for (int64_t row = 0; row < packing.sequences; ++row) {
      Require(source_lens[row] >= 1, "source_lens", source_lens[row], "it must be at least 1");
      pairs += static_cast<double>(source_lens[row] * packing.length(row));
      longest = std::max(longest, source_lens[row]);
    }
    const Tables<Element> tables(pool, call.Input(2, "block_tables", 2), packing.sequences,
                                 [&](int64_t row) { return static_cast<int64_t>(source_lens[row]); });
    auto* out = static_cast<float*>(call.Output(0, {query.dims[0], heads_ * width}));
    const auto& kernels = Paged(ActiveKernels(), Element{});
    const double macs = 2 * pairs * static_cast<double>(heads_ * width);
    ForHeads(call, packing.sequences, heads_, macs, longest, [&](int64_t row, int64_t head, float* scores) {
      const PagedHead<Element> view = tables.Head(pool, row, head, width, scale_);
      for (int64_t token = packing.begin(row); token < packing.offsets[row + 1]; ++token) {
        const int64_t at = (token * heads_ + head) * width;
        kernels.attend(view, query.as<float>() + at, source_lens[row], 0, {}, scores, out + at);
      }
    });
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
