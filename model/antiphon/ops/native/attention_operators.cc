// DisentangledAttention: attention of the encoder over packed sequences with relative positions.
#include "operators.h"
#include "packed_heads.h"

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
    PackedHeads(qkv.as<float>(), packing, heads_, width, scale_, false).Attend(call, nullptr, relative, out);
  }

 private:
  int64_t heads_;
  float scale_;
};

}  // namespace

std::vector<const OrtCustomOp*> PackedOperators() {
  static const Registration<DisentangledAttention> disentangled;
  return {&disentangled};
}

}  // namespace antiphon
