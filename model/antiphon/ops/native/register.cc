// Entry points for ONNX Runtime and Python: registration with the environment, and a C interface to the counters.

#include <dlfcn.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../cuda/native/cuda_operators.h"
#include "../cuda/native/kernel_library.h"
#include "export.h"
#include "kernels.h"
#include "operators.h"
#include "ort_abi.h"
#include "workspace.h"

namespace antiphon {

namespace {

thread_local ModelWorkspace* t_workspace = nullptr;

}  // namespace

CountingAllocator& ProcessWorkspace() {
  // Never destroyed: the environment can free its last block after static destructors have run.
  static auto* workspace = new CountingAllocator;
  return *workspace;
}

CountingAllocator& Workspace() { return t_workspace != nullptr ? t_workspace->allocator : ProcessWorkspace(); }

ModelWorkspace* ChosenWorkspace() noexcept { return t_workspace; }

ModelWorkspace* UseWorkspace(ModelWorkspace* workspace) noexcept { return std::exchange(t_workspace, workspace); }

}  // namespace antiphon

namespace {

using antiphon::CountingAllocator;
using antiphon::ModelWorkspace;
using antiphon::Workspace;

// The allocator of the workspace that Python names, nullptr for the process's own.
CountingAllocator& Named(ModelWorkspace* workspace) {
  return workspace != nullptr ? workspace->allocator : antiphon::ProcessWorkspace();
}

OrtMemoryInfo* g_memory_info = nullptr;

void* Allocate(OrtAllocator*, size_t bytes) { return Workspace().Allocate(bytes); }

void Free(OrtAllocator*, void* block) { CountingAllocator::Free(block); }

const OrtMemoryInfo* Info(const OrtAllocator*) { return g_memory_info; }

OrtAllocator g_allocator{kOrtApiVersion, Allocate, Free, Info, Allocate};

// Keeps the code in memory: a session closes the library when it ends, but the environment keeps the allocator.
void KeepLoaded() {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&KeepLoaded), &self) != 0) {
    dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

OrtStatus* RegisterOnce(const OrtApi* api) {
  static std::mutex mutex;
  static bool registered = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (registered) return nullptr;
  KeepLoaded();
  OrtEnv* env = nullptr;  // the process has one; this reference is never released
  if (OrtStatus* failed = api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "antiphon", &env)) return failed;
  if (OrtStatus* failed = api->CreateCpuMemoryInfo(OrtDeviceAllocator, OrtMemTypeDefault, &g_memory_info)) {
    return failed;
  }
  if (OrtStatus* failed = api->RegisterAllocator(env, &g_allocator)) return failed;
  registered = true;
  return nullptr;
}

std::vector<const OrtCustomOp*> AllOperators() {
  std::vector<const OrtCustomOp*> all;
  for (const auto& family : {antiphon::RowOperators(), antiphon::AttentionOperators(), antiphon::SampleOperators(),
                             antiphon::SublayerOperators(),
                             antiphon::RecurrenceOperators()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  return all;
}

// Returns a line such as "Linear 1 1 1? -> 1": the name, the element type of every input with a question mark after an
// optional one, an arrow, the element type of every output. Types are numbers of ONNXTensorElementDataType.
std::string Signature(const OrtCustomOp* op) {
  std::string text = op->GetName(op);
  for (size_t index = 0; index < op->GetInputTypeCount(op); ++index) {
    text += " " + std::to_string(op->GetInputType(op, index));
    if (op->GetInputCharacteristic(op, index) == kOptional) text += "?";
  }
  text += " ->";
  for (size_t index = 0; index < op->GetOutputTypeCount(op); ++index) {
    text += " " + std::to_string(op->GetOutputType(op, index));
  }
  return text;
}

OrtStatus* NewDomain(const OrtApi* api, const std::vector<const OrtCustomOp*>& operators, OrtCustomOpDomain** out) {
  OrtCustomOpDomain* built = nullptr;
  if (OrtStatus* failed = api->CreateCustomOpDomain("antiphon", &built)) return failed;
  for (const OrtCustomOp* op : operators) {
    if (OrtStatus* failed = api->CustomOpDomain_Add(built, op)) return failed;
  }
  *out = built;
  return nullptr;
}

// One domain for the process: operators have no state of their own, sessions share them. Once kernels for GPUs are
// loaded there is another one, which has the operators of GPUs too.
OrtStatus* BuildDomain(const OrtApi* api, OrtCustomOpDomain** out) {
  static OrtCustomOpDomain* domains[2] = {nullptr, nullptr};
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const bool is_gpu = antiphon::LoadedKernels() != nullptr;
  OrtCustomOpDomain*& domain = domains[is_gpu ? 1 : 0];
  if (domain == nullptr) {
    std::vector<const OrtCustomOp*> operators = AllOperators();
    if (is_gpu) {
      const std::vector<const OrtCustomOp*> further = antiphon::CudaOperators();
      operators.insert(operators.end(), further.begin(), further.end());
    }
    if (OrtStatus* failed = NewDomain(api, operators, &domain)) return failed;
  }
  *out = domain;
  return nullptr;
}

OrtStatus* AddOperators(const OrtApi* api, OrtSessionOptions* options) {
  try {
    antiphon::ActiveKernels();  // refuses a wrong ANTIPHON_CPU here, not in the first run
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_FAIL, error.what());
  }
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* failed = BuildDomain(api, &domain)) return failed;
  return api->AddCustomOpDomain(options, domain);
}

}  // namespace

