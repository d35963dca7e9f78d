// The kernels for avx512.
#if defined(__x86_64__)
// System headers first, and no std templates in the kernels: the linker keeps one copy of those for the whole program,
// which must not be one for an instruction set that the machine may lack.
#include <cstdint>
#include <cstring>
#include <immintrin.h>

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define MEGASAO_AVX512 1
#define MEGASAO_ISA avx512
#include "body.inc"

namespace megasao {
const KernelTable kAvx512Kernels = {"avx512", avx512::table<float>(), avx512::table<double>()};
}  // namespace megasao
#endif
