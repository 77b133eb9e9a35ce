// Rows of a decoder over the blocks of a cache pool: their self attention, their cross attention, and the pool itself.
//
// Caches are changed in place, so every value that could move a pointer out of the pool is checked before the first
// write.
#pragma once

#include <algorithm>
#include <string>

#include "operator.h"
#include "packing.h"
#include "product.h"
#include "rotation.h"
#include "workspace.h"

namespace antiphon {

inline constexpr double kAttentionMacsPerNs = 20.0;

inline std::string UpTo(int64_t last) { return "it must be 0 to " + std::to_string(last); }

// The cache pool of a call: [blocks, layers, 2, cache_heads, 16 * padded head width]. A layer with fewer heads uses the
// first ones of the pool.
struct Pool {
  void* data;
  bool is_half;
  int64_t blocks;
  int64_t block_elements;
  int64_t layer_offset;
  int64_t head_elements;
  int64_t heads;
  int64_t cache_heads;

  Pool(const Tensor& cache, int64_t layer, int64_t num_heads, int64_t width)
      : data(cache.data),
        is_half(cache.type == kFloat16),
        blocks(cache.dims[0]),
        heads(num_heads),
        cache_heads(cache.dims[3]) {
    if (cache.type != kFloat32 && cache.type != kFloat16) throw OperatorError("cache must be float32 or float16");
    head_elements = kBlockSize * RoundUp(width, kPanel);
    Require(layer >= 0 && layer < cache.dims[1], "layer", layer, [&] { return UpTo(cache.dims[1] - 1); });
    Require(cache.dims[2] == 2, "dimension 2 of cache", cache.dims[2], "it must be 2");
    Require(cache_heads >= heads, "heads of cache", cache_heads, "it must be at least num_heads");
    Require(cache.dims[4] == head_elements, "width of cache", cache.dims[4],
            [&] { return "it must be " + std::to_string(head_elements); });
    block_elements = cache.dims[1] * 2 * cache_heads * head_elements;
    layer_offset = layer * 2 * cache_heads * head_elements;
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
    Require(table.dims[0] == rows, "rows of block_tables", table.dims[0],
            [&] { return "it must be " + std::to_string(rows); });
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t needed = RoundUp(lengths(row), kBlockSize) / kBlockSize;
      Require(needed <= width_, "width of block_tables", width_,
              [&] { return std::to_string(lengths(row)) + " positions need " + std::to_string(needed); });
      for (int64_t index = 0; index < needed; ++index) {
        const int32_t block = table.as<int32_t>()[row * width_ + index];
        Require(block >= 0 && block < pool.blocks, "block_tables", block, [&] { return UpTo(pool.blocks - 1); });
        pointers_[static_cast<size_t>(row * width_ + index)] =
            static_cast<Element*>(pool.data) + block * pool.block_elements + pool.layer_offset;
      }
    }
  }

  PagedHead<Element> Head(const Pool& pool, int64_t row, int64_t head, int64_t width, float scale, float cap) const {
    const int64_t values_offset = pool.cache_heads * pool.head_elements;
    return {pointers_.data() + row * width_, head * pool.head_elements, values_offset, width, scale, cap};
  }

 private:
  int64_t width_;
  Scratch<Element*> pointers_;
};

inline const PagedKernels<float>& Paged(const Kernels& kernels, float) { return kernels.paged_float32; }
inline const PagedKernels<uint16_t>& Paged(const Kernels& kernels, uint16_t) { return kernels.paged_float16; }

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

// Positions of packed tokens, which rise by 1 within a row.
inline const int32_t* CheckedPositions(const Tensor& tensor, const Packing& packing, int64_t tokens) {
  Require(tensor.dims[0] == tokens, "length of positions", tensor.dims[0], "it must be the number of tokens");
  const auto* positions = tensor.as<int32_t>();
  for (int64_t row = 0; row < packing.sequences; ++row) {
    for (int64_t token = packing.begin(row); token < packing.end(row); ++token) {
      const int64_t position = positions[token];
      Require(position >= 0, "positions", position, "it must be 0 or more");
      Require(token == packing.begin(row) || position == int64_t{positions[token - 1]} + 1, "positions", position,
              "within a row they must rise by 1");
    }
  }
  return positions;
}

// Inputs of a node with paged self attention, in this order: cache, block_tables, offsets, positions, bias_table,
// slopes, rotary_table.
inline constexpr std::array<Port, 7> kSelfRowsPorts = {{{kAnyElement},
                                                        {kInt32},
                                                        {kInt32},
                                                        {kInt32},
                                                        {kFloat32, kOptional},
                                                        {kFloat32, kOptional},
                                                        {kFloat32, kOptional}}};

