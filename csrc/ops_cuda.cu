// The CUDA implementations on the stable ABI of torch: compiled by plain nvcc, also against a torch without CUDA.
#include <cuda_runtime.h>

#include "binding.h"
#include "cuda/dis.h"
#include "cuda/gae.h"

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

template <class T>
static void dis_cuda(const DisArguments& a) {
  const int64_t tiles = (a.tokens() + kTile - 1) / kTile;
  const unsigned blocks = unsigned(tiles < 1 ? 1 : tiles < kMaxBlocks ? tiles : kMaxBlocks);
  for (const auto& [tensor, name] : {std::pair{&a.logprobs, "logprobs"}, {&a.rollout_logprobs, "rollout_logprobs"},
                                     {&a.advantages, "advantages"}, {&a.action_mask, "action_mask"},
                                     {&a.coefficient, "coefficient"}})
    check_aligned(*tensor, name);
  const OnDevice on(a.logprobs);
  Tensor memory = scratch_of(a.logprobs, 1 + int64_t(blocks) * kSums);
  double* base = memory.mutable_data_ptr<double>();
  check_cuda(cudaMemsetAsync(base, 0, sizeof(double), on.stream), "cudaMemsetAsync");
  const DisProblem<T> problem = {a.logprobs.const_data_ptr<T>(),
                                 a.rollout_logprobs.const_data_ptr<T>(),
                                 a.advantages.const_data_ptr<T>(),
                                 static_cast<const uint8_t*>(a.action_mask.data_ptr()),
                                 a.denominator.const_data_ptr<double>(),
                                 {T(a.lower), T(a.upper)},
                                 a.tokens(),
                                 a.loss.mutable_data_ptr<T>(),
                                 a.coefficient.mutable_data_ptr<T>(),
                                 a.stats.mutable_data_ptr<double>()};
  dis_kernel<T><<<blocks, kThreads, 0, on.stream>>>(problem, {reinterpret_cast<unsigned*>(base), base + 1});
  check_cuda(cudaGetLastError(), "dis");
}

static void run_gae_cuda(const GaeArguments& a) {
  a.rewards.scalar_type() == ScalarType::Float ? gae_cuda<float>(a) : gae_cuda<double>(a);
}

static void run_dis_cuda(const DisArguments& a) {
  a.logprobs.scalar_type() == ScalarType::Float ? dis_cuda<float>(a) : dis_cuda<double>(a);
}

STABLE_TORCH_LIBRARY_IMPL(megasao, CUDA, library) { Operators<run_gae_cuda, run_dis_cuda>::register_all(library); }

}  // namespace megasao
