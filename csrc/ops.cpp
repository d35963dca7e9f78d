// The operators' schemas, and their CPU implementations on the stable ABI of torch.
#include "binding.h"

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
template <class T>
static void dis_cpu(const DisArguments& a) {
  constexpr int64_t most = 256, least = 8192;
  double partials[most][kDisPartials];
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
      kernels<T>().dis(logprobs + at, rollout + at, advantages + at, mask + at, count, T(a.lower), T(a.upper),
                       denominator, coefficient + at, partials[i]);
    }
  };
  if (pieces) torch::stable::parallel_for(0, pieces, 1 + 65536 / piece, some);
  double total[kDisPartials] = {};
  for (int64_t i = 0; i < pieces; ++i) {
    for (int64_t k = 0; k < 1 + kRatioMax; ++k) total[k] += partials[i][k];
    const double largest = partials[i][1 + kRatioMax];
    if (largest > total[1 + kRatioMax]) total[1 + kRatioMax] = largest;
  }
  *a.loss.mutable_data_ptr<T>() = T(-total[0] / denominator);
  memcpy(a.stats.mutable_data_ptr<double>(), total + 1, kStats * sizeof(double));
}

static void run_gae_cpu(const GaeArguments& a) {
  a.rewards.scalar_type() == ScalarType::Float ? gae_cpu<float>(a) : gae_cpu<double>(a);
}

static void run_dis_cpu(const DisArguments& a) {
  a.logprobs.scalar_type() == ScalarType::Float ? dis_cpu<float>(a) : dis_cpu<double>(a);
}

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
}

STABLE_TORCH_LIBRARY_IMPL(megasao, CPU, library) { Operators<run_gae_cpu, run_dis_cpu>::register_all(library); }

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
