// Choice of the kernels by the instruction sets that this processor and its operating system support.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace antiphon {

namespace {

struct Candidate {
  const char* name;
  bool (*is_supported)();
  const Kernels& (*table)();
};

bool Always() { return true; }

#if defined(__x86_64__)
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

// Leaf 7, subleaf 1, EAX bit 4 (Intel's Software Developer's Manual, volume 2A, CPUID).
bool HasAvxVnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return HasAvx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1u) != 0;
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// Linux gives a process the tile registers only when it asks (arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA).
bool HasAmx() {
  constexpr long kRequestPermission = 0x1023;
  constexpr long kTileData = 18;
  return HasAvx512() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

constexpr Candidate kCandidates[] = {
    {"amx", HasAmx, AmxKernels},
    {"avx512", HasAvx512, Avx512Kernels},
    {"avxvnni", HasAvxVnni, AvxVnniKernels},
    {"avx2", HasAvx2, Avx2Kernels},
    {"portable", Always, PortableKernels},
};
#elif defined(__aarch64__)
#if defined(__APPLE__)
bool HasFeature(const char* name) {
  int value = 0;
  size_t size = sizeof(value);
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool HasDotProd() { return HasFeature("hw.optional.arm.FEAT_DotProd"); }
bool HasI8mm() { return HasDotProd() && HasFeature("hw.optional.arm.FEAT_I8MM"); }
#else
// HWCAP_ASIMDDP and HWCAP2_I8MM of Linux (Documentation/arch/arm64/elf_hwcaps.rst).
bool HasDotProd() { return (getauxval(AT_HWCAP) >> 20 & 1u) != 0; }
bool HasI8mm() { return HasDotProd() && (getauxval(AT_HWCAP2) >> 13 & 1u) != 0; }
#endif

constexpr Candidate kCandidates[] = {
    {"i8mm", HasI8mm, I8mmKernels},
    {"dotprod", HasDotProd, DotProdKernels},
    {"portable", Always, PortableKernels},
};
#else
constexpr Candidate kCandidates[] = {{"portable", Always, PortableKernels}};
#endif

const Kernels& Choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* wanted = std::getenv("ANTIPHON_CPU");
  const bool is_free = wanted == nullptr || *wanted == '\0';
  std::string names;
  for (const Candidate& candidate : kCandidates) {
    names += std::string(names.empty() ? "" : ", ") + candidate.name;
    if (!is_free && std::string(wanted) != candidate.name) continue;
    if (candidate.is_supported()) return candidate.table();
    if (!is_free) throw std::runtime_error("ANTIPHON_CPU is " + std::string(wanted) + ", which this processor lacks");
  }
  throw std::runtime_error("ANTIPHON_CPU is " + std::string(wanted) + "; it must be one of " + names);
}

}  // namespace

const Kernels* KernelsNamed(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Candidate& candidate : kCandidates) {
    if (std::string(name) == candidate.name) return candidate.is_supported() ? &candidate.table() : nullptr;
  }
  return nullptr;
}

const Kernels& ActiveKernels() {
  static const Kernels& chosen = Choose();
  return chosen;
}

}  // namespace antiphon
