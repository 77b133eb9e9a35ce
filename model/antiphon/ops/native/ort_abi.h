// ONNX Runtime's C interface, by the official header, and short names for its element types.
//
// The header is that of ONNX Runtime 1.21 as Debian distributes it (libonnxruntime-dev 1.21.0+dfsg-1), unchanged. Its
// structs only grow, and a newer runtime serves an older version of them: kOrtApiVersion is the one that we use.
#pragma once

#include "onnxruntime/onnxruntime_c_api.h"

constexpr uint32_t kOrtApiVersion = 18;  // first with OrtAllocator::Reserve; versions of custom operators need 17
static_assert(kOrtApiVersion <= ORT_API_VERSION);

typedef ONNXTensorElementDataType ElementType;

// kAnyElement lets an input have any type, which the operator checks at run time.
constexpr ElementType kAnyElement = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
constexpr ElementType kFloat32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ElementType kInt8 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
constexpr ElementType kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr ElementType kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr ElementType kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr ElementType kBfloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;

constexpr OrtCustomOpInputOutputCharacteristic kRequired = INPUT_OUTPUT_REQUIRED;
constexpr OrtCustomOpInputOutputCharacteristic kOptional = INPUT_OUTPUT_OPTIONAL;
