// Sums over the action tokens of a response, in the order of Python. The last two: tokens whose advantage is > 0, < 0.
#pragma once

namespace megasao {

enum ResponseSum { kNll, kCount, kAbove, kBelow, kResponseSums };

}  // namespace megasao
