// DIS and PPO's clip: loss, gradient coefficient and statistics in one pass. A grid whose size depends on the number of
// tokens alone strides over tiles; each block leaves its sums, and the last block adds them up in order: bitwise
// reproducible.
#pragma once
#include "../core/policy.h"
#include "reduce.h"

namespace megasao {

template <class T>
struct PolicyProblem {
  const T *logprobs, *rollout, *advantages;
  const uint8_t* mask;
  const double* denominator;
  int64_t tokens;
  T *loss, *coefficient;
  double* stats;
};

template <class T, class Rule>
__global__ void __launch_bounds__(kThreads) policy_kernel(PolicyProblem<T> problem, Rule rule, Scratch scratch) {
  const double denominator = *problem.denominator;
  const T scale = T(-1 / denominator);
  double sums[kStats] = {};
  for (int64_t start = int64_t(blockIdx.x) * kTile; start < problem.tokens; start += int64_t(gridDim.x) * kTile) {
    const int64_t first = start + threadIdx.x * kPerThread;
    T logprobs[kPerThread], rollout[kPerThread], advantages[kPerThread], coefficient[kPerThread];
    load_tokens(logprobs, problem.logprobs, first, problem.tokens);
    load_tokens(rollout, problem.rollout, first, problem.tokens);
    load_tokens(advantages, problem.advantages, first, problem.tokens);
    const unsigned mask = load_mask(problem.mask, first, problem.tokens);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const bool action = mask >> k & 1, below = advantages[k] < T(0);
      const PolicyToken<T, bool> token = rule.token(logprobs[k], rollout[k], advantages[k], action);
      coefficient[k] = token.weight * scale;
      const double parts[kStats] = {double(action),
                                    double(token.invalid),
                                    double(token.low),
                                    double(token.high),
                                    double(token.dual),
                                    token.ratio,
                                    token.square,
                                    token.magnitude,
                                    token.k3,
                                    token.ratio,
                                    below ? T(0) : token.loss,
                                    below ? token.loss : T(0)};
#pragma unroll
      for (int i = 0; i < kStats; ++i) sums[i] = merge<kRatioMax>(i, sums[i], parts[i]);
    }
    store_tokens(problem.coefficient, coefficient, first, problem.tokens);
  }
  __shared__ double total[kStats];
  if (!reduce_grid<kStats, kRatioMax>(sums, scratch, blockIdx.x, gridDim.x, total)) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStats; ++i) problem.stats[i] = i < kPositive ? total[i] : total[i] / -denominator;
    *problem.loss = T(problem.stats[kPositive] + problem.stats[kNegative]);
  }
}

}  // namespace megasao
