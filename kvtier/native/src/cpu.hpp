// What this processor can do. The answers are constants of the machine, found out once a process.
#pragma once

namespace kvtier {

bool cpu_has_sha();     // x86 SHA instructions with SSSE3 and SSE4.1, or ARMv8 SHA2
bool cpu_has_avx2();    // and an operating system that saves the registers
bool cpu_has_avx512();  // F and BW, and an operating system that saves the registers

}  // namespace kvtier
