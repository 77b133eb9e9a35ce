// The operators for GPUs: model/antiphon/ops/cuda/nodes.py declares them.
#pragma once

#include <vector>

#include "../../native/ort_abi.h"

namespace antiphon {

// One registration for each node and element type. Their constructors need a loaded KernelLibrary.
std::vector<const OrtCustomOp*> CudaOperators();

}  // namespace antiphon
