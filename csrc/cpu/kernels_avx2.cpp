// The kernels for avx2.
#if defined(__x86_64__)
// System headers first, and no std templates in the kernels: the linker keeps one copy of those for the whole program,
// which must not be one for an instruction set that the machine may lack.
#include <cstdint>
#include <cstring>

#pragma GCC target("avx2,fma")
#define MEGASAO_ISA avx2
#include "body.inc"

namespace megasao {
const KernelTable kAvx2Kernels = {"avx2", avx2::table<float>(), avx2::table<double>()};
}  // namespace megasao
#endif
