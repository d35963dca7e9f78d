// Schemas of the operators, and the checks that CPU and CUDA share. Python checks first, with better messages; these
// keep a direct call of torch.ops.megasao.* from reading out of bounds.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "core/dis.h"

namespace megasao {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& tensor, const char* name, const Tensor& like, int64_t length, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.dim() <= 1 && tensor.numel() == length && tensor.is_contiguous(), name,
                  ": expected a contiguous flat tensor of ", length, " elements, got ", tensor.numel());
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, ": wrong dtype");
  STD_TORCH_CHECK(tensor.is_cuda() == like.is_cuda() && tensor.get_device() == like.get_device(), name,
                  ": not on the device of the first argument");
}

inline ScalarType check_float(const Tensor& tensor, const char* name) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, name, ": expected float32 or float64");
  return dtype;
}

struct GaeArguments {
  const Tensor &rewards, &values, &action_mask, &cu_seqlens, &lam, &bootstrap;
  double gamma;
  const Tensor &advantages, &returns;

  int64_t tokens() const { return rewards.numel(); }
  int64_t sequences() const { return cu_seqlens.numel() - 1; }

  void check_all() const {
    const ScalarType dtype = check_float(rewards, "rewards");
    STD_TORCH_CHECK(tokens() < (int64_t(1) << 31), "rewards: at most 2^31 - 1 tokens");
    STD_TORCH_CHECK(gamma >= 0 && gamma <= 1, "gamma: expected a number in [0, 1], got ", gamma);
    STD_TORCH_CHECK(cu_seqlens.numel() >= 1, "cu_seqlens: expected at least one element");
    check(rewards, "rewards", rewards, tokens(), dtype);
    check(values, "values", rewards, tokens(), dtype);
    check(action_mask, "action_mask", rewards, tokens(), ScalarType::Bool);
    check(cu_seqlens, "cu_seqlens", rewards, sequences() + 1, ScalarType::Int);
    check(lam, "lam", rewards, sequences(), ScalarType::Double);
    check(bootstrap, "bootstrap", rewards, sequences(), ScalarType::Double);
    check(advantages, "advantages", rewards, tokens(), dtype);
    check(returns, "returns", rewards, tokens(), dtype);
  }
};

struct DisArguments {
  const Tensor &logprobs, &rollout_logprobs, &advantages, &action_mask, &denominator;
  double lower, upper;
  const Tensor &loss, &coefficient, &stats;

  int64_t tokens() const { return logprobs.numel(); }

  void check_all() const {
    const ScalarType dtype = check_float(logprobs, "logprobs");
    STD_TORCH_CHECK(lower >= -kClamp && lower < 0 && upper > 0 && upper <= kClamp,
                    "lower, upper: expected log-ratios in [-20, 0) and (0, 20], got ", lower, " and ", upper);
    check(logprobs, "logprobs", logprobs, tokens(), dtype);
    check(rollout_logprobs, "rollout_logprobs", logprobs, tokens(), dtype);
    check(advantages, "advantages", logprobs, tokens(), dtype);
    check(action_mask, "action_mask", logprobs, tokens(), ScalarType::Bool);
    check(denominator, "denominator", logprobs, 1, ScalarType::Double);
    check(loss, "loss", logprobs, 1, dtype);
    check(coefficient, "coefficient", logprobs, tokens(), dtype);
    check(stats, "stats", logprobs, kStats, ScalarType::Double);
  }
};

// The operators of one device, from its two kernels that fill given outputs.
template <void (*run_gae)(const GaeArguments&), void (*run_dis)(const DisArguments&)>
struct Operators {
  static void gae_out(Tensor rewards, Tensor values, Tensor action_mask, Tensor cu_seqlens, Tensor lam,
                      Tensor bootstrap, double gamma, Tensor advantages, Tensor returns) {
    const GaeArguments arguments{rewards, values,    action_mask, cu_seqlens, lam,
                                 bootstrap, gamma, advantages, returns};
    arguments.check_all();
    run_gae(arguments);
  }

  static std::tuple<Tensor, Tensor> gae(Tensor rewards, Tensor values, Tensor action_mask, Tensor cu_seqlens,
                                        Tensor lam, Tensor bootstrap, double gamma) {
    Tensor advantages = torch::stable::new_empty(values, {values.numel()});
    Tensor returns = torch::stable::new_empty(values, {values.numel()});
    gae_out(rewards, values, action_mask, cu_seqlens, lam, bootstrap, gamma, advantages, returns);
    return {advantages, returns};
  }

  static void dis_out(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask,
                      Tensor denominator, double lower, double upper, Tensor loss, Tensor coefficient, Tensor stats) {
    const DisArguments arguments{logprobs, rollout_logprobs, advantages, action_mask, denominator,
                                 lower,    upper,            loss,       coefficient, stats};
    arguments.check_all();
    run_dis(arguments);
  }

  static std::tuple<Tensor, Tensor, Tensor> dis(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages,
                                                Tensor action_mask, Tensor denominator, double lower, double upper) {
    Tensor loss = torch::stable::new_empty(logprobs, {});
    Tensor coefficient = torch::stable::new_empty(logprobs, {logprobs.numel()});
    Tensor stats = torch::stable::new_empty(logprobs, {kStats}, ScalarType::Double);
    dis_out(logprobs, rollout_logprobs, advantages, action_mask, denominator, lower, upper, loss, coefficient, stats);
    return {loss, coefficient, stats};
  }

  static void register_all(torch::stable::detail::StableLibrary& library) {
    library.impl("gae", TORCH_BOX(&Operators::gae));
    library.impl("gae_out", TORCH_BOX(&Operators::gae_out));
    library.impl("dis", TORCH_BOX(&Operators::dis));
    library.impl("dis_out", TORCH_BOX(&Operators::dis_out));
  }
};

}  // namespace megasao
