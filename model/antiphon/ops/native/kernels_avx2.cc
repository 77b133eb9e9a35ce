#include "kernel_table.h"

namespace antiphon {

const Kernels& Avx2Kernels() {
  static constexpr Kernels table = MakeTable("avx2");
  return table;
}

}  // namespace antiphon
