#include "kernel_table.h"

namespace antiphon {

const Kernels& I8mmKernels() {
  static constexpr Kernels table = MakeTable("i8mm");
  return table;
}

}  // namespace antiphon
