// GAE in one pass: tiles of 2048 tokens, taken from the right by tickets, with decoupled look-back over the maps
// y -> m y + b of whole tiles (the affine recurrence of core/gae.h). The arithmetic is float64, as on the CPU.
//
// A tile's map is published as: value first, then a fence, then its state. A map with m = 0 (the tile holds an end of
// a sequence, or gamma lambda has underflowed) is final at once. A tile waits only for tiles with smaller tickets,
// which run already, so it cannot deadlock.
#pragma once
#include "../core/gae.h"
#include "platform.h"

namespace megasao {

enum TileState : unsigned { kEmpty = 0, kMap = 1, kFinal = 2 };

// Scratch of one launch; ticket and states start at zero.
struct GaeScratch {
  unsigned* ticket;          // [1]
  volatile unsigned* state;  // [tiles]
  volatile double* m;        // [tiles] slope of the tile's own map
  volatile double* b;        // [tiles] its offset
  volatile double* y;        // [tiles] y left of the tile; there once the state is kFinal
};

template <class T>
struct GaeProblem {
  const T *rewards, *values;
  const uint8_t* mask;
  const int32_t* bounds;  // [sequences + 1]
  const double *lam, *bootstrap;
  double gamma;
  int64_t tokens, sequences;
  T *advantages, *returns;
};

__device__ __forceinline__ Affine shuffle_down(Affine map, int offset) {
  return {__shfl_down_sync(kAll, map.m, offset), __shfl_down_sync(kAll, map.b, offset)};
}

// The sequence that holds `token`: the last one that starts at or before it.
__device__ __forceinline__ int64_t find_sequence(const int32_t* bounds, int64_t sequences, int64_t token) {
  int64_t low = 0, high = sequences;
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (bounds[middle] <= token ? low : high) = middle;
  }
  return low;
}

// Calls `visit(k, ends, sequence)` for the thread's tokens from right to left. `ends`: token k is its sequence's last.
template <class T, class Visit>
__device__ __forceinline__ void walk_left(const GaeProblem<T>& problem, int64_t first, Visit visit) {
  const int64_t left = problem.tokens - first;
  const int last = left < kPerThread ? int(left) - 1 : kPerThread - 1;
  if (last < 0) return;
  int64_t sequence = find_sequence(problem.bounds, problem.sequences, first + last);
#pragma unroll
  for (int k = kPerThread - 1; k >= 0; --k) {
    if (k > last) continue;
    while (first + k < problem.bounds[sequence]) --sequence;  // skips empty sequences too
    visit(k, first + k + 1 == problem.bounds[sequence + 1], sequence);
  }
}

// The suffix scan of the block: for each thread the map of all threads to its right; `whole` is that of the tile.
__device__ __forceinline__ Affine maps_to_the_right(Affine own, Affine* warps, Affine& whole) {
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  Affine scan = own;
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Affine right = shuffle_down(scan, offset);
    if (lane + offset < kWarp) scan = after(scan, right);
  }
  if (lane == 0) warps[warp] = scan;
  __syncthreads();
  Affine beyond = {1, 0};
  whole = {1, 0};
  for (int w = kWarps - 1; w >= 0; --w) {
    if (w == warp) beyond = whole;
    whole = after(warps[w], whole);
  }
  Affine right = shuffle_down(scan, 1);
  if (lane == kWarp - 1) right = {1, 0};
  return after(right, beyond);
}

// One warp finds y at the right edge of tile `tile`; tiles are numbered from the right.
__device__ __forceinline__ double look_back(const GaeScratch& scratch, int64_t tile) {
  const int lane = threadIdx.x % kWarp;
  Affine passed = {1, 0};  // the map of the tiles already passed
  for (int64_t nearest = tile - 1; nearest >= 0; nearest -= kWarp) {
    const int64_t mine = nearest - lane;
    unsigned state = mine < 0 ? unsigned(kFinal) : unsigned(kEmpty);
    while (state == kEmpty) state = scratch.state[mine];
    __threadfence();
    Affine map = {0, 0};  // right of everything: y = 0, never used, as a sequence ends there
    if (mine >= 0) map = state == kFinal ? Affine{0, scratch.y[mine]} : Affine{scratch.m[mine], scratch.b[mine]};
    // Lane 0 is the nearest tile: it is applied last.
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const Affine right = shuffle_down(map, offset);
      if (lane + offset < kWarp) map = after(map, right);
    }
    map = {__shfl_sync(kAll, map.m, 0), __shfl_sync(kAll, map.b, 0)};
    passed = after(passed, map);
    if (passed.m == 0) break;
  }
  return passed.b;
}

template <class T>
__global__ void __launch_bounds__(kThreads) gae_kernel(GaeProblem<T> problem, GaeScratch scratch) {
  __shared__ unsigned shared_ticket;
  __shared__ Affine warps[kWarps];
  __shared__ double shared_y;
  const int thread = threadIdx.x;
  if (thread == 0) shared_ticket = atomicAdd(scratch.ticket, 1u);
  __syncthreads();
  const int64_t tile = shared_ticket, tiles = (problem.tokens + kTile - 1) / kTile;
  const int64_t first = (tiles - 1 - tile) * kTile + thread * kPerThread;

  T rewards[kPerThread], values[kPerThread];
  load_tokens(rewards, problem.rewards, first, problem.tokens);
  load_tokens(values, problem.values, first, problem.tokens);
  const unsigned mask = load_mask(problem.mask, first, problem.tokens);

  Affine own = {1, 0};
  walk_left(problem, first, [&](int k, bool ends, int64_t sequence) {
    if (ends) own = {0, problem.gamma * problem.bootstrap[sequence]};
    const double reward = rewards[k];
    if (mask >> k & 1) {
      const GaeFactors factors = gae_factors(problem.gamma, problem.lam[sequence]);
      own = after({factors.decay, gae_offset(reward, double(values[k]), factors)}, own);
    } else if (is_finite(reward)) {
      own.b += reward;
    }
  });
  Affine whole;
  const Affine right = maps_to_the_right(own, warps, whole);

  if (thread < kWarp) {
    if (thread == 0) {
      scratch.m[tile] = whole.m;
      scratch.b[tile] = whole.b;
      scratch.y[tile] = whole.b;
      __threadfence();
      scratch.state[tile] = whole.m == 0 ? kFinal : kMap;
    }
    const double y = look_back(scratch, tile);
    if (thread == 0) {
      shared_y = y;
      if (whole.m != 0) {
        scratch.y[tile] = apply(whole, y);
        __threadfence();
        scratch.state[tile] = kFinal;
      }
    }
  }
  __syncthreads();

  double y = apply(right, shared_y);
  T advantages[kPerThread] = {}, returns[kPerThread] = {};
  walk_left(problem, first, [&](int k, bool ends, int64_t sequence) {
    if (ends) y = problem.gamma * problem.bootstrap[sequence];
    const double reward = rewards[k], value = values[k];
    if (mask >> k & 1) {
      const double total = reward + y;
      returns[k] = T(total);
      advantages[k] = T(total - value);
      const GaeFactors factors = gae_factors(problem.gamma, problem.lam[sequence]);
      y = apply({factors.decay, gae_offset(reward, value, factors)}, y);
    } else if (is_finite(reward)) {
      y += reward;
    }
  });
  store_tokens(problem.advantages, advantages, first, problem.tokens);
  store_tokens(problem.returns, returns, first, problem.tokens);
}

}  // namespace megasao
