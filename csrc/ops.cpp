// The operators' schemas, and their CPU implementations on the stable ABI of torch.
#include "binding.h"

#include <vector>

#include "cpu/kernels.h"

namespace megasao {

static void check_bounds(const int32_t* bounds, int64_t sequences, int64_t tokens) {
  STD_TORCH_CHECK(bounds[0] == 0 && bounds[sequences] == tokens, "cu_seqlens: expected to run from 0 to ", tokens);
  for (int64_t b = 0; b < sequences; ++b)
    STD_TORCH_CHECK(bounds[b] <= bounds[b + 1], "cu_seqlens: expected bounds that never decrease, see element ", b + 1);
}

// Each sequence is one piece of work, so the result does not depend on the number of threads. From the right, as the
// kernel itself goes: what it fetches ahead is then of use to the next sequence.
template <class T>
static void gae_cpu(const GaeArguments& a) {
  const int32_t* bounds = a.cu_seqlens.const_data_ptr<int32_t>();
  const int64_t sequences = a.sequences(), tokens = a.tokens();
  check_bounds(bounds, sequences, tokens);
  const T *rewards = a.rewards.const_data_ptr<T>(), *values = a.values.const_data_ptr<T>();
  const bool* mask = a.action_mask.const_data_ptr<bool>();
  const double *lam = a.lam.const_data_ptr<double>(), *bootstrap = a.bootstrap.const_data_ptr<double>();
  T *advantages = a.advantages.mutable_data_ptr<T>(), *returns = a.returns.mutable_data_ptr<T>();
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t b = end - 1; b >= begin; --b) {
      const int64_t at = bounds[b];
      kernels<T>().gae(rewards + at, values + at, mask + at, bounds[b + 1] - at, a.gamma, lam[b], bootstrap[b],
                       advantages + at, returns + at);
    }
  };
  if (sequences == 0) return;
  const int64_t grain = 1 + 65536 * sequences / (tokens + 1);  // sequences of about 64k tokens
  torch::stable::parallel_for(0, sequences, grain, some);
}

// Pieces depend on the number of tokens alone and are added up in order: bitwise equal on any number of threads.
template <class T, class Rule>
static void policy_cpu(const PolicyArguments& a, Rule rule, typename Kernels<T>::template Policy<Rule> kernel) {
  constexpr int64_t most = 256, least = 8192;
  double partials[most][kStats];
  const int64_t tokens = a.tokens();
  const int64_t even = (tokens + most - 1) / most;
  const int64_t piece = even > least ? (even + 63) / 64 * 64 : least;
  const int64_t pieces = (tokens + piece - 1) / piece;
  const T *logprobs = a.logprobs.const_data_ptr<T>(), *rollout = a.rollout_logprobs.const_data_ptr<T>();
  const T* advantages = a.advantages.const_data_ptr<T>();
  const bool* mask = a.action_mask.const_data_ptr<bool>();
  T* coefficient = a.coefficient.mutable_data_ptr<T>();
  const double denominator = *a.denominator.const_data_ptr<double>();
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = i * piece, count = at + piece < tokens ? piece : tokens - at;
      kernel(logprobs + at, rollout + at, advantages + at, mask + at, count, rule, denominator, coefficient + at,
             partials[i]);
    }
  };
  if (pieces) torch::stable::parallel_for(0, pieces, 1 + 65536 / piece, some);
  double* total = a.stats.mutable_data_ptr<double>();
  memset(total, 0, kStats * sizeof *total);
  for (int64_t i = 0; i < pieces; ++i)
    for (int k = 0; k < kStats; ++k)
      total[k] = k != kRatioMax ? total[k] + partials[i][k] : partials[i][k] > total[k] ? partials[i][k] : total[k];
  total[kPositive] /= -denominator;
  total[kNegative] /= -denominator;
  *a.loss.mutable_data_ptr<T>() = T(total[kPositive] + total[kNegative]);
}

// Each response is one piece of work, as in gae_cpu; `run(b, at, count)`.
template <class Run>
static void for_responses(const ResponseArguments& a, Run run) {
  const int32_t* bounds = a.cu_seqlens.const_data_ptr<int32_t>();
  check_bounds(bounds, a.sequences(), a.tokens());
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) run(b, bounds[b], bounds[b + 1] - bounds[b]);
  };
  if (a.sequences()) torch::stable::parallel_for(0, a.sequences(), 1 + 65536 * a.sequences() / (a.tokens() + 1), some);
}

template <class T>
static void response_sums_cpu(const ResponseArguments& a) {
  const T *logprobs = a.logprobs.const_data_ptr<T>(), *advantages = a.advantages.const_data_ptr<T>();
  const bool* mask = a.action_mask.const_data_ptr<bool>();
  double* sums = a.sums->mutable_data_ptr<double>();
  for_responses(a, [&](int64_t b, int64_t at, int64_t count) {
    double own[kResponseSums];
    kernels<T>().response_sums(logprobs + at, advantages + at, mask + at, count, own);
    for (int i = 0; i < kResponseSums; ++i) sums[i * a.sequences() + b] = own[i];
  });
}

