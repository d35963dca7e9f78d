// Sums over several blocks, always in the same order: each block leaves its own, and the last one to arrive adds them up.
#pragma once
#include "platform.h"

namespace megasao {

struct Scratch {
  unsigned* ticket;  // [1], starts at zero
  double* partials;  // [blocks][sums]
};

// Sum number `largest` is a maximum.
template <int largest>
__device__ __forceinline__ double merge(int which, double left, double right) {
  return which == largest ? (left > right ? left : right) : left + right;
}

// Sums of all threads, in thread 0.
template <int count, int largest>
__device__ __forceinline__ void reduce_block(double (&sums)[count]) {
  __shared__ double warps[kWarps][count];
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll
  for (int i = 0; i < count; ++i)
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      sums[i] = merge<largest>(i, sums[i], __shfl_down_sync(kAll, sums[i], offset));
  if (lane == 0)
    for (int i = 0; i < count; ++i) warps[warp][i] = sums[i];
  __syncthreads();
  if (thread == 0)
    for (int w = 1; w < kWarps; ++w)
#pragma unroll
      for (int i = 0; i < count; ++i) sums[i] = merge<largest>(i, sums[i], warps[w][i]);
}

// In the last of `blocks` blocks: true, and `total`, in shared memory, holds the sums of all.
template <int count, int largest>
__device__ __forceinline__ bool reduce_grid(double (&sums)[count], Scratch scratch, unsigned block, unsigned blocks,
                                            double (&total)[count]) {
  __shared__ bool last;
  const int thread = threadIdx.x;
  reduce_block<count, largest>(sums);
  if (thread == 0) {
    for (int i = 0; i < count; ++i) scratch.partials[int64_t(block) * count + i] = sums[i];
    __threadfence();
    last = atomicAdd(scratch.ticket, 1u) == blocks - 1;
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < count; ++i) sums[i] = 0;
  for (unsigned b = thread; b < blocks; b += kThreads)
#pragma unroll
    for (int i = 0; i < count; ++i)
      sums[i] = merge<largest>(i, sums[i], *const_cast<volatile double*>(scratch.partials + int64_t(b) * count + i));
  reduce_block<count, largest>(sums);
  if (thread == 0)
    for (int i = 0; i < count; ++i) total[i] = sums[i];
  __syncthreads();
  return true;
}

}  // namespace megasao
