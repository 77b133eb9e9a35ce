// The part of ONNX Runtime's C ABI this library uses, declared here because no package ships the header.
//
// Slots of OrtApi never move after their release; names and indices follow onnxruntime_c_api.h. Unused slots are
// padding, and the assertions below check the index of every used slot.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtStatus;
struct OrtEnv;
struct OrtMemoryInfo;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtCustomOp;

constexpr int kOrtFail = 1;              // OrtErrorCode
constexpr int kOrtInvalidArgument = 2;   // OrtErrorCode
constexpr int kOrtLoggingWarning = 2;    // OrtLoggingLevel
constexpr int kOrtDeviceAllocator = 0;   // OrtAllocatorType; an environment refuses foreign arenas under another name
constexpr int kOrtMemTypeDefault = 0;    // OrtMemType
constexpr uint32_t kOrtApiVersion = 18;  // first with OrtAllocator::Reserve; versions of custom operators need 17
constexpr const char* kSupportedRuntime = "1.31.";  // the release line this ABI was checked against

// ONNXTensorElementDataType; kAnyElement lets an input have any type, which the operator checks at run time.
enum ElementType : int {
  kAnyElement = 0,
  kFloat32 = 1,
  kInt8 = 3,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kBfloat16 = 16,
};

// OrtCustomOpInputOutputCharacteristic
constexpr int kRequired = 0;
constexpr int kOptional = 1;

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
  void* slot_1;
  const char* (*GetErrorMessage)(const OrtStatus*);
  OrtStatus* (*CreateEnv)(int severity, const char* log_id, OrtEnv** out);
  void* slots_4_25[22];
  OrtStatus* (*CreateCustomOpDomain)(const char* domain, OrtCustomOpDomain** out);
  OrtStatus* (*CustomOpDomain_Add)(OrtCustomOpDomain*, const OrtCustomOp*);
  OrtStatus* (*AddCustomOpDomain)(OrtSessionOptions*, OrtCustomOpDomain*);
  void* slots_29_50[22];
  OrtStatus* (*GetTensorMutableData)(OrtValue*, void** out);
  void* slots_52_59[8];
  OrtStatus* (*GetTensorElementType)(const OrtTensorTypeAndShapeInfo*, int* out);
  OrtStatus* (*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo*, size_t* out);
  OrtStatus* (*GetDimensions)(const OrtTensorTypeAndShapeInfo*, int64_t* dims, size_t count);
  void* slots_63_64[2];
  OrtStatus* (*GetTensorTypeAndShape)(const OrtValue*, OrtTensorTypeAndShapeInfo** out);
  void* slots_66_68[3];
  OrtStatus* (*CreateCpuMemoryInfo)(int allocator_type, int memory_type, OrtMemoryInfo** out);
  void* slots_70_84[15];
  OrtStatus* (*KernelInfoGetAttribute_float)(const OrtKernelInfo*, const char* name, float* out);
  OrtStatus* (*KernelInfoGetAttribute_int64)(const OrtKernelInfo*, const char* name, int64_t* out);
  OrtStatus* (*KernelInfoGetAttribute_string)(const OrtKernelInfo*, const char* name, char* out, size_t* size);
  OrtStatus* (*KernelContext_GetInputCount)(const OrtKernelContext*, size_t* out);
  OrtStatus* (*KernelContext_GetOutputCount)(const OrtKernelContext*, size_t* out);
  OrtStatus* (*KernelContext_GetInput)(const OrtKernelContext*, size_t index, const OrtValue** out);
  OrtStatus* (*KernelContext_GetOutput)(OrtKernelContext*, size_t index, const int64_t* dims, size_t count,
                                        OrtValue** out);
  void* slot_92;
  void (*ReleaseStatus)(OrtStatus*);
  void* slots_94_98[5];
  void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo*);
  void* slots_100_175[76];
  OrtStatus* (*RegisterAllocator)(OrtEnv*, OrtAllocator*);
  void* slots_177_192[16];
  OrtStatus* (*KernelContext_GetGPUComputeStream)(const OrtKernelContext*, void** stream);
  void* slots_194_273[80];
  OrtStatus* (*KernelContext_ParallelFor)(const OrtKernelContext*, void (*task)(void*, size_t), size_t total,
                                          size_t num_batch, void* user);
};

#define ANTIPHON_SLOT(name, index) static_assert(offsetof(OrtApi, name) == (index) * sizeof(void*))
ANTIPHON_SLOT(GetErrorMessage, 2);
ANTIPHON_SLOT(CreateEnv, 3);
ANTIPHON_SLOT(CreateCustomOpDomain, 26);
ANTIPHON_SLOT(AddCustomOpDomain, 28);
ANTIPHON_SLOT(GetTensorMutableData, 51);
ANTIPHON_SLOT(GetTensorElementType, 60);
ANTIPHON_SLOT(GetDimensions, 62);
ANTIPHON_SLOT(GetTensorTypeAndShape, 65);
ANTIPHON_SLOT(CreateCpuMemoryInfo, 69);
ANTIPHON_SLOT(KernelInfoGetAttribute_float, 85);
ANTIPHON_SLOT(KernelContext_GetOutput, 91);
ANTIPHON_SLOT(ReleaseStatus, 93);
ANTIPHON_SLOT(ReleaseTensorTypeAndShapeInfo, 99);
ANTIPHON_SLOT(RegisterAllocator, 176);
ANTIPHON_SLOT(KernelContext_GetGPUComputeStream, 193);
ANTIPHON_SLOT(KernelContext_ParallelFor, 274);
#undef ANTIPHON_SLOT

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
static_assert(sizeof(OrtApiBase) == 16);

// Functions by which the runtime describes and runs an operator. Null is allowed where a comment says so.
struct OrtCustomOp {
  uint32_t version;
  void* create_kernel_v1;  // null: CreateKernelV2 is used
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void* kernel_compute_v1;  // null: KernelComputeV2 is used
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);  // null: shapes are known at run time
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  void* get_may_inplace;  // null, with the three below: no output shares an input's memory
  void* release_may_inplace;
  void* get_alias_map;
  void* release_alias_map;
};
static_assert(sizeof(OrtCustomOp) == 208);
static_assert(offsetof(OrtCustomOp, CreateKernelV2) == 17 * sizeof(void*));
static_assert(offsetof(OrtCustomOp, GetEndVersion) == 21 * sizeof(void*));
