#include "kernel_table.h"

namespace antiphon {

const Kernels& DotProdKernels() {
  static constexpr Kernels table = MakeTable("dotprod");
  return table;
}

}  // namespace antiphon
