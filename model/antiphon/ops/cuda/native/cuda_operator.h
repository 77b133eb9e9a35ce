// Base of the nodes for GPUs: their inputs, refused sizes, outputs and launches. What nodes.py declares is in
// cuda_nodes.h, which node_header.py writes. A node sees the shapes of its inputs; their values are on the device, and
// service/antiphon/runtime/cuda/decoder.py checks them before a step.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <vector>

#include "../../native/operator.h"
#include "kernel_library.h"

namespace antiphon {

inline int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

// 1 for the first that is true, 2 for the second, 4 for the third, and so on.
inline int64_t Flags(std::initializer_list<bool> conditions) {
  int64_t flags = 0, bit = 1;
  for (const bool condition : conditions) {
    if (condition) flags |= bit;
    bit <<= 1;
  }
  return flags;
}

// Refuses a tensor whose axis has another size; a tensor that is left out is not refused.
inline void RequireSize(const char* name, const Tensor& tensor, size_t axis, int64_t expected) {
  if (!tensor || tensor.dims[axis] == expected) return;
  Refuse(std::string("axis ") + std::to_string(axis) + " of " + name, tensor.dims[axis],
         "it must be " + std::to_string(expected));
}

// A kernel of a node, and its parameters as words `name:kind`.
struct KernelSignature {
  const char* name;
  const char* parameters;
};

// Values of a launch, in the order of the kernel's parameters.
template <size_t kCount>
struct KernelCall {
  const char* kernel;
  std::array<Argument, kCount> arguments;
};

}  // namespace antiphon

// The nodes, which include this file for the names above.
#include "cuda_nodes.h"

namespace antiphon {

// Returns the compiled width for heads of a width.
inline int64_t CompiledWidth(int64_t width) {
  for (const int64_t compiled : kHeadWidths) {
    if (width > 0 && width <= compiled && width % kHeadWidths[0] == 0) return compiled;
  }
  Refuse("width of a head", width, "it must be a multiple of 16 up to 256");
}

// Base of a node that nodes.py declares: Node is a struct of cuda_nodes.h for one element type.
template <typename Node>
class CudaOperator {
 public:
  static constexpr const char* kProvider = "CUDAExecutionProvider";
  static constexpr const char* kName = Node::kName;
  static constexpr const auto& kInputs = Node::kInputs;
  static constexpr const auto& kOutputs = Node::kOutputs;

  // Throws CudaError unless the loaded library has the node's kernels with the declared parameters.
  explicit CudaOperator(const Attributes& attributes) : settings_(attributes), library_(LoadedKernels()) {
    if (library_ == nullptr) throw OperatorError("no kernels for GPUs are loaded");
    for (const KernelSignature& kernel : Node::kKernels) library_->Require(Named(kernel.name), kernel.parameters);
  }

 protected:
  using Inputs = typename Node::Inputs;

  // Throws OperatorError for inputs whose sizes differ from the declared axes.
  Inputs Read(const Call& call) const { return Inputs(call, settings_); }

  const typename Node::Settings& settings() const { return settings_; }

  // head_width: for kernels that are compiled for several, the width of this model's heads.
  template <size_t kCount>
  void Launch(const Call& call, const Grid& grid, const KernelCall<kCount>& values, int64_t head_width = 0) const {
    std::string variant = Named(values.kernel);
    if (head_width != 0) variant += "." + std::to_string(CompiledWidth(head_width));
    library_->Launch(variant, grid, values.arguments.data(), kCount, call.GpuStream());
  }

  // Returns the memory of an output, which kernels write even if nothing reads it.
  static void* Output(const Call& call, size_t index, std::initializer_list<int64_t> dims) {
    void* data = call.Output(index, dims);
    bool is_empty = false;
    for (const int64_t size : dims) is_empty = is_empty || size == 0;
    if (data == nullptr && !is_empty) throw OperatorError("output " + std::to_string(index) + " has no name");
    return data;
  }

  int multiprocessors() const { return library_->multiprocessors(); }

 private:
  static std::string Named(const char* kernel) {
    constexpr ElementType kElement = Node::kElement;
    return std::string(kernel) + (kElement == kBfloat16 ? ".bfloat16" : kElement == kFloat16 ? ".float16" : ".float32");
  }

  typename Node::Settings settings_;
  KernelLibrary* library_;
};

// Registrations of an operator for every element type.
template <template <ElementType> class Operator>
void AppendOperator(std::vector<const OrtCustomOp*>* all) {
  static const Registration<Operator<kBfloat16>> bfloat16;
  static const Registration<Operator<kFloat16>> float16;
  static const Registration<Operator<kFloat32>> float32;
  all->insert(all->end(), {&bfloat16, &float16, &float32});
}

}  // namespace antiphon
