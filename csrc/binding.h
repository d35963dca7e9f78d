// Schemas of the operators, and the checks that CPU and CUDA share. Python checks first, with better messages; these
// keep a direct call of torch.ops.megasao.* from reading out of bounds.
#pragma once
#include <cmath>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "core/policy.h"
#include "core/response.h"

namespace megasao {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void check(const Tensor& tensor, const char* name, const Tensor& like, int64_t length, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.numel() == length && tensor.is_contiguous(), name,
                  ": expected a contiguous tensor of ", length, " elements, got ", tensor.numel());
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

// DIS: `low` and `high` are the logarithms of the band's edges. PPO's clip: they are bounds of the ratio, and so is `dual`.
struct PolicyArguments {
  const Tensor &logprobs, &rollout_logprobs, &advantages, &action_mask, &denominator;
  double low, high, dual;
  const Tensor &loss, &coefficient, &stats;

  int64_t tokens() const { return logprobs.numel(); }

  void check_tensors() const {
    const ScalarType dtype = check_float(logprobs, "logprobs");
    check(logprobs, "logprobs", logprobs, tokens(), dtype);
    check(rollout_logprobs, "rollout_logprobs", logprobs, tokens(), dtype);
    check(advantages, "advantages", logprobs, tokens(), dtype);
    check(action_mask, "action_mask", logprobs, tokens(), ScalarType::Bool);
    check(denominator, "denominator", logprobs, 1, ScalarType::Double);
    check(loss, "loss", logprobs, 1, dtype);
    check(coefficient, "coefficient", logprobs, tokens(), dtype);
    check(stats, "stats", logprobs, kStats, ScalarType::Double);
  }

  template <class T>
  DisRule<T> dis_rule() const {
    return {T(low), T(high)};
  }

  template <class T>
  PpoRule<T> ppo_rule() const {
    return {T(std::log(low)), T(std::log(high)), T(std::log(dual)), T(low), T(high), T(dual)};
  }
};

struct ResponseArguments {
  const Tensor &logprobs, &advantages, &action_mask, &cu_seqlens;
  // Sums: [kResponseSums, sequences]. Loss: `weights` of the sequences and the outputs.
  const Tensor* sums = nullptr;
  const Tensor *weights = nullptr, *denominator = nullptr;
  double alpha = 1;
  const Tensor *loss = nullptr, *coefficient = nullptr, *sides = nullptr;

  int64_t tokens() const { return logprobs.numel(); }
  int64_t sequences() const { return cu_seqlens.numel() - 1; }

  void check_all() const {
    const ScalarType dtype = check_float(logprobs, "logprobs");
    STD_TORCH_CHECK(cu_seqlens.numel() >= 1, "cu_seqlens: expected at least one element");
    check(logprobs, "logprobs", logprobs, tokens(), dtype);
    check(advantages, "advantages", logprobs, tokens(), dtype);
    check(action_mask, "action_mask", logprobs, tokens(), ScalarType::Bool);
    check(cu_seqlens, "cu_seqlens", logprobs, sequences() + 1, ScalarType::Int);
    if (sums) check(*sums, "sums", logprobs, kResponseSums * sequences(), ScalarType::Double);
    if (!weights) return;
    STD_TORCH_CHECK(alpha >= 0, "alpha: expected a number >= 0, got ", alpha);
    check(*weights, "weights", logprobs, sequences(), ScalarType::Double);
    check(*denominator, "denominator", logprobs, 1, ScalarType::Double);
    check(*loss, "loss", logprobs, 1, dtype);
    check(*coefficient, "coefficient", logprobs, tokens(), dtype);
    check(*sides, "sides", logprobs, 2, ScalarType::Double);
  }
};

// The kernels of one device. Each fills the outputs that it is given.
struct Kernel {
  void (*gae)(const GaeArguments&);
  void (*dis)(const PolicyArguments&);
  void (*ppo_clip)(const PolicyArguments&);
  void (*response_sums)(const ResponseArguments&);
  void (*response_loss)(const ResponseArguments&);
};

template <const Kernel& kernel>
struct Operators {
  using Losses = std::tuple<Tensor, Tensor, Tensor>;

