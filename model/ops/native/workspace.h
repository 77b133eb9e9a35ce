// The process's counting allocator, shared by ONNX Runtime's sessions and by the kernels of this library.
#pragma once

#include <cstddef>
#include <utility>

#include "counting_allocator.h"

namespace antiphon {

CountingAllocator& Workspace();

// Memory a kernel works in for one call or one task; counted like every tensor of the run, and not cleared.
// Construction throws std::runtime_error when the workspace limit refuses.
template <typename T>
class Scratch {
 public:
  explicit Scratch(size_t count) : data_(static_cast<T*>(Workspace().Allocate(count * sizeof(T)))) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { Workspace().Free(data_); }
  T* data() const { return data_; }
  T& operator[](size_t index) const { return data_[index]; }

 private:
  T* data_;
};

}  // namespace antiphon
