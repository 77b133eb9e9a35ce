#include "kernel_table.h"

namespace antiphon {

const Kernels& Avx512Kernels() {
  static constexpr Kernels table = MakeTable("avx512");
  return table;
}

}  // namespace antiphon
