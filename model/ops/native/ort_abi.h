// The part of ONNX Runtime's C ABI this library uses, declared here because no package ships the header.
//
// Slots of OrtApi never move once released; names and indices follow onnxruntime_c_api.h. Unused slots are padding,
// and the assertions below hold every used slot to its index.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtSessionOptions;

constexpr int kOrtFail = 1;              // OrtErrorCode
constexpr int kOrtLoggingWarning = 2;    // OrtLoggingLevel
constexpr int kOrtDeviceAllocator = 0;   // OrtAllocatorType; an environment refuses foreign arenas under another name
constexpr int kOrtMemTypeDefault = 0;    // OrtMemType
constexpr uint32_t kOrtApiVersion = 18;  // first version whose OrtAllocator has Reserve
constexpr const char* kSupportedRuntime = "1.31.";  // the release line this ABI was checked against

struct OrtAllocator {
  uint32_t version;
  void* (*Alloc)(OrtAllocator*, size_t bytes);
  void (*Free)(OrtAllocator*, void* block);
  const OrtMemoryInfo* (*Info)(const OrtAllocator*);
  void* (*Reserve)(OrtAllocator*, size_t bytes);  // read from version 18 on; later slots only from later versions
};
static_assert(sizeof(OrtAllocator) == 40);
static_assert(offsetof(OrtAllocator, Reserve) == 32);

struct OrtApi {
  OrtStatus* (*CreateStatus)(int code, const char* message);
  void* slots_1_2[2];
  OrtStatus* (*CreateEnv)(int severity, const char* log_id, OrtEnv** out);
  void* slots_4_68[65];
  OrtStatus* (*CreateCpuMemoryInfo)(int allocator_type, int memory_type, OrtMemoryInfo** out);
  void* slots_70_175[106];
  OrtStatus* (*RegisterAllocator)(OrtEnv*, OrtAllocator*);
};
static_assert(offsetof(OrtApi, CreateEnv) == 3 * sizeof(void*));
static_assert(offsetof(OrtApi, CreateCpuMemoryInfo) == 69 * sizeof(void*));
static_assert(offsetof(OrtApi, RegisterAllocator) == 176 * sizeof(void*));

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
static_assert(sizeof(OrtApiBase) == 16);
