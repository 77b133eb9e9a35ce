// What the runs of one model use: an allocator that counts and limits memory, and threads.
//
// ONNX Runtime has one allocator in a process. The calling thread chooses the workspace that it uses, so that each
// model's memory is counted and limited separately. A block goes back to the allocator that it is from.
#pragma once

#include <cstddef>
#include <utility>

#include "counting_allocator.h"
#include "thread_pool.h"

namespace antiphon {

struct ModelWorkspace {
  // threads: of one run, the caller's included.
  explicit ModelWorkspace(size_t threads) : pool(threads - 1) {}
  CountingAllocator allocator;
  ThreadPool pool;
};

// The process's own allocator.
CountingAllocator& ProcessWorkspace();

// The allocator of the calling thread: that of the workspace that it chose, or the process's own.
CountingAllocator& Workspace();

// The workspace that the calling thread chose, or nullptr.
ModelWorkspace* ChosenWorkspace() noexcept;

// Makes the calling thread use a workspace, nullptr for the process's own allocator. Returns the previous one.
ModelWorkspace* UseWorkspace(ModelWorkspace* workspace) noexcept;

// Makes a thread of a pool use the workspace of the thread that it works for.
class WorkspaceOf {
 public:
  explicit WorkspaceOf(ModelWorkspace* workspace) noexcept : previous_(UseWorkspace(workspace)) {}
  WorkspaceOf(const WorkspaceOf&) = delete;
  WorkspaceOf& operator=(const WorkspaceOf&) = delete;
  ~WorkspaceOf() { UseWorkspace(previous_); }

 private:
  ModelWorkspace* previous_;
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
