#include "cpu.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace kvtier {

#if defined(__x86_64__)

bool cpu_has_sha() {
  // cpuid traps in a virtual machine and costs microseconds there: it is asked once a process.
  static const bool has = [] {
    constexpr unsigned ssse3 = 1U << 9, sse41 = 1U << 19, sha = 1U << 29;
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & ssse3) == 0 || (c & sse41) == 0) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & sha) != 0;
  }();
  return has;
}

// The compiler's runtime has asked cpuid and xgetbv already.
bool cpu_has_avx2() { return __builtin_cpu_supports("avx2") != 0; }

bool cpu_has_avx512() { return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0; }

#else

#if defined(__ARM_FEATURE_SHA2)
bool cpu_has_sha() { return true; }
#elif defined(__aarch64__) && defined(__linux__)
bool cpu_has_sha() { return (getauxval(AT_HWCAP) & HWCAP_SHA2) != 0; }
#else
bool cpu_has_sha() { return false; }
#endif

bool cpu_has_avx2() { return false; }
bool cpu_has_avx512() { return false; }

#endif

}  // namespace kvtier
