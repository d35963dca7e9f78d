// DIS: loss, gradient coefficient and statistics in one pass. A grid whose size depends on the number of tokens alone
// strides over tiles; each block leaves its sums, and the last block adds them up in order: bitwise reproducible.
#pragma once
#include "../core/dis.h"
#include "platform.h"

namespace megasao {

constexpr int kSums = 1 + kStats;  // the loss, then the statistics
constexpr int kMaxBlocks = 1024;

template <class T>
struct DisProblem {
  const T *logprobs, *rollout, *advantages;
  const uint8_t* mask;
  const double* denominator;
  Band<T> band;
  int64_t tokens;
  T *loss, *coefficient;
  double* stats;
};

struct DisScratch {
  unsigned* ticket;   // [1], starts at zero
  double* partials;   // [blocks][kSums]
};

__device__ __forceinline__ double merge(int which, double left, double right) {
  return which == 1 + kRatioMax ? (left > right ? left : right) : left + right;
}

// Sums of all threads, in thread 0.
__device__ __forceinline__ void reduce_block(double (&sums)[kSums], double (*warps)[kSums]) {
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll
  for (int i = 0; i < kSums; ++i)
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      sums[i] = merge(i, sums[i], __shfl_down_sync(kAll, sums[i], offset));
  if (lane == 0)
    for (int i = 0; i < kSums; ++i) warps[warp][i] = sums[i];
  __syncthreads();
  if (thread == 0)
    for (int w = 1; w < kWarps; ++w)
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = merge(i, sums[i], warps[w][i]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) dis_kernel(DisProblem<T> problem, DisScratch scratch) {
  __shared__ double warps[kWarps][kSums];
  __shared__ bool shared_last;
  const int thread = threadIdx.x;
  const double denominator = *problem.denominator;
  const T scale = T(-1 / denominator);
  double sums[kSums] = {};
  for (int64_t start = int64_t(blockIdx.x) * kTile; start < problem.tokens; start += int64_t(gridDim.x) * kTile) {
    const int64_t first = start + thread * kPerThread;
    T logprobs[kPerThread], rollout[kPerThread], advantages[kPerThread], coefficient[kPerThread];
    load_tokens(logprobs, problem.logprobs, first, problem.tokens);
    load_tokens(rollout, problem.rollout, first, problem.tokens);
    load_tokens(advantages, problem.advantages, first, problem.tokens);
    const unsigned mask = load_mask(problem.mask, first, problem.tokens);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const bool action = mask >> k & 1;
      const DisToken<T, bool> token = dis_token(logprobs[k], rollout[k], advantages[k], action, problem.band);
      coefficient[k] = token.weight * scale;
      const double parts[kSums] = {token.loss,        double(action),      double(token.invalid), double(token.low),
                                   double(token.high), token.ratio,         token.square,          token.magnitude,
                                   token.k3,          token.ratio};
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = merge(i, sums[i], parts[i]);
    }
    store_tokens(problem.coefficient, coefficient, first, problem.tokens);
  }
  reduce_block(sums, warps);
  if (thread == 0) {
    for (int i = 0; i < kSums; ++i) scratch.partials[int64_t(blockIdx.x) * kSums + i] = sums[i];
    __threadfence();
    shared_last = atomicAdd(scratch.ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared_last) return;
  __threadfence();
  if (thread < kSums) {
    double total = 0;
    for (unsigned block = 0; block < gridDim.x; ++block)
      total = merge(thread, total, *const_cast<volatile double*>(scratch.partials + int64_t(block) * kSums + thread));
    if (thread == 0)
      *problem.loss = T(-total / denominator);
    else
      problem.stats[thread - 1] = total;
  }
}

}  // namespace megasao
