#include "kernel_table.h"

namespace antiphon {

const Kernels& AvxVnniKernels() {
  static constexpr Kernels table = MakeTable("avxvnni");
  return table;
}

}  // namespace antiphon
