// What ONNX Runtime and Python call: registration with the environment, and the counters through a C interface.

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <string>

#include "kernels.h"
#include "operators.h"
#include "ort_abi.h"
#include "workspace.h"

#define ANTIPHON_EXPORT extern "C" __attribute__((visibility("default")))

namespace antiphon {

CountingAllocator& Workspace() {
  // Never destroyed: the environment may free its last block after static destructors have run.
  static auto* workspace = new CountingAllocator;
  return *workspace;
}

}  // namespace antiphon

namespace {

using antiphon::Workspace;

OrtMemoryInfo* g_memory_info = nullptr;

void* Allocate(OrtAllocator*, size_t bytes) { return Workspace().Allocate(bytes); }

void Free(OrtAllocator*, void* block) { Workspace().Free(block); }

const OrtMemoryInfo* Info(const OrtAllocator*) { return g_memory_info; }

OrtAllocator g_allocator{kOrtApiVersion, Allocate, Free, Info, Allocate};

// A session closes the library when it ends, but the environment keeps the allocator: hold the code in memory.
void StayLoaded() {
  Dl_info self;
  if (dladdr(reinterpret_cast<void*>(&StayLoaded), &self) != 0) {
    dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

OrtStatus* RegisterOnce(const OrtApi* api) {
  static std::mutex mutex;
  static bool registered = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (registered) return nullptr;
  StayLoaded();
  OrtEnv* env = nullptr;  // the process has one; the reference stays ours for as long as it lives
  if (OrtStatus* failed = api->CreateEnv(kOrtLoggingWarning, "antiphon", &env)) return failed;
  if (OrtStatus* failed = api->CreateCpuMemoryInfo(kOrtDeviceAllocator, kOrtMemTypeDefault, &g_memory_info)) {
    return failed;
  }
  if (OrtStatus* failed = api->RegisterAllocator(env, &g_allocator)) return failed;
  registered = true;
  return nullptr;
}

// One domain for the process: operators have no state of their own, sessions share them.
OrtStatus* BuildDomain(const OrtApi* api, OrtCustomOpDomain** out) {
  static OrtCustomOpDomain* domain = nullptr;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (domain == nullptr) {
    OrtCustomOpDomain* built = nullptr;
    if (OrtStatus* failed = api->CreateCustomOpDomain("antiphon", &built)) return failed;
    for (const auto& room : {antiphon::LinearOperators(), antiphon::RowOperators(), antiphon::PackedOperators(),
                             antiphon::PagedOperators(), antiphon::SelectOperators()}) {
      for (const OrtCustomOp* op : room) {
        if (OrtStatus* failed = api->CustomOpDomain_Add(built, op)) return failed;
      }
    }
    domain = built;
  }
  *out = domain;
  return nullptr;
}

OrtStatus* AddOperators(const OrtApi* api, OrtSessionOptions* options) {
  try {
    antiphon::ActiveKernels();  // a wrong ANTIPHON_CPU is found here, not in the first run
  } catch (const std::exception& error) {
    return api->CreateStatus(kOrtFail, error.what());
  }
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* failed = BuildDomain(api, &domain)) return failed;
  return api->AddCustomOpDomain(options, domain);
}

}  // namespace

ANTIPHON_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (api == nullptr) return nullptr;  // older than any release that could create a status for us; never registered
  const char* version = base->GetVersionString();
  if (std::strncmp(version, kSupportedRuntime, std::strlen(kSupportedRuntime)) != 0) {
    const std::string message = std::string("this build of Antiphon's native library works with ONNX Runtime ") +
                                kSupportedRuntime + "x, not " + version;
    return api->CreateStatus(kOrtFail, message.c_str());
  }
  if (OrtStatus* failed = RegisterOnce(api)) return failed;
  return AddOperators(api, options);
}

// Raised whenever operators, their packing or these functions change: model/ops/workspace.py loads its own number only.
ANTIPHON_EXPORT int antiphon_native_version() { return 2; }

// The kernels this process runs: amx, avx512, avx2 or portable; empty where ANTIPHON_CPU names one it cannot run.
ANTIPHON_EXPORT const char* antiphon_kernels() {
  try {
    return antiphon::ActiveKernels().name;
  } catch (const std::exception&) {
    return "";
  }
}

ANTIPHON_EXPORT void antiphon_workspace_stats(antiphon::WorkspaceStats* out) { *out = Workspace().Stats(); }

ANTIPHON_EXPORT void antiphon_workspace_reset_peak() { Workspace().ResetPeak(); }

ANTIPHON_EXPORT void antiphon_workspace_set_limit(uint64_t bytes) { Workspace().SetLimit(bytes); }

ANTIPHON_EXPORT void antiphon_workspace_trim() { Workspace().Trim(); }
