// Names of CUDA that the kernels use. Under nvcc they are CUDA's own; csrc/tests/emulator.h gives them to g++.
#pragma once
#include <cstdint>

#if !defined(__CUDACC__) && !defined(MEGASAO_EMULATOR)
#error "compile with nvcc, or include csrc/tests/emulator.h first"
#endif

namespace megasao {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;

// Eight tokens of one thread: two (float) or four (double) loads of 16 bytes, and 8 bytes of mask.
template <class T>
struct alignas(16) Sixteen {
  T at[16 / sizeof(T)];
};

template <class T>
__device__ __forceinline__ void load_tokens(T (&to)[kPerThread], const T* from, int64_t first, int64_t tokens) {
  if (first + kPerThread <= tokens) {
    constexpr int each = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kPerThread / each; ++i) {
      const Sixteen<T> piece = reinterpret_cast<const Sixteen<T>*>(from + first)[i];
#pragma unroll
      for (int k = 0; k < each; ++k) to[i * each + k] = piece.at[k];
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) to[k] = first + k < tokens ? from[first + k] : T(0);
  }
}

template <class T>
__device__ __forceinline__ void store_tokens(T* to, const T (&from)[kPerThread], int64_t first, int64_t tokens) {
  if (first + kPerThread <= tokens) {
    constexpr int each = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kPerThread / each; ++i) {
      Sixteen<T> piece;
#pragma unroll
      for (int k = 0; k < each; ++k) piece.at[k] = from[i * each + k];
      reinterpret_cast<Sixteen<T>*>(to + first)[i] = piece;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k)
      if (first + k < tokens) to[first + k] = from[k];
  }
}

// Bit k: token first + k is an action.
__device__ __forceinline__ unsigned load_mask(const uint8_t* mask, int64_t first, int64_t tokens) {
  unsigned bits = 0;
  if (first + kPerThread <= tokens) {
    const uint64_t bytes = *reinterpret_cast<const uint64_t*>(mask + first);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) bits |= unsigned((bytes >> (8 * k) & 0xff) != 0) << k;
  } else {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k)
      if (first + k < tokens && mask[first + k]) bits |= 1u << k;
  }
  return bits;
}

}  // namespace megasao
