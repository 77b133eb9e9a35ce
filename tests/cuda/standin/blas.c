// The products of libcublas that ONNX Runtime's Gemm and MatMul call.
#include <stdlib.h>

#include "standin.h"

typedef struct { Stream* stream; int math_mode; } Handle;

int cublasCreate_v2(Handle** handle) { *handle = calloc(1, sizeof(Handle)); return kSuccess; }
int cublasDestroy_v2(Handle* handle) { free(handle); return kSuccess; }
int cublasSetStream_v2(Handle* handle, Stream* stream) { handle->stream = stream; return kSuccess; }
int cublasSetMathMode(Handle* handle, int mode) { handle->math_mode = mode; return kSuccess; }
int cublasGetMathMode(Handle* handle, int* mode) { *mode = handle->math_mode; return kSuccess; }
const char* cublasGetStatusName(int status) { return status == kSuccess ? "success" : "failure of the stand-in"; }
const char* cublasGetStatusString(int status) { return cublasGetStatusName(status); }

// Factors are float where sums are: all types here but float16 with sums in float16, which the provider does not use.
int cublasGemmEx(Handle* handle, int transpose_a, int transpose_b, int m, int n, int k, const void* alpha,
                 const void* a, int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, void* c,
                 int type_c, int ldc, int compute_type, int algorithm) {
  (void)compute_type, (void)algorithm;
  const Product product = {transpose_a, transpose_b, m, n, k, type_a, type_b, type_c, lda, ldb, ldc, 1, 0, 0, 0,
                           *(const float*)alpha, *(const float*)beta, a, b, c};
  return standin_multiply(&product, handle->stream);
}

int cublasSgemm_v2(Handle* handle, int transpose_a, int transpose_b, int m, int n, int k, const float* alpha,
                   const float* a, int lda, const float* b, int ldb, const float* beta, float* c, int ldc) {
  return cublasGemmEx(handle, transpose_a, transpose_b, m, n, k, alpha, a, 0, lda, b, 0, ldb, beta, c, 0, ldc, 0, 0);
}
