// Attention of every head over packed sequences, without padding: plain, or with scores of relative positions.
//
// The tokens of sequence b are offsets[b] .. offsets[b + 1] - 1.
#pragma once

#include <algorithm>
#include <cstring>

#include "operator.h"
#include "packing.h"
#include "workspace.h"

namespace antiphon {

inline constexpr int32_t kGroup = 8 * kQueryTile;  // queries of a task: then copying keys and values is worth its time

// Tables of relative positions, [P, H D] each, and the row of each distance query - key.
struct RelativeTables {
  const int32_t* rows = nullptr;
  int64_t reach = 0;
  const float* keys = nullptr;
  const float* queries = nullptr;
  int64_t width = 0;  // H D

  RelativeTables() = default;

  RelativeTables(const Tensor& distances, const Tensor& key, const Tensor& query, int64_t all_heads)
      : rows(distances.as<int32_t>()),
        reach(distances.dims[0] / 2),
        keys(key.as<float>()),
        queries(query.as<float>()),
        width(all_heads) {
    Require(distances.dims[0] % 2 == 1, "length of position_rows", distances.dims[0], "it must be odd");
    for (const auto& [name, table] : {std::pair{"position_keys", &key}, std::pair{"position_queries", &query}}) {
      if (*table) CheckTable(name, *table);
    }
  }

  bool exists() const { return rows != nullptr; }

  // Row of a distance, and number of rows that the distances from `low` to `high` span.
  int32_t RowOf(int64_t distance) const { return rows[std::clamp(distance, -reach, reach) + reach]; }
  int64_t Span(int64_t low, int64_t high) const { return int64_t{RowOf(high)} - RowOf(low) + 1; }

 private:
  void CheckTable(const char* name, const Tensor& table) const {
    Require(table.dims[1] == width, name, table.dims[1], "its width must be that of the queries");
    int32_t last = 0;
    for (int64_t index = 0; index < 2 * reach + 1; ++index) {
      Require(rows[index] >= last && rows[index] < table.dims[0], "position_rows", rows[index],
              "they must be rows of the tables and never fall");
      last = rows[index];
    }
  }
};

// softmax(scale (Q K^T + scores of relative positions) + bias) V of every sequence and head.
class PackedHeads {
 public:
  // qkv: [tokens of the packing, 3 H D].
  PackedHeads(const float* qkv, const Packing& packing, int64_t heads, int64_t width, float scale, float cap,
              bool causal)
      : qkv_(qkv), packing_(packing), heads_(heads), width_(width), scale_(scale), cap_(cap), causal_(causal) {}

  int64_t all_heads() const { return heads_ * width_; }

  // out: [tokens of the packing, H D]. biases can be null.
  void Attend(const Call& call, const Biases* biases, const RelativeTables& relative, float* out) const {
    int64_t num_tasks = 0;
    for (int64_t b = 0; b < packing_.sequences; ++b) {
      num_tasks += RoundUp(packing_.length(b), kGroup) / kGroup * (IsLong(packing_.length(b)) ? heads_ : 1);
    }
    const Scratch<Task> tasks(static_cast<size_t>(num_tasks));
    FillTasks(tasks.data());
    call.Parallel(static_cast<size_t>(num_tasks), [&](size_t index) { Run(tasks[index], biases, relative, out); });
  }

 private:
  // Queries `first` .. `first` + kGroup - 1 of some heads of one sequence: all heads of a short sequence, or one head
  // of a long one.
  struct Task {
    int32_t sequence;
    int32_t first;
    int32_t head;
    int32_t num_heads;
  };

