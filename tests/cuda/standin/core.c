// Memory, streams and graphs of the stand-in; part of its libcudart, so that there is one of each in a process.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "standin.h"

#define SPAN (1ull << 31)
#define ALIGNMENT 256
#define MOST_BLOCKS 65536
#define POISONED (64ull << 20)

// The handed-out addresses cannot be read or written; the same pages are mapped a second time for the stand-in.
static char *g_device, *g_host;
static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static struct { uint64_t offset, bytes; int is_used; } g_blocks[MOST_BLOCKS];
static int g_num_blocks;
static uint64_t g_in_use;
static int g_allocations, g_foreign, g_missing, g_architecture = 90, g_countdown, g_capturing;
static LaunchFunction g_launch;
static __thread int t_has_context;

__attribute__((constructor)) static void map(void) {
  int file = memfd_create("device", 0);
  if (file < 0 || ftruncate(file, SPAN) != 0) abort();
  g_device = mmap(NULL, SPAN, PROT_NONE, MAP_SHARED, file, 0);
  g_host = mmap(NULL, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (g_device == MAP_FAILED || g_host == MAP_FAILED) abort();
  close(file);
}

int standin_has_context(void) { return t_has_context; }
void standin_set_context(void) { t_has_context = 1; }
void standin_set_launch(LaunchFunction function) { g_launch = function; }
void standin_set_architecture(int architecture) { g_architecture = architecture; }
int standin_architecture(void) { return g_architecture; }
int standin_foreign_launches(void) { return g_foreign; }
int standin_missing_calls(void) { return g_missing; }
int standin_allocations(void) { return g_allocations; }
uint64_t standin_bytes_in_use(void) { return g_in_use; }
void standin_fail_after(int countdown) { g_countdown = countdown; }
int standin_fails_now(void) { return g_countdown > 0 && --g_countdown == 0; }

int standin_missing(const char* name) {
  ++g_missing;
  fprintf(stderr, "stand-in for CUDA: %s is not implemented\n", name);
  return kNotSupported;
}

void standin_count_foreign(const char* name) {
  ++g_foreign;
  fprintf(stderr, "stand-in for CUDA: %s of a kernel that is not ours\n", name);
}

int standin_is_device(const void* address) {
  return (const char*)address >= g_device && (const char*)address < g_device + SPAN;
}

void* standin_host_view(const void* address) {
  return standin_is_device(address) ? g_host + ((const char*)address - g_device) : (void*)address;
}

// Blocks cover the span from its start, sorted by offset; a free one is split, and joined with its neighbours.
static void insert(int index, uint64_t offset, uint64_t bytes) {
  memmove(&g_blocks[index + 1], &g_blocks[index], sizeof(g_blocks[0]) * (size_t)(g_num_blocks++ - index));
  g_blocks[index].offset = offset, g_blocks[index].bytes = bytes, g_blocks[index].is_used = 0;
}

static void join(int index) {
  if (index < 0 || index + 1 >= g_num_blocks || g_blocks[index].is_used || g_blocks[index + 1].is_used) return;
  g_blocks[index].bytes += g_blocks[index + 1].bytes;
  --g_num_blocks;
  memmove(&g_blocks[index + 1], &g_blocks[index + 2], sizeof(g_blocks[0]) * (size_t)(g_num_blocks - index - 1));
}

int standin_allocate(void** address, size_t bytes) {
  if (standin_fails_now()) return kOutOfMemory;
  uint64_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  pthread_mutex_lock(&g_lock);
  if (g_num_blocks == 0) insert(0, 0, SPAN);
  int index = 0;
  while (index < g_num_blocks && (g_blocks[index].is_used || g_blocks[index].bytes < rounded)) ++index;
  if (index == g_num_blocks || g_num_blocks + 1 == MOST_BLOCKS) {
    pthread_mutex_unlock(&g_lock);
    return kOutOfMemory;
  }
  uint64_t offset = g_blocks[index].offset;
  if (g_blocks[index].bytes > rounded) {
    insert(index, offset, rounded);
    g_blocks[index + 1].offset += rounded;
    g_blocks[index + 1].bytes -= rounded;
  }
  g_blocks[index].is_used = 1;
  g_in_use += rounded;
  ++g_allocations;
  pthread_mutex_unlock(&g_lock);
  // NaN in every floating-point type; of much memory only the start, which makes the rest resident only when used.
  memset(g_host + offset, 0xff, rounded < POISONED ? rounded : POISONED);
  *address = g_device + offset;
  return kSuccess;
}

int standin_free(void* address) {
  if (address == NULL) return kSuccess;
  pthread_mutex_lock(&g_lock);
  int result = kInvalidValue;
  for (int index = 0; index < g_num_blocks; ++index) {
    if (g_device + g_blocks[index].offset != address || !g_blocks[index].is_used) continue;
    g_blocks[index].is_used = 0;
    g_in_use -= g_blocks[index].bytes;
    join(index);
    join(index - 1);
    result = kSuccess;
    break;
  }
  pthread_mutex_unlock(&g_lock);
  return result;
}

void standin_memory(size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = SPAN;
  *free_bytes = SPAN - g_in_use;
}

void* standin_allocate_host(size_t bytes) {
  size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  void* memory = aligned_alloc(ALIGNMENT, rounded ? rounded : ALIGNMENT);
  if (memory != NULL) memset(memory, 0xff, rounded ? rounded : ALIGNMENT);
  return memory;
}

// Recorded or executed work.
typedef struct Work {
  enum { kCopy, kFill, kProduct, kKernel } kind;
  void* target;
  const void* source;
  size_t bytes;
  int byte;
  Product product;
  Kernel kernel;
  unsigned grid[3];
  uint64_t* arguments;
  struct Work* next;
} Work;

struct Graph { Work *first, **last; };
struct Stream { Graph* captured; };

Stream* standin_new_stream(void) { return calloc(1, sizeof(Stream)); }
int standin_is_capturing(Stream* stream) { return stream != NULL && stream->captured != NULL; }
int standin_any_capturing(void) { return g_capturing != 0; }

int standin_begin_capture(Stream* stream) {
  if (stream == NULL || stream->captured != NULL) return kInvalidValue;
  stream->captured = calloc(1, sizeof(Graph));
  stream->captured->last = &stream->captured->first;
  ++g_capturing;
  return kSuccess;
}

int standin_end_capture(Stream* stream, Graph** graph) {
  if (!standin_is_capturing(stream)) return kInvalidValue;
  *graph = stream->captured;
  stream->captured = NULL;
  --g_capturing;
  return kSuccess;
}

static float element(const void* array, long long index, int type) {
  if (type == 0) return ((const float*)array)[index];
  uint16_t bits = ((const uint16_t*)array)[index];
  if (type == 2) {
    _Float16 half;
    memcpy(&half, &bits, sizeof(half));
    return (float)half;
  }
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof(value));
  return value;
}

