// The kernels for base.
// System headers first, and no std templates in the kernels: the linker keeps one copy of those for the whole program,
// which must not be one for an instruction set that the machine may lack.
#include <cstdint>
#include <cstring>

#define MEGASAO_ISA base
#include "body.inc"

namespace megasao {
const KernelTable kBaseKernels = {"base", base::table<float>(), base::table<double>()};
}  // namespace megasao
