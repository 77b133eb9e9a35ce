#include "kernel_table.h"

namespace antiphon {

const Kernels& PortableKernels() {
  static constexpr Kernels table = MakeTable("portable");
  return table;
}

}  // namespace antiphon
