// The functions of libcudart that ONNX Runtime's provider needs for our graphs.
#include <stdlib.h>
#include <string.h>

#include "standin.h"

typedef struct {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_memory, shared_per_block;
  int registers_per_block, warp_size;
  size_t memory_pitch;
  int threads_per_block, threads_dim[3], grid_size[3];
  size_t constant_memory;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  int multiprocessors;
} DeviceProperties;  // the first fields of cudaDeviceProp; the others stay as the caller made them

static __thread int t_last_error;

static int noted(int error) {
  if (error != kSuccess) t_last_error = error;
  return error;
}

int cudaGetDeviceCount(int* count) { *count = 1; return kSuccess; }
int cudaGetDevice(int* device) { *device = 0; return kSuccess; }
int cudaSetDevice(int device) {
  if (device == 0) standin_set_context();
  return noted(device == 0 ? kSuccess : 101);
}
int cudaDriverGetVersion(int* version) { *version = 13000; return kSuccess; }
int cudaRuntimeGetVersion(int* version) { *version = 13000; return kSuccess; }
int cudaDeviceSynchronize(void) { return kSuccess; }

int cudaGetDeviceProperties(DeviceProperties* properties, int device) {
  (void)device;
  memset(properties, 0, sizeof(*properties));
  strcpy(properties->name, "stand-in");
  size_t free_bytes;
  standin_memory(&free_bytes, &properties->total_memory);
  properties->shared_per_block = 48 << 10;
  properties->registers_per_block = 65536;
  properties->warp_size = 32;
  properties->threads_per_block = 1024;
  for (int axis = 0; axis < 3; ++axis) properties->threads_dim[axis] = 1024, properties->grid_size[axis] = 65535;
  properties->major = standin_architecture() / 10;
  properties->minor = standin_architecture() % 10;
  properties->multiprocessors = 4;
  return kSuccess;
}

int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 16 ? 4 : attribute == 75 ? standin_architecture() / 10
         : attribute == 76 ? standin_architecture() % 10 : 1024;
  return kSuccess;
}

const char* cudaGetErrorName(int error) { return error == kSuccess ? "cudaSuccess" : "cudaErrorOfTheStandIn"; }
const char* cudaGetErrorString(int error) { return error == kSuccess ? "no error" : "an error of the stand-in"; }
int cudaPeekAtLastError(void) { return t_last_error; }
int cudaGetLastError(void) {
  int error = t_last_error;
  t_last_error = kSuccess;
  return error;
}

int cudaMalloc(void** address, size_t bytes) { return noted(standin_allocate(address, bytes)); }
int cudaFree(void* address) { return noted(standin_free(address)); }
int cudaMallocHost(void** memory, size_t bytes) {
  *memory = standin_allocate_host(bytes);
  return *memory ? kSuccess : noted(kOutOfMemory);
}
int cudaHostAlloc(void** memory, size_t bytes, unsigned flags) { (void)flags; return cudaMallocHost(memory, bytes); }
int cudaFreeHost(void* memory) { free(memory); return kSuccess; }
int cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) { standin_memory(free_bytes, total_bytes); return kSuccess; }

int cudaMemcpy(void* target, const void* source, size_t bytes, int kind) {
  (void)kind;
  return noted(standin_any_capturing() ? kInCapture : standin_copy(target, source, bytes, NULL));
}
int cudaMemcpyAsync(void* target, const void* source, size_t bytes, int kind, Stream* stream) {
  (void)kind;
  return noted(standin_copy(target, source, bytes, stream));
}
int cudaMemset(void* target, int byte, size_t bytes) { return noted(standin_fill(target, byte, bytes, NULL)); }
int cudaMemsetAsync(void* target, int byte, size_t bytes, Stream* stream) {
  return noted(standin_fill(target, byte, bytes, stream));
}

int cudaPointerGetAttributes(void* out, const void* address) {
  struct { int type, device; void *device_address, *host_address; } *attributes = out;
  int is_device = standin_is_device(address);
  attributes->type = is_device ? 2 : 0;
  attributes->device = 0;
  attributes->device_address = is_device ? (void*)address : NULL;
  attributes->host_address = is_device ? NULL : (void*)address;
  return kSuccess;
}

int cudaStreamCreate(Stream** stream) { *stream = standin_new_stream(); return kSuccess; }
int cudaStreamCreateWithFlags(Stream** stream, unsigned flags) { (void)flags; return cudaStreamCreate(stream); }
int cudaStreamDestroy(Stream* stream) { free(stream); return kSuccess; }
int cudaStreamSynchronize(Stream* stream) { return noted(standin_is_capturing(stream) ? kInCapture : kSuccess); }
int cudaStreamWaitEvent(Stream* stream, void* event, unsigned flags) {
  (void)stream, (void)event, (void)flags;
  return kSuccess;
}
int cudaStreamBeginCapture(Stream* stream, int mode) { (void)mode; return noted(standin_begin_capture(stream)); }
int cudaStreamEndCapture(Stream* stream, Graph** graph) { return noted(standin_end_capture(stream, graph)); }
int cudaStreamIsCapturing(Stream* stream, int* status) { *status = standin_is_capturing(stream); return kSuccess; }
int cudaGraphInstantiate(Graph** executable, Graph* graph, unsigned long long flags) {
  (void)flags;
  *executable = graph;
  return kSuccess;
}
int cudaGraphDestroy(Graph* graph) { (void)graph; return kSuccess; }  // its executable is the same object
int cudaGraphExecDestroy(Graph* graph) { (void)graph; return kSuccess; }
int cudaGraphLaunch(Graph* graph, Stream* stream) {
  (void)stream;
  return noted(standin_fails_now() ? kLaunchFailed : standin_run_graph(graph));
}

int cudaEventCreate(void** event) { *event = calloc(1, 8); return kSuccess; }
int cudaEventCreateWithFlags(void** event, unsigned flags) { (void)flags; return cudaEventCreate(event); }
int cudaEventDestroy(void* event) { free(event); return kSuccess; }
int cudaEventRecord(void* event, Stream* stream) { (void)event, (void)stream; return kSuccess; }
int cudaEventRecordWithFlags(void* event, Stream* stream, unsigned flags) {
  (void)flags;
  return cudaEventRecord(event, stream);
}
int cudaEventSynchronize(void* event) { (void)event; return kSuccess; }
int cudaEventElapsedTime(float* ms, void* start, void* end) { (void)start, (void)end; *ms = 0; return kSuccess; }

// Registration of ONNX Runtime's own kernels, which a graph of ours must not launch.
void** __cudaRegisterFatBinary(void* binary) { (void)binary; return calloc(1, sizeof(void*)); }
void __cudaRegisterFatBinaryEnd(void** handle) { (void)handle; }
void __cudaUnregisterFatBinary(void** handle) { (void)handle; }
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}
unsigned __cudaPushCallConfiguration(void) { return 0; }
int __cudaPopCallConfiguration(void) { return kSuccess; }
int __cudaGetKernel(void** kernel, const void* function) { *kernel = (void*)function; return kSuccess; }
int cudaFuncGetAttributes(void* attributes, const void* function) {
  (void)attributes, (void)function;
  return kSuccess;
}
int cudaFuncSetAttribute(const void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return kSuccess;
}
int cudaLaunchKernel(void) { standin_count_foreign("cudaLaunchKernel"); return noted(kInvalidKernel); }
int __cudaLaunchKernel(void) { standin_count_foreign("__cudaLaunchKernel"); return noted(kInvalidKernel); }
int cudaLaunchKernelExC(void) { standin_count_foreign("cudaLaunchKernelExC"); return noted(kInvalidKernel); }
