// PackedAttention (encoder), PagedSelfAttention and PagedCrossAttention (decoder), PagedWrite (source keys and values).
//
// A call's offsets say which tokens belong together: those of sequence b are offsets[b] .. offsets[b + 1] - 1. Caches
// are changed in place, so everything that could lead a pointer out of the pool is checked before the first write.
#include <cstring>
#include <string>

#include "operators.h"
#include "product.h"
#include "workspace.h"

namespace antiphon {

namespace {

constexpr double kAttentionMacsPerNs = 20.0;
constexpr int32_t kGroup = 8 * kQueryTile;  // queries of a task: enough that copying keys and values for them pays

std::string UpTo(int64_t last) { return "it must be 0 to " + std::to_string(last); }

// Where each sequence's tokens lie. Throws unless offsets rise from 0 to `tokens`.
struct Packing {
  const int32_t* offsets;
  int64_t sequences;

  int64_t begin(int64_t sequence) const { return offsets[sequence]; }
  int64_t length(int64_t sequence) const { return int64_t{offsets[sequence + 1]} - offsets[sequence]; }
};

Packing CheckedPacking(const Tensor& offsets, int64_t tokens) {
  Require(offsets.dims[0] >= 1, "length of offsets", offsets.dims[0], "it must be at least 1");
  const Packing packing{offsets.as<int32_t>(), offsets.dims[0] - 1};
  Require(packing.offsets[0] == 0, "offsets[0]", packing.offsets[0], "it must be 0");
  for (int64_t sequence = 0; sequence < packing.sequences; ++sequence) {
    Require(packing.length(sequence) >= 0, "offsets", packing.offsets[sequence + 1], "they must not fall");
  }
  const int32_t last = packing.offsets[packing.sequences];
  Require(last == tokens, "the last of offsets", last, "it must be the number of tokens, " + std::to_string(tokens));
  return packing;
}

// Heads of equal width in a row of `parts` equal parts.
int64_t HeadWidth(const char* name, int64_t width, int64_t parts, int64_t heads) {
  const int64_t head = width / (parts * heads);
  Require(head > 0 && width == parts * heads * head, name, width,
          "its width must be a multiple of " + std::to_string(parts * heads));
  return head;
}

// The score bias of every head.
struct Biases {
  const float* table = nullptr;
  int64_t reach = 0;
  const float* slopes = nullptr;

  Biases(const Call& call, size_t table_index, size_t slopes_index, int64_t heads) {
    const Tensor bias = call.OptionalInput(table_index, "bias_table", 2);
    const Tensor slope = call.OptionalInput(slopes_index, "slopes", 1);
    if (bias) {
      Require(bias.dims[0] == heads, "rows of bias_table", bias.dims[0], "it must be num_heads");
      Require(bias.dims[1] % 2 == 1, "width of bias_table", bias.dims[1], "it must be odd");
    }
    if (slope) Require(slope.dims[0] == heads, "length of slopes", slope.dims[0], "it must be num_heads");
    table = bias.as<float>();
    reach = bias ? bias.dims[1] / 2 : 0;
    slopes = slope.as<float>();
  }

  ScoreBias Of(int64_t head) const {
    return {table == nullptr ? nullptr : table + head * (2 * reach + 1), reach, slopes == nullptr ? 0.0f : slopes[head]};
  }
};

// softmax(scale Q K^T + bias) V within each packed sequence: qkv [N, 3 H D] -> [N, H D].
class PackedAttention {
 public:
  static constexpr const char* kName = "PackedAttention";
  static constexpr Port kInputs[] = {{kFloat32}, {kInt32}, {kFloat32, kOptional}, {kFloat32, kOptional}};
  static constexpr Port kOutputs[] = {{kFloat32}};

  explicit PackedAttention(const Attributes& attributes)
      : heads_(attributes.Size("num_heads")),
        scale_(attributes.Float("scale")),
        causal_(attributes.Int("causal") != 0) {}

  void Run(const Call& call) const {
    const Tensor qkv = call.Input(0, "qkv", 2);
    const Packing packing = CheckedPacking(call.Input(1, "offsets", 1), qkv.dims[0]);
    const int64_t width = HeadWidth("qkv", qkv.dims[1], 3, heads_);
    const Biases biases(call, 2, 3, heads_);
    auto* out = static_cast<float*>(call.Output(0, {qkv.dims[0], heads_ * width}));
    Attend(call, packing, qkv.as<float>(), width, biases, out);
  }

 private:
  // Queries `first` .. `first` + kGroup - 1 of some heads of one sequence: every head of a short one, one of a long one.
  struct Task {
    int32_t sequence;
    int32_t first;
    int32_t head;
    int32_t num_heads;
  };

  void Attend(const Call& call, const Packing& packing, const float* qkv, int64_t width, const Biases& biases,
              float* out) const {
    int64_t num_tasks = 0;
    for (int64_t b = 0; b < packing.sequences; ++b) {
      num_tasks += RoundUp(packing.length(b), kGroup) / kGroup * (IsLong(packing.length(b)) ? heads_ : 1);
    }
    const Scratch<Task> tasks(static_cast<size_t>(num_tasks));
    FillTasks(packing, tasks.data());
    call.Parallel(static_cast<size_t>(num_tasks), [&](size_t index) {
      const Task task = tasks[index];
      const int64_t length = packing.length(task.sequence);
      const int64_t num_pairs = IsLong(length) ? 2 * length * width : 0, num_scores = length * kQueryTile;
      const Scratch<float> room(static_cast<size_t>(num_pairs + num_scores + RoundUp(width, kPanel) * kQueryTile));
      float* scores = room.data() + num_pairs;
      for (int32_t head = task.head; head < task.head + task.num_heads; ++head) {
        PackedHead view = Head(packing, qkv, width, biases, out, task.sequence, head);
        if (num_pairs > 0) Gather(room.data(), &view);
        const int64_t end = std::min<int64_t>(task.first + kGroup, length);
        for (int64_t first = task.first; first < end; first += kQueryTile) {
          ActiveKernels().packed_attention(view, first, scores, scores + num_scores);
        }
      }
    });
  }

