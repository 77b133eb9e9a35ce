// The operators for GPUs: model/ops/cuda/nodes.py declares them.
#pragma once

#include <vector>

#include "../../native/ort_abi.h"

namespace antiphon {

// One registration for each node and element type.
std::vector<const OrtCustomOp*> CudaOperators();

}  // namespace antiphon
