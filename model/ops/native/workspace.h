// The counting allocators that ONNX Runtime's sessions and the kernels of this library allocate from.
//
// ONNX Runtime knows one allocator a process. Which of ours stands behind it is a matter of the calling thread, so that
// each model's memory is counted and bounded apart from the others'; a block goes back to the one it is from.
#pragma once

#include <cstddef>
#include <utility>

#include "counting_allocator.h"

namespace antiphon {

// The process's own.
CountingAllocator& ProcessWorkspace();

// The calling thread's: the one it uses, or the process's own.
CountingAllocator& Workspace();

// Makes the calling thread use an allocator, nullptr for the process's own. Returns what it used.
CountingAllocator* UseWorkspace(CountingAllocator* workspace) noexcept;

// Lends a thread of a pool the allocator of the thread that it works for.
class WorkspaceOf {
 public:
  explicit WorkspaceOf(CountingAllocator& workspace) noexcept : previous_(UseWorkspace(&workspace)) {}
  WorkspaceOf(const WorkspaceOf&) = delete;
  WorkspaceOf& operator=(const WorkspaceOf&) = delete;
  ~WorkspaceOf() { UseWorkspace(previous_); }

 private:
  CountingAllocator* previous_;
};

// Memory a kernel works in for one call or one task; counted like every tensor of the run, and not cleared.
// Construction throws std::runtime_error when the workspace limit refuses.
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
