// DIS (arXiv 2607.07508): what one token adds to the loss, the gradient and the statistics.
//
// `P` is a float or double, or a GNU vector of them: only + - * comparisons and ?: are used, and these select, they
// never multiply by a mask. The band is decided on log-ratios and lies inside +-kClamp (the caller checks).
#pragma once
#include "portable.h"

namespace megasao {

constexpr double kClamp = 20.0;  // log-ratios in the statistics

// Order of the float64 statistics, the same as in Python.
enum Stat { kTokens, kInvalid, kLow, kHigh, kRatio, kSquare, kMagnitude, kK3, kRatioMax, kStats };

template <class E>
struct Band {
  E lower, upper;
};

template <class P>
struct ExpAndK3 {
  P exp, k3;  // k3 = e^x - 1 - x
};

// For |x| <= kClamp. Taylor to rounding error; k3 keeps its relative accuracy near 0.
template <class P>
MEGASAO_FN ExpAndK3<P> exp_and_k3(P x) {
  using E = Element<P>;
  using Constants = ExpConstants<E>;
  const P shifted = x * E(1.4426950408889634) + Constants::magic;
  const P n = shifted - Constants::magic;
  const P r = (x - n * Constants::ln2_high) - n * Constants::ln2_low;
  double factorial = 1;
  for (int k = 2; k <= Constants::terms; ++k) factorial *= k;
  P tail = P{} + E(1 / factorial);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int k = Constants::terms; k > 2; --k) {
    factorial /= k;
    tail = tail * r + E(1 / factorial);
  }
  tail = tail * r * r;
  const P exponential = (tail + r + E(1)) * PowerOfTwo<P>::of(shifted);
  return {exponential, n == P{} ? tail : exponential - E(1) - x};
}

template <class P, class M>
struct DisToken {
  P weight, loss, ratio, square, magnitude, k3;
  M low, high, invalid;
};

// weight = f(r) * A and loss = f(r) * A * log p, both 0 outside the band; statistics 0 where not an action.
template <class P, class M>
MEGASAO_FN DisToken<P, M> dis_token(P logprob, P rollout, P advantage, M action, Band<Element<P>> band) {
  using E = Element<P>;
  const P zero = P{};
  const P log_ratio = logprob - rollout;  // of an observation: anything; each use below asks for an action
  DisToken<P, M> token;
  token.low = action & (log_ratio <= band.lower);
  token.high = action & (log_ratio >= band.upper);
  token.invalid = action & (log_ratio != log_ratio);
  const M valid = action & (log_ratio == log_ratio);
  const M accepted = action & (log_ratio > band.lower) & (log_ratio < band.upper);
  P x = valid ? log_ratio : zero;
  x = x > E(kClamp) ? zero + E(kClamp) : x;
  x = x < E(-kClamp) ? zero - E(kClamp) : x;
  const ExpAndK3<P> e = exp_and_k3(x);
  token.weight = accepted ? e.exp * advantage : zero;
  token.loss = accepted ? token.weight * logprob : zero;
  token.ratio = valid ? e.exp : zero;
  token.square = token.ratio * token.ratio;
  token.magnitude = x < zero ? zero - x : x;
  token.k3 = valid ? e.k3 : zero;
  return token;
}

}  // namespace megasao
