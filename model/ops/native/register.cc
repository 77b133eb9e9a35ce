// What ONNX Runtime and Python call: registration with the environment, and the counters through a C interface.

#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <string>

#include "counting_allocator.h"
#include "ort_abi.h"

#define ANTIPHON_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

antiphon::CountingAllocator& Workspace() {
  // Never destroyed: the environment may free its last block after static destructors have run.
  static auto* workspace = new antiphon::CountingAllocator;
  return *workspace;
}

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

}  // namespace

ANTIPHON_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(kOrtApiVersion);
  if (api == nullptr) return nullptr;  // older than any release that could create a status for us; never registered
  const char* version = base->GetVersionString();
  if (std::strncmp(version, kSupportedRuntime, std::strlen(kSupportedRuntime)) != 0) {
    const std::string message = std::string("this build of Antiphon's native library works with ONNX Runtime ") +
                                kSupportedRuntime + "x, not " + version;
    return api->CreateStatus(kOrtFail, message.c_str());
  }
  return RegisterOnce(api);
}

ANTIPHON_EXPORT void antiphon_workspace_stats(antiphon::WorkspaceStats* out) { *out = Workspace().Stats(); }

ANTIPHON_EXPORT void antiphon_workspace_reset_peak() { Workspace().ResetPeak(); }

ANTIPHON_EXPORT void antiphon_workspace_set_limit(uint64_t bytes) { Workspace().SetLimit(bytes); }

ANTIPHON_EXPORT void antiphon_workspace_trim() { Workspace().Trim(); }
