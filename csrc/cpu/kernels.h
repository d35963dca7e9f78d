// The CPU kernels of one instruction set; kernels_*.cpp fill one table each, select.cpp chooses at run time.
#pragma once
#include <cstdint>

#include "../core/policy.h"
#include "../core/response.h"

namespace megasao {

template <class T>
struct Kernels {
  // One sequence of `tokens` tokens.
  void (*gae)(const T* rewards, const T* values, const bool* mask, int64_t tokens, double gamma, double lambda,
              double bootstrap, T* advantages, T* returns);
  // Tokens [0, tokens): coefficient = -weight / denominator, and the kStats sums of these tokens (undivided).
  template <class Rule>
  using Policy = void (*)(const T* logprobs, const T* rollout, const T* advantages, const bool* mask, int64_t tokens,
                          Rule rule, double denominator, T* coefficient, double* stats);
  Policy<DisRule<T>> dis;
  Policy<PpoRule<T>> ppo_clip;
  // One response: its kResponseSums sums.
  void (*response_sums)(const T* logprobs, const T* advantages, const bool* mask, int64_t tokens, double* sums);
  // One response: coefficient = scale A, with alpha A where A < 0, and the sums of coefficient * log p by A's sign.
  void (*response_loss)(const T* logprobs, const T* advantages, const bool* mask, int64_t tokens, double alpha,
                        double scale, T* coefficient, double* sides);
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
