// PackedAttention: the encoder's, over sequences that lie one after the other without padding.
//
// A call's offsets say which tokens belong together: those of sequence b are offsets[b] .. offsets[b + 1] - 1.
#include <cstring>

#include "operators.h"
#include "packing.h"
#include "workspace.h"

namespace antiphon {

namespace {

constexpr int32_t kGroup = 8 * kQueryTile;  // queries of a task: enough that copying keys and values for them pays

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
  // Queries `first` .. `first` + kGroup - 1 of some heads of one sequence: every head of a short one, or one head.
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

}  // namespace

std::vector<const OrtCustomOp*> PackedOperators() {
  static const Registration<PackedAttention> packed;
  return {&packed};
}

}  // namespace antiphon