  static void gae_out(Tensor rewards, Tensor values, Tensor action_mask, Tensor cu_seqlens, Tensor lam,
                      Tensor bootstrap, double gamma, Tensor advantages, Tensor returns) {
    const GaeArguments arguments{rewards, values,    action_mask, cu_seqlens, lam,
                                 bootstrap, gamma, advantages, returns};
    arguments.check_all();
    kernel.gae(arguments);
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
    STD_TORCH_CHECK(lower >= -kClamp && lower < 0 && upper > 0 && upper <= kClamp,
                    "lower, upper: expected log-ratios in [-20, 0) and (0, 20], got ", lower, " and ", upper);
    const PolicyArguments arguments{logprobs, rollout_logprobs, advantages, action_mask, denominator, lower,
                                    upper,    0,                loss,       coefficient, stats};
    arguments.check_tensors();
    kernel.dis(arguments);
  }

  static Losses dis(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask,
                    Tensor denominator, double lower, double upper) {
    auto [loss, coefficient, stats] = outputs(logprobs, kStats);
    dis_out(logprobs, rollout_logprobs, advantages, action_mask, denominator, lower, upper, loss, coefficient, stats);
    return {loss, coefficient, stats};
  }

  static void ppo_clip_out(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask,
                           Tensor denominator, double low, double high, double dual, Tensor loss, Tensor coefficient,
                           Tensor stats) {
    STD_TORCH_CHECK(low > 0 && low < 1 && high > 1 && dual > 1,
                    "low, high, dual: expected ratios in (0, 1) and above 1, got ", low, ", ", high, ", ", dual);
    const PolicyArguments arguments{logprobs, rollout_logprobs, advantages, action_mask, denominator, low,
                                    high,     dual,             loss,       coefficient, stats};
    arguments.check_tensors();
    kernel.ppo_clip(arguments);
  }

  static Losses ppo_clip(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask,
                         Tensor denominator, double low, double high, double dual) {
    auto [loss, coefficient, stats] = outputs(logprobs, kStats);
    ppo_clip_out(logprobs, rollout_logprobs, advantages, action_mask, denominator, low, high, dual, loss, coefficient,
                 stats);
    return {loss, coefficient, stats};
  }

  static void response_sums_out(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens,
                                Tensor sums) {
    const ResponseArguments arguments{logprobs, advantages, action_mask, cu_seqlens, &sums};
    arguments.check_all();
    kernel.response_sums(arguments);
  }

  static Tensor response_sums(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens) {
    STD_TORCH_CHECK(cu_seqlens.numel() >= 1, "cu_seqlens: expected at least one element");
    Tensor sums = torch::stable::new_empty(logprobs, {kResponseSums, cu_seqlens.numel() - 1}, ScalarType::Double);
    response_sums_out(logprobs, advantages, action_mask, cu_seqlens, sums);
    return sums;
  }

  static void response_loss_out(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens,
                                Tensor weights, Tensor denominator, double alpha, Tensor loss, Tensor coefficient,
                                Tensor sides) {
    const ResponseArguments arguments{logprobs, advantages,   action_mask, cu_seqlens, nullptr, &weights,
                                      &denominator, alpha, &loss,       &coefficient, &sides};
    arguments.check_all();
    kernel.response_loss(arguments);
  }

  static Losses response_loss(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens,
                              Tensor weights, Tensor denominator, double alpha) {
    auto [loss, coefficient, sides] = outputs(logprobs, 2);
    response_loss_out(logprobs, advantages, action_mask, cu_seqlens, weights, denominator, alpha, loss, coefficient,
                      sides);
    return {loss, coefficient, sides};
  }

  static void register_all(torch::stable::detail::StableLibrary& library) {
    library.impl("gae", TORCH_BOX(&Operators::gae));
    library.impl("gae_out", TORCH_BOX(&Operators::gae_out));
    library.impl("dis", TORCH_BOX(&Operators::dis));
    library.impl("dis_out", TORCH_BOX(&Operators::dis_out));
    library.impl("ppo_clip", TORCH_BOX(&Operators::ppo_clip));
    library.impl("ppo_clip_out", TORCH_BOX(&Operators::ppo_clip_out));
    library.impl("response_sums", TORCH_BOX(&Operators::response_sums));
    library.impl("response_sums_out", TORCH_BOX(&Operators::response_sums_out));
    library.impl("response_loss", TORCH_BOX(&Operators::response_loss));
    library.impl("response_loss_out", TORCH_BOX(&Operators::response_loss_out));
  }

 private:
  static Losses outputs(const Tensor& logprobs, int64_t stats) {
    return {torch::stable::new_empty(logprobs, {}), torch::stable::new_empty(logprobs, {logprobs.numel()}),
            torch::stable::new_empty(logprobs, {stats}, ScalarType::Double)};
  }
};

}  // namespace megasao
