// The CPU kernels of one instruction set; kernels_*.cpp fill one table each, select.cpp chooses at run time.
#pragma once
#include <cstdint>

namespace megasao {

constexpr int64_t kDisPartials = 10;  // the loss, then the statistics

template <class T>
struct Kernels {
  // One sequence of `tokens` tokens.
  void (*gae)(const T* rewards, const T* values, const bool* mask, int64_t tokens, double gamma, double lambda,
              double bootstrap, T* advantages, T* returns);
  // Tokens [0, tokens): coefficient = -weight / denominator, and the kDisPartials sums of these tokens.
  void (*dis)(const T* logprobs, const T* rollout, const T* advantages, const bool* mask, int64_t tokens, T lower,
              T upper, double denominator, T* coefficient, double* partial);
};

struct KernelTable {
  const char* name;
  Kernels<float> f32;
  Kernels<double> f64;
};

extern const KernelTable kBaseKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

const KernelTable& selected_kernels();

template <class T>
const Kernels<T>& kernels();

}  // namespace megasao
