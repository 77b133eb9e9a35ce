// A stand-in for CUDA on a machine without a card: memory that the host cannot touch, streams, graphs, products.
//
// Work runs at once in the calling thread, or is recorded while its stream is captured. Kernels are run by a function
// that Python sets. Nothing here is fast, and nothing is compiled for a GPU.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidKernel = 98, kInCapture = 900, kNotSupported = 801 };
enum { kLaunchFailed = 719, kNoContext = 201 };

typedef struct Stream Stream;
typedef struct Graph Graph;

// One product C = alpha * op(A) * op(B) + beta * C, column by column as in cuBLAS. Types are those of cudaDataType.
typedef struct {
  int transpose_a, transpose_b, m, n, k, type_a, type_b, type_c, lda, ldb, ldc, count;
  long long stride_a, stride_b, stride_c;
  float alpha, beta;
  const void *a, *b;
  void* c;
} Product;

// Kernel: name of the variant, and its number of arguments, 8 bytes each.
typedef struct {
  char name[96];
  int num_arguments;
} Kernel;

typedef int (*LaunchFunction)(const char* name, unsigned x, unsigned y, unsigned z, const uint64_t* arguments);

void standin_set_launch(LaunchFunction function);
void standin_set_architecture(int architecture);
int standin_architecture(void);
// Number of launches of kernels that are not ours, of functions that are not implemented, and of allocations.
int standin_foreign_launches(void);
int standin_missing_calls(void);
int standin_allocations(void);
uint64_t standin_bytes_in_use(void);
// The address at which the host can read device memory; any other address is returned as it is.
void* standin_host_view(const void* address);
int standin_is_device(const void* address);
// Makes the call number `countdown` from now of every function that can fail, fail once. 0 is never.
void standin_fail_after(int countdown);
int standin_fails_now(void);

// Whether this thread has a current context: the driver needs one, the runtime makes one current itself.
int standin_has_context(void);
void standin_set_context(void);

int standin_missing(const char* name);
void standin_count_foreign(const char* name);

int standin_allocate(void** address, size_t bytes);
int standin_free(void* address);
void standin_memory(size_t* free_bytes, size_t* total_bytes);
void* standin_allocate_host(size_t bytes);

Stream* standin_new_stream(void);
int standin_is_capturing(Stream* stream);
int standin_any_capturing(void);
int standin_begin_capture(Stream* stream);
int standin_end_capture(Stream* stream, Graph** graph);
int standin_run_graph(Graph* graph);

// Each runs at once, or is recorded in the graph of a stream that is captured.
int standin_copy(void* target, const void* source, size_t bytes, Stream* stream);
int standin_fill(void* target, int byte, size_t bytes, Stream* stream);
int standin_multiply(const Product* product, Stream* stream);
int standin_launch(const Kernel* kernel, unsigned x, unsigned y, unsigned z, void** arguments, Stream* stream);
