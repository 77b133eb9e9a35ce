// Base of the nodes for GPUs: which kernels a node has, and its launches. A node sees the shapes of its inputs; their
// values are on the device, and service/antiphon/runtime/cuda/batch_check.py checks them before a step.
#pragma once

#include <array>
#include <initializer_list>
#include <string>
#include <vector>

#include "../../native/operator.h"
#include "kernel_library.h"

namespace antiphon {

inline int64_t CeilDiv(int64_t value, int64_t by) { return (value + by - 1) / by; }

// 1 for the first that is given, 2 for the second, 4 for the third, and so on.
inline int64_t Flags(std::initializer_list<bool> given) {
  int64_t flags = 0, bit = 1;
  for (const bool one : given) {
    if (one) flags |= bit;
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

// Returns the compiled width for heads of a width: HEAD_WIDTHS of kernel_list.py.
inline int64_t CompiledWidth(int64_t width) {
  constexpr std::array<int64_t, 5> kHeadWidths = {16, 32, 64, 128, 256};
  for (const int64_t compiled : kHeadWidths) {
    if (width > 0 && width <= compiled && width % kHeadWidths[0] == 0) return compiled;
  }
  Refuse("width of a head", width, "it must be a multiple of 16 up to 256");
}

template <ElementType T>
class CudaOperator {
 public:
  static constexpr const char* kProvider = "CUDAExecutionProvider";

 protected:
  // parameters: those of kernel_list.py with the letters of library_file.py, in the order of the values of a launch.
  struct Kernel {
    const char* name;
    const char* parameters;
  };

  // Throws CudaError unless the loaded library has these kernels with these parameters.
  explicit CudaOperator(std::initializer_list<Kernel> kernels) : library_(LoadedKernels()) {
    if (library_ == nullptr) throw OperatorError("no kernels for GPUs are loaded");
    for (const Kernel& kernel : kernels) library_->Require(Named(kernel.name), kernel.parameters);
  }

  // head_width: for kernels that are compiled for several, the width of this model's heads.
  void Launch(const Call& call, const char* kernel, const Grid& grid, std::initializer_list<Argument> arguments,
              int64_t head_width = 0) const {
    std::string variant = Named(kernel);
    if (head_width != 0) variant += "." + std::to_string(CompiledWidth(head_width));
    library_->Launch(variant, grid, arguments, call.GpuStream());
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
    return std::string(kernel) + "." + (T == kBfloat16 ? "bfloat16" : T == kFloat16 ? "float16" : "float32");
  }

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
