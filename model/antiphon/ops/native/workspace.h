// The counting allocators that ONNX Runtime's sessions and the kernels of this library allocate from.
//
// ONNX Runtime has one allocator in a process. The calling thread chooses which of our allocators it uses, so that each
// model's memory is counted and limited separately. A block goes back to the allocator that it is from.
#pragma once

#include <cstddef>
#include <utility>

#include "counting_allocator.h"

namespace antiphon {

// The process's own allocator.
CountingAllocator& ProcessWorkspace();

// The allocator of the calling thread: the one that it chose, or the process's own.
CountingAllocator& Workspace();

// Makes the calling thread use an allocator, nullptr for the process's own. Returns the previous one.
CountingAllocator* UseWorkspace(CountingAllocator* workspace) noexcept;

// Makes a thread of a pool use the allocator of the thread that it works for.
class WorkspaceOf {
 public:
  explicit WorkspaceOf(CountingAllocator& workspace) noexcept : previous_(UseWorkspace(&workspace)) {}
  WorkspaceOf(const WorkspaceOf&) = delete;
  WorkspaceOf& operator=(const WorkspaceOf&) = delete;
  ~WorkspaceOf() { UseWorkspace(previous_); }

 private:
  CountingAllocator* previous_;
};

// Working memory of a kernel for one call or one task. It is counted like every tensor of the graph, and not cleared.
// The constructor throws std::runtime_error when the workspace limit is exceeded.
template <typename T>
class Scratch {
 public:
  explicit Scratch(size_t count) : data_(static_cast<T*>(Workspace().Allocate(count * sizeof(T)))) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { CountingAllocator::Free(data_); }
  T* data() const { return data_; }
  T& operator[](size_t index) const { return data_[index]; }

 private:
  T* data_;
};

}  // namespace antiphon