static void store(void* array, long long index, int type, float value) {
  if (type == 0) {
    ((float*)array)[index] = value;
  } else if (type == 2) {
    _Float16 half = (_Float16)value;
    memcpy((uint16_t*)array + index, &half, sizeof(half));
  } else {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    bits += 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
    ((uint16_t*)array)[index] = (uint16_t)(bits >> 16);
  }
}

static void multiply(const Product* p) {
  const void *a = standin_host_view(p->a), *b = standin_host_view(p->b);
  void* c = standin_host_view(p->c);
  float* row = malloc(sizeof(float) * (size_t)(p->k + 1));
  for (int batch = 0; batch < p->count; ++batch) {
    long long at_a = batch * p->stride_a, at_b = batch * p->stride_b, at_c = batch * p->stride_c;
    for (int i = 0; i < p->m; ++i) {
      for (int l = 0; l < p->k; ++l) {
        row[l] = element(a, at_a + (p->transpose_a ? l + (long long)i * p->lda : i + (long long)l * p->lda), p->type_a);
      }
      for (int j = 0; j < p->n; ++j) {
        float sum = 0;
        for (int l = 0; l < p->k; ++l) {
          long long place = p->transpose_b ? j + (long long)l * p->ldb : l + (long long)j * p->ldb;
          sum += row[l] * element(b, at_b + place, p->type_b);
        }
        long long place = at_c + i + (long long)j * p->ldc;
        float before = p->beta != 0 ? p->beta * element(c, place, p->type_c) : 0;
        store(c, place, p->type_c, p->alpha * sum + before);
      }
    }
  }
  free(row);
}

static int execute(const Work* work) {
  switch (work->kind) {
    case kCopy: memmove(standin_host_view(work->target), standin_host_view(work->source), work->bytes); break;
    case kFill: memset(standin_host_view(work->target), work->byte, work->bytes); break;
    case kProduct: multiply(&work->product); break;
    case kKernel:
      if (g_launch == NULL) return kLaunchFailed;
      return g_launch(work->kernel.name, work->grid[0], work->grid[1], work->grid[2], work->arguments) ? kLaunchFailed
                                                                                                   : kSuccess;
  }
  return kSuccess;
}

static int submit(Work* work, Stream* stream) {
  if (!standin_is_capturing(stream)) {
    int result = execute(work);
    free(work->arguments);
    free(work);
    return result;
  }
  *stream->captured->last = work;
  stream->captured->last = &work->next;
  return kSuccess;
}

int standin_run_graph(Graph* graph) {
  for (Work* work = graph->first; work != NULL; work = work->next) {
    int result = execute(work);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

int standin_copy(void* target, const void* source, size_t bytes, Stream* stream) {
  if (standin_fails_now()) return kLaunchFailed;
  Work* work = calloc(1, sizeof(Work));
  work->kind = kCopy, work->target = target, work->source = source, work->bytes = bytes;
  return submit(work, stream);
}

int standin_fill(void* target, int byte, size_t bytes, Stream* stream) {
  Work* work = calloc(1, sizeof(Work));
  work->kind = kFill, work->target = target, work->byte = byte, work->bytes = bytes;
  return submit(work, stream);
}

int standin_multiply(const Product* product, Stream* stream) {
  Work* work = calloc(1, sizeof(Work));
  work->kind = kProduct, work->product = *product;
  return submit(work, stream);
}

int standin_launch(const Kernel* kernel, unsigned x, unsigned y, unsigned z, void** arguments, Stream* stream) {
  if (standin_fails_now()) return kLaunchFailed;
  Work* work = calloc(1, sizeof(Work));
  work->kind = kKernel, work->kernel = *kernel;
  work->grid[0] = x, work->grid[1] = y, work->grid[2] = z;
  work->arguments = calloc((size_t)kernel->num_arguments + 1, sizeof(uint64_t));
  for (int index = 0; index < kernel->num_arguments; ++index) {
    memcpy(&work->arguments[index], arguments[index], sizeof(uint64_t));
  }
  return submit(work, stream);
}
