// Objectives of whole responses (arXiv 2606.03070): their sums, then their loss and its gradient coefficient.
// Several blocks share a response, as many for each; their number depends on the shape alone: bitwise reproducible.
#pragma once
#include "../core/response.h"
#include "reduce.h"

namespace megasao {

constexpr int kNoMaximum = -1;

template <class T>
struct ResponseProblem {
  const T *logprobs, *advantages;
  const uint8_t* mask;
  const int32_t* bounds;  // [sequences + 1]
  int64_t tokens, sequences;
  unsigned parts;  // blocks of one response
};

// Calls `visit(first, logprobs, advantages, mask)` for the block's part of response `sequence`: eight tokens a thread,
// from a multiple of eight on, as loads of 16 bytes need; `mask` has the actions of this response only.
template <class T, class Visit>
__device__ __forceinline__ void visit_response(const ResponseProblem<T>& problem, int64_t sequence, unsigned part,
                                               Visit visit) {
  const int64_t begin = problem.bounds[sequence], end = problem.bounds[sequence + 1];
  const int64_t base = begin / kPerThread * kPerThread;
  for (int64_t start = base + int64_t(part) * kTile; start < end; start += int64_t(problem.parts) * kTile) {
    const int64_t first = start + threadIdx.x * kPerThread;
    if (first >= end) continue;
    T logprobs[kPerThread], advantages[kPerThread];
    load_tokens(logprobs, problem.logprobs, first, problem.tokens);
    load_tokens(advantages, problem.advantages, first, problem.tokens);
    unsigned mask = load_mask(problem.mask, first, problem.tokens), inside = 0;
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) inside |= unsigned(first + k >= begin && first + k < end) << k;
    visit(first, logprobs, advantages, mask & inside, inside);
  }
}

// `sums`: [kResponseSums][sequences]; block b works on response b / parts, with a ticket and partial sums of its own.
template <class T>
__global__ void __launch_bounds__(kThreads) response_sums_kernel(ResponseProblem<T> problem, double* sums,
                                                                 Scratch scratch) {
  const int64_t sequence = blockIdx.x / problem.parts;
  const unsigned part = blockIdx.x % problem.parts;
  double own[kResponseSums] = {};
  visit_response(problem, sequence, part, [&](int64_t, const T* logprobs, const T* advantages, unsigned mask, unsigned) {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (!(mask >> k & 1)) continue;
      own[kNll] -= double(logprobs[k]);
      own[kCount] += 1;
      own[kAbove] += advantages[k] > T(0);
      own[kBelow] += advantages[k] < T(0);
    }
  });
  __shared__ double total[kResponseSums];
  const Scratch mine = {scratch.ticket + sequence, scratch.partials + sequence * problem.parts * kResponseSums};
  if (!reduce_grid<kResponseSums, kNoMaximum>(own, mine, part, problem.parts, total)) return;
  if (threadIdx.x < kResponseSums) sums[int64_t(threadIdx.x) * problem.sequences + sequence] = total[threadIdx.x];
}

template <class T>
struct ResponseLosses {
  const double *weights, *denominator;
  double alpha;
  T *loss, *coefficient;
  double* sides;
};

template <class T>
__global__ void __launch_bounds__(kThreads) response_loss_kernel(ResponseProblem<T> problem, ResponseLosses<T> losses,
                                                                 Scratch scratch) {
  const int64_t sequence = blockIdx.x / problem.parts;
  const double scale = -losses.weights[sequence] / *losses.denominator;
  double sides[2] = {};
  visit_response(problem, sequence, blockIdx.x % problem.parts,
                 [&](int64_t first, const T* logprobs, const T* advantages, unsigned mask, unsigned inside) {
    T coefficient[kPerThread] = {};
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      if (!(mask >> k & 1)) continue;
      const double advantage = advantages[k];
      const double weight = (advantage < 0 ? losses.alpha * advantage : advantage) * scale;
      const double loss = weight * double(logprobs[k]);
      sides[0] += advantage < 0 ? 0 : loss;
      sides[1] += advantage < 0 ? loss : 0;
      coefficient[k] = T(weight);
    }
    if (inside == 0xff) {
      store_tokens(losses.coefficient, coefficient, first, problem.tokens);
    } else {  // the rest belongs to another response, and so to another block
      for (int k = 0; k < kPerThread; ++k)
        if (inside >> k & 1) losses.coefficient[first + k] = coefficient[k];
    }
  });
  __shared__ double total[2];
  if (!reduce_grid<2, kNoMaximum>(sides, scratch, blockIdx.x, gridDim.x, total)) return;
  if (threadIdx.x < 2) losses.sides[threadIdx.x] = total[threadIdx.x];
  if (threadIdx.x == 0) *losses.loss = T(total[0] + total[1]);
}

}  // namespace megasao
