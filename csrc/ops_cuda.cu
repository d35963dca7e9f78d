// The CUDA implementations on the stable ABI of torch: compiled by plain nvcc, also against a torch without CUDA.
#include <cuda_runtime.h>

#include "binding.h"
#include "cuda/gae.h"
#include "cuda/policy.h"
#include "cuda/response.h"

// Only a torch with CUDA has this symbol.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace megasao {

static void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "megasao: ", what, ": ", cudaGetErrorString(error));
}

// The current stream of the tensor's device, with that device made current for the launch.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "megasao: this torch has no CUDA");
    const int device = tensor.get_device();
    void* handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &handle));
    stream = static_cast<cudaStream_t>(handle);
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  cudaStream_t stream;

 private:
  int before_ = 0;
};

static void check_aligned(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0, name,
                  ": expected memory aligned to 16 bytes; pass a copy (clone) of this slice");
}

// Scratch from torch's allocator, in float64 so that every part is aligned; zeroed by the caller where it must be.
static Tensor scratch_of(const Tensor& like, int64_t doubles) {
  return torch::stable::new_empty(like, {doubles}, ScalarType::Double);
}

template <class T>
static void gae_cuda(const GaeArguments& a) {
  const int64_t tokens = a.tokens(), tiles = (tokens + kTile - 1) / kTile;
  if (tokens == 0) return;
  STD_TORCH_CHECK(a.sequences() > 0, "cu_seqlens: tokens, but no sequence");
  for (const auto& [tensor, name] : {std::pair{&a.rewards, "rewards"}, {&a.values, "values"},
                                     {&a.action_mask, "action_mask"}, {&a.advantages, "advantages"},
                                     {&a.returns, "returns"}})
    check_aligned(*tensor, name);
  const OnDevice on(a.rewards);
  const int64_t flags = 1 + (tiles + 1) / 2;  // doubles that hold the ticket and the states
  Tensor memory = scratch_of(a.rewards, flags + 3 * tiles);
  double* base = memory.mutable_data_ptr<double>();
  check_cuda(cudaMemsetAsync(base, 0, flags * sizeof(double), on.stream), "cudaMemsetAsync");
  const GaeScratch scratch = {reinterpret_cast<unsigned*>(base), reinterpret_cast<unsigned*>(base + 1), base + flags,
                              base + flags + tiles, base + flags + 2 * tiles};
  const GaeProblem<T> problem = {a.rewards.const_data_ptr<T>(),
                                 a.values.const_data_ptr<T>(),
                                 static_cast<const uint8_t*>(a.action_mask.data_ptr()),
                                 a.cu_seqlens.const_data_ptr<int32_t>(),
                                 a.lam.const_data_ptr<double>(),
                                 a.bootstrap.const_data_ptr<double>(),
                                 a.gamma,
                                 tokens,
                                 a.sequences(),
                                 a.advantages.mutable_data_ptr<T>(),
                                 a.returns.mutable_data_ptr<T>()};
  gae_kernel<T><<<unsigned(tiles), kThreads, 0, on.stream>>>(problem, scratch);
  check_cuda(cudaGetLastError(), "gae");
}

// `tickets` counters that start at zero, and room for `partials` doubles. `memory` owns both.
static Scratch reduction_scratch(const Tensor& like, int64_t tickets, int64_t partials, cudaStream_t stream,
                                 Tensor& memory) {
  const int64_t flags = (tickets + 1) / 2;
  memory = scratch_of(like, flags + partials);
  double* base = memory.mutable_data_ptr<double>();
  check_cuda(cudaMemsetAsync(base, 0, flags * sizeof(double), stream), "cudaMemsetAsync");
  return {reinterpret_cast<unsigned*>(base), base + flags};
}

template <class T, class Rule>
static void policy_cuda(const PolicyArguments& a, Rule rule) {
  constexpr int64_t most = 1024;
  const int64_t tiles = (a.tokens() + kTile - 1) / kTile;
  const unsigned blocks = unsigned(tiles < 1 ? 1 : tiles < most ? tiles : most);
  for (const auto& [tensor, name] : {std::pair{&a.logprobs, "logprobs"}, {&a.rollout_logprobs, "rollout_logprobs"},
                                     {&a.advantages, "advantages"}, {&a.action_mask, "action_mask"},
                                     {&a.coefficient, "coefficient"}})
    check_aligned(*tensor, name);
  const OnDevice on(a.logprobs);
  Tensor memory;
  const Scratch scratch = reduction_scratch(a.logprobs, 1, int64_t(blocks) * kStats, on.stream, memory);
  const PolicyProblem<T> problem = {a.logprobs.const_data_ptr<T>(),
                                    a.rollout_logprobs.const_data_ptr<T>(),
                                    a.advantages.const_data_ptr<T>(),
                                    static_cast<const uint8_t*>(a.action_mask.data_ptr()),
                                    a.denominator.const_data_ptr<double>(),
                                    a.tokens(),
                                    a.loss.mutable_data_ptr<T>(),
                                    a.coefficient.mutable_data_ptr<T>(),
                                    a.stats.mutable_data_ptr<double>()};
  policy_kernel<T, Rule><<<blocks, kThreads, 0, on.stream>>>(problem, rule, scratch);
  check_cuda(cudaGetLastError(), "policy loss");
}

