// Which instruction set runs: the best that the machine has, or the one that MEGASAO_ISA names.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace megasao {

static const KernelTable& choose() {
#if defined(__x86_64__)
  const char* wanted = std::getenv("MEGASAO_ISA");
  const auto allowed = [wanted](const char* name) { return !wanted || !std::strcmp(wanted, name); };
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed("avx512")) return kAvx512Kernels;
  if (avx2 && allowed("avx2")) return kAvx2Kernels;
#endif
  return kBaseKernels;
}

const KernelTable& selected_kernels() {
  static const KernelTable& table = choose();
  return table;
}

template <>
const Kernels<float>& kernels<float>() {
  return selected_kernels().f32;
}

template <>
const Kernels<double>& kernels<double>() {
  return selected_kernels().f64;
}

}  // namespace megasao