ANTIPHON_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (api == nullptr) {
    const std::string message = "this build of Antiphon's native library needs ONNX Runtime 1." +
                                std::to_string(kOrtApiVersion) + " or newer, not " + base->GetVersionString();
    const OrtApi* first = base->GetApi(1);
    return first == nullptr ? nullptr : first->CreateStatus(ORT_FAIL, message.c_str());
  }
  if (OrtStatus* failed = RegisterOnce(api)) return failed;
  return AddOperators(api, options);
}

// Raise it whenever operators, their packing or these functions change: model/antiphon/ops/workspace.py refuses a library with
// another number than its own.
ANTIPHON_EXPORT int antiphon_native_version() { return 10; }

// The signature of every operator, one per line; a test compares them with the declarations in model/antiphon/ops/operators.
ANTIPHON_EXPORT const char* antiphon_operators() {
  static const std::string* signatures = [] {
    auto* text = new std::string;
    for (const OrtCustomOp* op : AllOperators()) *text += Signature(op) + "\n";
    return text;
  }();
  return signatures->c_str();
}

// The kernels that this process runs (kernels.h); empty where ANTIPHON_CPU names some that it cannot run.
ANTIPHON_EXPORT const char* antiphon_kernels() {
  try {
    return antiphon::ActiveKernels().name;
  } catch (const std::exception&) {
    return "";
  }
}

// The table of these kernels, for the benchmark; null for an unknown name, or where the processor cannot run them.
ANTIPHON_EXPORT const antiphon::Kernels* antiphon_kernel_table(const char* name) { return antiphon::KernelsNamed(name); }

// Creates a workspace for the runs of one model, each on this number of threads. nullptr if a thread cannot start. Its
// allocator is never destroyed, since blocks can outlive its user; 4 KiB each.
ANTIPHON_EXPORT ModelWorkspace* antiphon_workspace_create(size_t threads) {
  try {
    return new ModelWorkspace(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Ends the use of a workspace, and its threads; blocks still in use go back to the operating system when they are freed.
ANTIPHON_EXPORT void antiphon_workspace_close(ModelWorkspace* workspace) {
  workspace->pool.Close();
  workspace->allocator.Close();
}

// Makes the calling thread use it; nullptr is the process's own allocator. Returns the previous workspace.
ANTIPHON_EXPORT ModelWorkspace* antiphon_workspace_use(ModelWorkspace* workspace) {
  return antiphon::UseWorkspace(workspace);
}

ANTIPHON_EXPORT void antiphon_workspace_stats(ModelWorkspace* workspace, antiphon::WorkspaceStats* out) {
  *out = Named(workspace).Stats();
}

// Returns the bytes in use.
ANTIPHON_EXPORT uint64_t antiphon_workspace_reset_peak(ModelWorkspace* workspace) { return Named(workspace).ResetPeak(); }

ANTIPHON_EXPORT uint64_t antiphon_workspace_peak(ModelWorkspace* workspace) { return Named(workspace).Stats().peak_bytes; }

ANTIPHON_EXPORT void antiphon_workspace_set_limit(ModelWorkspace* workspace, uint64_t bytes) {
  Named(workspace).SetLimit(bytes);
}

ANTIPHON_EXPORT void antiphon_workspace_trim(ModelWorkspace* workspace) { Named(workspace).Trim(); }