  void Run(const Task& task, const Biases* biases, const RelativeTables& relative, float* out) const {
    const int64_t length = packing_.length(task.sequence);
    const int64_t end = std::min<int64_t>(task.first + kGroup, length);
    RelativeScores position_scores{};
    if (relative.exists()) position_scores = RelativeScoresOf(relative, task.first, end, length);
    const int64_t num_pairs = IsLong(length) ? 2 * length * width_ : 0, num_scores = length * kQueryTile;
    const int64_t num_tile = RoundUp(width_, kPanel) * kQueryTile, num_spread = width_ * position_scores.columns;
    const int64_t num_relative = relative.keys == nullptr ? 0 : relative.Span(1 - length, length - 1) * kQueryTile;
    const int64_t num_offsets = num_relative == 0 ? 0 : length + kQueryTile;  // int32_t, of the size of a float
    const Scratch<float> room(
        static_cast<size_t>(num_pairs + num_scores + num_tile + num_spread + num_relative + num_offsets));
    float* scores = room.data() + num_pairs;
    float* spread = scores + num_scores + num_tile;
    position_scores.scores = spread + num_spread;
    position_scores.offsets = reinterpret_cast<int32_t*>(position_scores.scores + num_relative);
    for (int32_t head = task.head; head < task.head + task.num_heads; ++head) {
      PackedHead view = Head(biases, out, task.sequence, head);
      if (num_pairs > 0) Gather(room.data(), &view);
      view.relative = position_scores;
      if (relative.keys != nullptr) view.relative.keys = relative.keys + head * width_;
      if (num_spread > 0) {
        ActiveKernels().spread_queries(view, relative.queries + head * width_, spread);
        view.relative.queries = spread;
      }
      for (int64_t first = task.first; first < end; first += kQueryTile) {
        ActiveKernels().packed_attention(view, first, scores, scores + num_scores);
      }
    }
  }

  // Distances of the queries first .. end - 1, in whole tiles, from the keys of their sequence.
  RelativeScores RelativeScoresOf(const RelativeTables& relative, int64_t first, int64_t end, int64_t length) const {
    RelativeScores position_scores{};
    position_scores.rows = relative.rows;
    position_scores.reach = relative.reach;
    position_scores.stride = relative.width;
    position_scores.lowest = first - (length - 1);
    const int64_t highest = first + RoundUp(end - first, kQueryTile) - 1;
    const int64_t distances = highest - position_scores.lowest + 1;
    // An odd multiple of 16: at a power of two the rows that are read together would share a few sets of the cache.
    position_scores.columns = relative.queries == nullptr ? 0 : RoundUp(distances, kQueryTile) | kQueryTile;
    return position_scores;
  }

  // Returns true where copying keys and values is faster: they are read once for each tile of queries.
  static bool IsLong(int64_t length) { return length > 3 * kQueryTile; }

  void FillTasks(Task* task) const {
    for (int32_t b = 0; b < packing_.sequences; ++b) {
      const int32_t heads_per_task = IsLong(packing_.length(b)) ? 1 : static_cast<int32_t>(heads_);
      for (int32_t head = 0; head < heads_; head += heads_per_task) {
        for (int32_t first = 0; first < packing_.length(b); first += kGroup) *task++ = {b, first, head, heads_per_task};
      }
    }
  }

  // Copies keys and values side by side: in qkv, rows of one head share a few sets of the first cache.
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

  PackedHead Head(const Biases* biases, float* out, int64_t sequence, int64_t head) const {
    const int64_t stride = 3 * all_heads();
    const float* query = qkv_ + packing_.begin(sequence) * stride + head * width_;
    PackedHead view{};
    view.query = query;
    view.key = query + all_heads();
    view.value = query + 2 * all_heads();
    view.out = out + packing_.begin(sequence) * all_heads() + head * width_;
    view.stride = view.kv_stride = stride;
    view.out_stride = all_heads();
    view.length = packing_.length(sequence);
    view.width = width_;
    view.scale = scale_;
    view.cap = cap_;
    view.causal = causal_;
    if (biases != nullptr) view.bias = biases->Of(head);
    return view;
  }

  const float* qkv_;
  Packing packing_;
  int64_t heads_;
  int64_t width_;
  float scale_;
  float cap_;
  bool causal_;
};

}  // namespace antiphon