  // Whether copying keys and values pays: they are read once for each tile of queries.
  static bool IsLong(int64_t length) { return length > 3 * kQueryTile; }

  void FillTasks(const Packing& packing, Task* task) const {
    for (int32_t b = 0; b < packing.sequences; ++b) {
      const int32_t together = IsLong(packing.length(b)) ? 1 : static_cast<int32_t>(heads_);
      for (int32_t head = 0; head < heads_; head += together) {
        for (int32_t first = 0; first < packing.length(b); first += kGroup) *task++ = {b, first, head, together};
      }
    }
  }

  // Copies keys and values side by side: where they come from, rows of one head share a few sets of the first cache.
  static void Gather(float* pairs, PackedHead* view) {
    const auto bytes = static_cast<size_t>(view->width) * sizeof(float);
    float* values = pairs + view->length * view->width;
    for (int64_t t = 0; t < view->length; ++t) {
      std::memcpy(pairs + t * view->width, view->key + t * view->stride, bytes);
      std::memcpy(values + t * view->width, view->value + t * view->stride, bytes);
    }
    view->key = pairs;
    view->value = values;
    view->kv_stride = view->width;
  }

  PackedHead Head(const Packing& packing, const float* qkv, int64_t width, const Biases& biases, float* out,
                  int64_t sequence, int64_t head) const {
    const int64_t stride = 3 * heads_ * width;
    const float* query = qkv + packing.begin(sequence) * stride + head * width;
    PackedHead view{};
    view.query = query;
    view.key = query + heads_ * width;
    view.value = query + 2 * heads_ * width;
    view.out = out + packing.begin(sequence) * heads_ * width + head * width;
    view.stride = view.kv_stride = stride;
    view.out_stride = heads_ * width;
    view.length = packing.length(sequence);
    view.width = width;
    view.scale = scale_;
    view.causal = causal_;
    view.bias = biases.Of(head);
    return view;
  }

  int64_t heads_;
  float scale_;
  bool causal_;
};

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

// The blocks of every row: pointers to this layer's part, as many as `lengths` positions need.
template <typename Element>
class Tables {
 public:
  // lengths(row): positions of the row that may be read or written.
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

// Calls body(row, head, scores) for all of them: whole rows where there are many, since a block's heads lie together.
// scores: room for `positions` floats, one task's own (the workspace's lock is too dear for every head).
template <typename Body>
void ForHeads(const Call& call, int64_t rows, int64_t heads, double macs, int64_t positions, const Body& body) {
  if (rows == 0) return;
  const auto tasks = static_cast<int64_t>(TasksFor(macs / kAttentionMacsPerNs));
  const int64_t groups = rows >= tasks ? 1 : std::min(heads, (tasks + rows - 1) / rows);
  const int64_t share = (heads + groups - 1) / groups;  // heads of a task
  const int64_t together = std::max<int64_t>(1, rows * groups / tasks);
  const int64_t items = rows * groups;
  call.Parallel(static_cast<size_t>((items + together - 1) / together), [&](size_t task) {
    const Scratch<float> scores(static_cast<size_t>(RoundUp(positions, kBlockSize)));
    const int64_t begin = static_cast<int64_t>(task) * together;
    for (int64_t item = begin; item < std::min(begin + together, items); ++item) {
      const int64_t row = item / groups, first = item % groups * share;
      for (int64_t head = first; head < std::min(first + share, heads); ++head) body(row, head, scores.data());
    }
  });
}

// Attention of new tokens over their row's cache, their own keys and values appended first: qkv [N, 3 H D] -> [N, H D].
// A token at position p sees positions 0 .. p.
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
        kernels.attend(view, queries + token * qkv.dims[1], int64_t{positions[token]} + 1, positions[token], biases.Of(head),
                       scores, out + (token * heads_ + head) * width);
      }
    });
  }

  static const int32_t* CheckedPositions(const Tensor& tensor, const Packing& packing, int64_t tokens) {
    Require(tensor.dims[0] == tokens, "length of positions", tensor.dims[0], "it must be the rows of qkv");
    const auto* positions = tensor.as<int32_t>();
    for (int64_t row = 0; row < packing.sequences; ++row) {
      for (int64_t token = packing.begin(row); token < packing.offsets[row + 1]; ++token) {
        Require(positions[token] >= 0, "positions", positions[token], "it must be 0 or more");
        Require(token == packing.begin(row) || int64_t{positions[token]} == int64_t{positions[token - 1]} + 1, "positions",
                positions[token], "within a row they must rise by 1");
      }
    }
    return positions;
  }

  int64_t heads_;
  float scale_;
  int64_t layer_;
};

// Attention of every token over the source its row has cached: query [N, H D] -> [N, H D].
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

// Writes the keys and values of packed sequences into their blocks from position 0 on: kv [N, 2 H D] -> N.
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
    const double macs = static_cast<double>(kv.size()) * 4;  // what storing one number costs
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

std::vector<const OrtCustomOp*> AttentionOperators() {
  static const Registration<PackedAttention> packed;
  static const Registration<PagedSelfAttention> self_attention;
  static const Registration<PagedCrossAttention> cross_attention;
  static const Registration<PagedWrite> write;
  return {&packed, &self_attention, &cross_attention, &write};
}

}  // namespace antiphon
