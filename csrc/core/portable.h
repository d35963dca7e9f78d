// What lets one source serve scalars (CUDA, emulator) and GNU vector types (CPU): no torch, no CUDA header.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MEGASAO_MEMBER __host__ __device__ __forceinline__
#define MEGASAO_FN static MEGASAO_MEMBER
#else
#define MEGASAO_MEMBER inline __attribute__((always_inline))
#define MEGASAO_FN [[maybe_unused]] static MEGASAO_MEMBER
#endif

namespace megasao {

// Element type of a scalar or a GNU vector.
template <class P>
struct ElementOf {
  using type = P;
};

template <class P>
using Element = typename ElementOf<P>::type;

// Constants of e^x = 2^n e^r, |r| <= ln(2) / 2. Adding `magic` rounds to a whole number and leaves it in the low bits.
template <class E>
struct ExpConstants;

template <>
struct ExpConstants<float> {
  using Bits = uint32_t;
  static constexpr float magic = 12582912.0f;
  static constexpr float ln2_high = 0.693145751953125f;
  static constexpr float ln2_low = 1.42860677e-6f;
  static constexpr int mantissa = 23;
  static constexpr Bits one = 0x3f800000u;
  static constexpr int terms = 7;
};

template <>
struct ExpConstants<double> {
  using Bits = uint64_t;
  static constexpr double magic = 6755399441055744.0;
  static constexpr double ln2_high = 0.693147180369123816490;
  static constexpr double ln2_low = 1.90821492927058770002e-10;
  static constexpr int mantissa = 52;
  static constexpr Bits one = 0x3ff0000000000000u;
  static constexpr int terms = 13;
};

// 2^n, for `shifted` = n + magic. The CPU kernels specialise it for their vectors.
template <class P>
struct PowerOfTwo {
  MEGASAO_FN P of(P shifted) {
    using Constants = ExpConstants<P>;
    typename Constants::Bits bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << Constants::mantissa) + Constants::one;
    memcpy(&shifted, &bits, sizeof bits);
    return shifted;
  }
};

}  // namespace megasao
