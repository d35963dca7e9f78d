// Skip-observation GAE (arXiv 2607.07508) as one affine recurrence, carried from right to left:
//   action        return = r + y;  advantage = return - V;  y <- gamma lambda return + gamma (1 - lambda) V
//   observation   y <- y + r       (its reward belongs to the action before it; ignored unless finite)
//   end           y <- gamma bootstrap
// In this form float64 keeps its accuracy over a million tokens; sums of deltas do not.
#pragma once
#include "portable.h"

namespace megasao {

struct GaeFactors {
  double decay;  // gamma lambda
  double blend;  // gamma (1 - lambda)
};

MEGASAO_FN GaeFactors gae_factors(double gamma, double lambda) { return {gamma * lambda, gamma * (1 - lambda)}; }

// What an action token adds to y, apart from decay * y.
template <class P>
MEGASAO_FN P gae_offset(P reward, P value, GaeFactors factors) {
  return reward * factors.decay + value * factors.blend;
}

// The map y -> m y + b. m = 0 is a constant: it does not even carry a NaN.
struct Affine {
  double m, b;
};

MEGASAO_FN double apply(Affine map, double y) { return map.m == 0 ? map.b : map.m * y + map.b; }

// First `right`, then `left`.
MEGASAO_FN Affine after(Affine left, Affine right) {
  if (left.m == 0) return left;
  return {left.m * right.m, left.m * right.b + left.b};
}

MEGASAO_FN bool is_finite(double x) { return x - x == 0; }

}  // namespace megasao