// Rows whose new tokens are appended to their caches before they attend. A token at position p sees positions 0 .. p.
template <typename Element>
class SelfRows {
 public:
  // first: index of the node's input `cache`. width: D.
  SelfRows(const Call& call, size_t first, const Pool& pool, int64_t tokens, int64_t width, float scale, float cap)
      : pool_(pool),
        width_(width),
        scale_(scale),
        cap_(cap),
        packing_(CheckedPacking(call.Input(first + 2, "offsets", 1), tokens)),
        positions_(CheckedPositions(call.Input(first + 3, "positions", 1), packing_, tokens)),
        tables_(pool, call.Input(first + 1, "block_tables", 2), packing_.sequences,
                [this](int64_t row) { return Length(row); }),
        biases_(call, first + 4, first + 5, pool.heads),
        rotation_(call, first + 3, first + 6, tokens, width) {}

  // qkv: [tokens, 3 H D], which is rotated in place where there is a table; out: [tokens, H D].
  void Attend(const Call& call, float* qkv, float* out) const {
    rotation_.Run(call, pool_.heads, qkv);
    double pairs = 0;  // of queries and keys
    int64_t longest = 0;
    for (int64_t row = 0; row < packing_.sequences; ++row) {
      pairs += static_cast<double>(Length(row) * packing_.length(row));
      longest = std::max(longest, Length(row));
    }
    const auto& kernels = Paged(ActiveKernels(), Element{});
    const int64_t heads = pool_.heads, stride = 3 * heads * width_;
    const double macs = 2 * pairs * static_cast<double>(heads * width_);
    ForHeads(call, packing_.sequences, heads, macs, longest, [&](int64_t row, int64_t head, float* scores) {
      const PagedHead<Element> view = tables_.Head(pool_, row, head, width_, scale_, cap_);
      const float* queries = qkv + head * width_;
      for (int64_t token = packing_.begin(row); token < packing_.end(row); ++token) {
        const float* key = queries + token * stride + heads * width_;
        kernels.append(view, positions_[token], key, key + heads * width_);
      }
      for (int64_t token = packing_.begin(row); token < packing_.end(row); ++token) {
        const int64_t position = positions_[token];
        kernels.attend(view, queries + token * stride, position + 1, position, biases_.Of(head), scores,
                       out + (token * heads + head) * width_);
      }
    });
  }

 private:
  // Number of positions of a row after its new tokens.
  int64_t Length(int64_t row) const {
    return packing_.length(row) == 0 ? 0 : int64_t{positions_[packing_.end(row) - 1]} + 1;
  }

  Pool pool_;
  int64_t width_;
  float scale_;
  float cap_;
  Packing packing_;
  const int32_t* positions_;
  Tables<Element> tables_;
  Biases biases_;
  Rotation rotation_;
};

// Inputs of a node with paged cross attention, in this order: cache, block_tables, offsets, source_lens.
inline constexpr std::array<Port, 4> kCrossRowsPorts = {{{kAnyElement}, {kInt32}, {kInt32}, {kInt32}}};

// Rows that attend from every new token over their cached source.
template <typename Element>
class CrossRows {
 public:
  // first: index of the node's input `cache`. width: D.
  CrossRows(const Call& call, size_t first, const Pool& pool, int64_t tokens, int64_t width, float scale, float cap)
      : pool_(pool),
        width_(width),
        scale_(scale),
        cap_(cap),
        packing_(CheckedPacking(call.Input(first + 2, "offsets", 1), tokens)),
        source_lens_(CheckedLens(call.Input(first + 3, "source_lens", 1), packing_)),
        tables_(pool, call.Input(first + 1, "block_tables", 2), packing_.sequences,
                [this](int64_t row) { return int64_t{source_lens_[row]}; }) {}

  // query and out: [tokens, H D].
  void Attend(const Call& call, const float* query, float* out) const {
    double pairs = 0;  // of queries and keys
    int32_t longest = 0;
    for (int64_t row = 0; row < packing_.sequences; ++row) {
      pairs += static_cast<double>(source_lens_[row] * packing_.length(row));
      longest = std::max(longest, source_lens_[row]);
    }
    const auto& kernels = Paged(ActiveKernels(), Element{});
    const int64_t heads = pool_.heads;
    const double macs = 2 * pairs * static_cast<double>(heads * width_);
    ForHeads(call, packing_.sequences, heads, macs, longest, [&](int64_t row, int64_t head, float* scores) {
      const PagedHead<Element> view = tables_.Head(pool_, row, head, width_, scale_, cap_);
      for (int64_t token = packing_.begin(row); token < packing_.end(row); ++token) {
        const int64_t at = (token * heads + head) * width_;
        kernels.attend(view, query + at, source_lens_[row], 0, {}, scores, out + at);
      }
    });
  }

 private:
  static const int32_t* CheckedLens(const Tensor& tensor, const Packing& packing) {
    Require(tensor.dims[0] == packing.sequences, "length of source_lens", tensor.dims[0],
            [&] { return "it must be the number of rows, " + std::to_string(packing.sequences); });
    const auto* lens = tensor.as<int32_t>();
    for (int64_t row = 0; row < packing.sequences; ++row) {
      Require(lens[row] >= 1, "source_lens", lens[row], "it must be at least 1");
    }
    return lens;
  }

  Pool pool_;
  int64_t width_;
  float scale_;
  float cap_;
  Packing packing_;
  const int32_t* source_lens_;
  Tables<Element> tables_;
};

}  // namespace antiphon