template <class T>
static void response_loss_cpu(const ResponseArguments& a) {
  const T *logprobs = a.logprobs.const_data_ptr<T>(), *advantages = a.advantages.const_data_ptr<T>();
  const bool* mask = a.action_mask.const_data_ptr<bool>();
  const double *weights = a.weights->const_data_ptr<double>(), denominator = *a.denominator->const_data_ptr<double>();
  T* coefficient = a.coefficient->mutable_data_ptr<T>();
  std::vector<double> partials(2 * a.sequences());
  for_responses(a, [&](int64_t b, int64_t at, int64_t count) {
    kernels<T>().response_loss(logprobs + at, advantages + at, mask + at, count, a.alpha, -weights[b] / denominator,
                               coefficient + at, &partials[2 * b]);
  });
  double* sides = a.sides->mutable_data_ptr<double>();
  sides[0] = sides[1] = 0;
  for (int64_t b = 0; b < a.sequences(); ++b) sides[0] += partials[2 * b], sides[1] += partials[2 * b + 1];
  *a.loss->mutable_data_ptr<T>() = T(sides[0] + sides[1]);
}

static bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float; }

static constexpr Kernel kCpu = {
    [](const GaeArguments& a) { is_float(a.rewards) ? gae_cpu<float>(a) : gae_cpu<double>(a); },
    [](const PolicyArguments& a) {
      is_float(a.logprobs) ? policy_cpu<float>(a, a.dis_rule<float>(), kernels<float>().dis)
                           : policy_cpu<double>(a, a.dis_rule<double>(), kernels<double>().dis);
    },
    [](const PolicyArguments& a) {
      is_float(a.logprobs) ? policy_cpu<float>(a, a.ppo_rule<float>(), kernels<float>().ppo_clip)
                           : policy_cpu<double>(a, a.ppo_rule<double>(), kernels<double>().ppo_clip);
    },
    [](const ResponseArguments& a) { is_float(a.logprobs) ? response_sums_cpu<float>(a) : response_sums_cpu<double>(a); },
    [](const ResponseArguments& a) { is_float(a.logprobs) ? response_loss_cpu<float>(a) : response_loss_cpu<double>(a); },
};

STABLE_TORCH_LIBRARY(megasao, library) {
  library.def(
      "gae(Tensor rewards, Tensor values, Tensor action_mask, Tensor cu_seqlens, Tensor lam, Tensor bootstrap, "
      "float gamma) -> (Tensor, Tensor)");
  library.def(
      "gae_out(Tensor rewards, Tensor values, Tensor action_mask, Tensor cu_seqlens, Tensor lam, Tensor bootstrap, "
      "float gamma, Tensor(a!) advantages, Tensor(b!) returns) -> ()");
  library.def(
      "dis(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask, Tensor denominator, "
      "float lower, float upper) -> (Tensor, Tensor, Tensor)");
  library.def(
      "dis_out(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask, Tensor denominator, "
      "float lower, float upper, Tensor(a!) loss, Tensor(b!) coefficient, Tensor(c!) stats) -> ()");
  library.def(
      "ppo_clip(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask, Tensor denominator, "
      "float low, float high, float dual) -> (Tensor, Tensor, Tensor)");
  library.def(
      "ppo_clip_out(Tensor logprobs, Tensor rollout_logprobs, Tensor advantages, Tensor action_mask, "
      "Tensor denominator, float low, float high, float dual, Tensor(a!) loss, Tensor(b!) coefficient, "
      "Tensor(c!) stats) -> ()");
  library.def(
      "response_sums(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens) -> Tensor");
  library.def(
      "response_sums_out(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens, "
      "Tensor(a!) sums) -> ()");
  library.def(
      "response_loss(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens, Tensor weights, "
      "Tensor denominator, float alpha) -> (Tensor, Tensor, Tensor)");
  library.def(
      "response_loss_out(Tensor logprobs, Tensor advantages, Tensor action_mask, Tensor cu_seqlens, Tensor weights, "
      "Tensor denominator, float alpha, Tensor(a!) loss, Tensor(b!) coefficient, Tensor(c!) sides) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(megasao, CPU, library) { Operators<kCpu>::register_all(library); }

}  // namespace megasao

// Read by `megasao info` through ctypes.
extern "C" __attribute__((visibility("default"))) const char* megasao_cpu_isa() { return megasao::selected_kernels().name; }
extern "C" __attribute__((visibility("default"))) const char* megasao_cuda_archs() {
#if defined(MEGASAO_CUDA_ARCHS)
  return MEGASAO_CUDA_ARCHS;
#else
  return "";
#endif
}