// Enough blocks for each response at their mean length, and enough in all for the whole device.
template <class T>
static ResponseProblem<T> response_problem(const ResponseArguments& a) {
  constexpr int64_t most = 64, device = 512;
  for (const auto& [tensor, name] : {std::pair{&a.logprobs, "logprobs"}, {&a.advantages, "advantages"},
                                     {&a.action_mask, "action_mask"}})
    check_aligned(*tensor, name);
  const int64_t sequences = a.sequences(), even = 1 + a.tokens() / (sequences * kTile), fill = device / sequences;
  const int64_t parts = even > fill ? even : fill;
  return {a.logprobs.const_data_ptr<T>(),
          a.advantages.const_data_ptr<T>(),
          static_cast<const uint8_t*>(a.action_mask.data_ptr()),
          a.cu_seqlens.const_data_ptr<int32_t>(),
          a.tokens(),
          sequences,
          unsigned(parts < most ? parts : most)};
}

template <class T>
static void response_sums_cuda(const ResponseArguments& a) {
  if (a.sequences() == 0) return;
  const ResponseProblem<T> problem = response_problem<T>(a);
  const OnDevice on(a.logprobs);
  const int64_t blocks = problem.sequences * problem.parts;
  Tensor memory;
  const Scratch scratch =
      reduction_scratch(a.logprobs, problem.sequences, blocks * kResponseSums, on.stream, memory);
  double* sums = a.sums->mutable_data_ptr<double>();
  response_sums_kernel<T><<<unsigned(blocks), kThreads, 0, on.stream>>>(problem, sums, scratch);
  check_cuda(cudaGetLastError(), "response_sums");
}

template <class T>
static void response_loss_cuda(const ResponseArguments& a) {
  check_aligned(*a.coefficient, "coefficient");
  const OnDevice on(a.logprobs);
  double* sides = a.sides->mutable_data_ptr<double>();
  T* loss = a.loss->mutable_data_ptr<T>();
  if (a.sequences() == 0) {
    check_cuda(cudaMemsetAsync(sides, 0, 2 * sizeof *sides, on.stream), "cudaMemsetAsync");
    check_cuda(cudaMemsetAsync(loss, 0, sizeof *loss, on.stream), "cudaMemsetAsync");
    return;
  }
  const ResponseProblem<T> problem = response_problem<T>(a);
  const int64_t blocks = problem.sequences * problem.parts;
  Tensor memory;
  const Scratch scratch = reduction_scratch(a.logprobs, 1, 2 * blocks, on.stream, memory);
  const ResponseLosses<T> losses = {a.weights->const_data_ptr<double>(), a.denominator->const_data_ptr<double>(),
                                    a.alpha, loss, a.coefficient->mutable_data_ptr<T>(), sides};
  response_loss_kernel<T><<<unsigned(blocks), kThreads, 0, on.stream>>>(problem, losses, scratch);
  check_cuda(cudaGetLastError(), "response_loss");
}

static bool is_float(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Float; }

static constexpr Kernel kCuda = {
    [](const GaeArguments& a) { is_float(a.rewards) ? gae_cuda<float>(a) : gae_cuda<double>(a); },
    [](const PolicyArguments& a) {
      is_float(a.logprobs) ? policy_cuda<float>(a, a.dis_rule<float>()) : policy_cuda<double>(a, a.dis_rule<double>());
    },
    [](const PolicyArguments& a) {
      is_float(a.logprobs) ? policy_cuda<float>(a, a.ppo_rule<float>()) : policy_cuda<double>(a, a.ppo_rule<double>());
    },
    [](const ResponseArguments& a) {
      is_float(a.logprobs) ? response_sums_cuda<float>(a) : response_sums_cuda<double>(a);
    },
    [](const ResponseArguments& a) {
      is_float(a.logprobs) ? response_loss_cuda<float>(a) : response_loss_cuda<double>(a);
    },
};

STABLE_TORCH_LIBRARY_IMPL(megasao, CUDA, library) { Operators<kCuda>::register_all(library); }

}  // namespace megasao
