// What one token adds to the loss, the gradient and the statistics of DIS (arXiv 2607.07508) and of PPO's clipped
// objective.
//
// `P` is a float or double, or a GNU vector of them: only + - * comparisons and ?: are used, and these select, they
// never multiply by a mask.
#pragma once
#include "portable.h"

namespace megasao {

constexpr double kClamp = 20.0;  // log-ratios in the statistics

// Order of the float64 statistics, the same as in Python. The last two are parts of the loss, by the advantage's sign.
enum Stat {
  kTokens, kInvalid, kLow, kHigh, kDual, kRatio, kSquare, kMagnitude, kK3, kRatioMax, kPositive, kNegative, kStats
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

// Of an action token; all 0 at any other. `weight` is minus the gradient with respect to log p, `loss` minus the loss,
// both undivided.
template <class P, class M>
struct PolicyToken {
  P weight, loss, ratio, square, magnitude, k3;
  M low, high, dual, invalid;
};

template <class P, class M>
struct Ratio {
  P log_ratio;  // of an observation: anything; each use asks for an action
  P clamped, exp;
  M valid;
};

// Fills in the statistics of the ratio, from log-ratios clamped to +-kClamp.
template <class P, class M>
MEGASAO_FN Ratio<P, M> measure_ratio(P logprob, P rollout, M action, PolicyToken<P, M>& token) {
  using E = Element<P>;
  const P zero = P{};
  Ratio<P, M> ratio;
  ratio.log_ratio = logprob - rollout;
  token.invalid = action & (ratio.log_ratio != ratio.log_ratio);
  ratio.valid = action & (ratio.log_ratio == ratio.log_ratio);
  P x = ratio.valid ? ratio.log_ratio : zero;
  x = x > E(kClamp) ? zero + E(kClamp) : x;
  x = x < E(-kClamp) ? zero - E(kClamp) : x;
  const ExpAndK3<P> e = exp_and_k3(x);
  ratio.clamped = x;
  ratio.exp = e.exp;
  token.ratio = ratio.valid ? e.exp : zero;
  token.square = token.ratio * token.ratio;
  token.magnitude = x < zero ? zero - x : x;
  token.k3 = ratio.valid ? e.k3 : zero;
  return ratio;
}

// weight = f(r) A, loss = f(r) A log p; f(r) = r inside the band, else 0. The band is decided on log-ratios, its edges
// are outside, and it lies inside +-kClamp (the caller checks).
template <class E>
struct DisRule {
  E lower, upper;

  template <class P, class M>
  MEGASAO_MEMBER PolicyToken<P, M> token(P logprob, P rollout, P advantage, M action) const {
    PolicyToken<P, M> token;
    const Ratio<P, M> r = measure_ratio(logprob, rollout, action, token);
    token.low = action & (r.log_ratio <= lower);
    token.high = action & (r.log_ratio >= upper);
    token.dual = token.low & token.high;  // none
    const M accepted = action & (r.log_ratio > lower) & (r.log_ratio < upper);
    token.weight = accepted ? r.exp * advantage : P{};
    token.loss = accepted ? token.weight * logprob : P{};
    return token;
  }
};

// loss = min(r A, clip(r) A), at least `dual` A where A < 0; a clipped token carries no gradient, and neither does one
// whose ratio the clamp holds. Decided on log-ratios: `lower`, `upper`, `limit` are the logarithms of the bounds.
template <class E>
struct PpoRule {
  E lower, upper, limit;
  E low, high, dual;

  template <class P, class M>
  MEGASAO_MEMBER PolicyToken<P, M> token(P logprob, P rollout, P advantage, M action) const {
    PolicyToken<P, M> token;
    const P zero = P{};
    const Ratio<P, M> r = measure_ratio(logprob, rollout, action, token);
    const M negative = action & (advantage < zero);
    token.low = negative & (r.log_ratio < lower);
    token.high = action & (advantage > zero) & (r.log_ratio > upper);
    token.dual = negative & (r.log_ratio > limit);
    const M clipped = token.low | token.high | token.dual;
    P bounded = token.low ? zero + low : r.exp;
    bounded = token.high ? zero + high : bounded;
    bounded = token.dual ? zero + dual : bounded;
    const M held = (r.log_ratio > E(kClamp)) | (r.log_ratio < E(-kClamp));
    token.loss = r.valid ? bounded * advantage : zero;
    token.weight = (clipped | held) ? zero : token.loss;
    return token;
  }
};

}  // namespace megasao
