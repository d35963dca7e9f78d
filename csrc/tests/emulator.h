// Runs CUDA kernels unchanged under g++: a fiber per thread, an OS thread per resident block, random order between
// synchronisation points. Aborts on barriers that not all threads reach. What it cannot show: the weak memory model
// (a missing fence, or a missing barrier before a cross-block flag), data races inside a warp, and any speed.
#pragma once
#define MEGASAO_EMULATOR 1

#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace emulator {

struct Index {
  unsigned x = 0;
};

enum class Wait { kNothing, kBlock, kWarp, kDone };

constexpr int kLanes = 32;
constexpr size_t kStack = 256 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Wait wait = Wait::kNothing;
  int operation = 0;         // what the warp waits in: must be the same in all lanes
  uint64_t sent = 0, received = 0;
  int source = 0;            // lane that this one reads
  void* fake_stack = nullptr;
};

class Block {
 public:
  Block(unsigned index, unsigned blocks, int threads, unsigned seed, const std::function<void()>& kernel)
      : block{index}, grid{blocks}, fibers_(threads), random_(seed), kernel_(kernel) {}

  void run() {
    active = this;
    for (Fiber& fiber : fibers_) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Block::enter), 0);
    }
    while (step()) {
    }
  }

  // Give up the processor until the scheduler has completed what this fiber waits for.
  void pause(Wait wait) {
    Fiber& fiber = fibers_[thread.x];
    fiber.wait = wait;
    __sanitizer_start_switch_fiber(wait == Wait::kDone ? nullptr : &fiber.fake_stack, main_stack_, main_size_);
    swapcontext(&fiber.context, &main_);
    __sanitizer_finish_switch_fiber(fiber.fake_stack, nullptr, nullptr);
  }

  uint64_t exchange(uint64_t value, int source, int operation) {
    Fiber& fiber = fibers_[thread.x];
    fiber.sent = value;
    fiber.source = source;
    fiber.operation = operation;
    pause(Wait::kWarp);
    return fiber.received;
  }

  Index thread, block, grid;
  static thread_local Block* active;

 private:
  static void enter() {
    __sanitizer_finish_switch_fiber(nullptr, &active->main_stack_, &active->main_size_);
    active->kernel_();
    active->pause(Wait::kDone);
  }

  bool step() {
    std::vector<int> ready;
    for (int i = 0; i < int(fibers_.size()); ++i)
      if (fibers_[i].wait == Wait::kNothing) ready.push_back(i);
    if (ready.empty()) return release();
    std::shuffle(ready.begin(), ready.end(), random_);
    for (int i : ready) {
      thread.x = unsigned(i);
      void* fake = nullptr;
      __sanitizer_start_switch_fiber(&fake, fibers_[i].stack.get(), kStack);
      swapcontext(&main_, &fibers_[i].context);
      __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
    }
    return true;
  }

  // Complete one barrier or the warp operations that all lanes have reached.
  bool release() {
    int done = 0, at_barrier = 0;
    bool progress = false;
    for (Fiber& fiber : fibers_) done += fiber.wait == Wait::kDone, at_barrier += fiber.wait == Wait::kBlock;
    const int threads = int(fibers_.size());
    if (done == threads) return false;
    if (at_barrier == threads) {
      for (Fiber& fiber : fibers_) fiber.wait = Wait::kNothing;
      return true;
    }
    for (int first = 0; first < threads; first += kLanes) progress |= release_warp(&fibers_[first]);
    if (!progress) {
      std::fprintf(stderr, "deadlock: %d threads done, %d at a barrier, of %d\n", done, at_barrier, threads);
      std::abort();
    }
    return true;
  }

  static bool release_warp(Fiber* lanes) {
    for (int i = 0; i < kLanes; ++i)
      if (lanes[i].wait != Wait::kWarp) return false;
    for (int i = 0; i < kLanes; ++i) {
      if (lanes[i].operation != lanes[0].operation) {
        std::fprintf(stderr, "lanes of a warp are in different operations\n");
        std::abort();
      }
      lanes[i].received = lanes[lanes[i].source].sent;
    }
    for (int i = 0; i < kLanes; ++i) lanes[i].wait = Wait::kNothing;
    return true;
  }

  std::vector<Fiber> fibers_;
  std::mt19937 random_;
  const std::function<void()>& kernel_;
  ucontext_t main_;
  const void* main_stack_ = nullptr;
  size_t main_size_ = 0;
};

inline thread_local Block* Block::active = nullptr;

template <class T>
T exchange(T value, int source, int operation) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = Block::active->exchange(bits, source, operation);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Blocks start in random order, `resident` at a time.
inline void launch(unsigned blocks, int threads, unsigned resident, unsigned seed, const std::function<void()>& kernel) {
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  std::atomic<unsigned> next{0};
  const auto multiprocessor = [&] {
    for (unsigned i = next++; i < blocks; i = next++)
      std::thread([&, i] { Block(order[i], blocks, threads, seed * 7919 + i, kernel).run(); }).join();
  };
  std::vector<std::thread> workers;
  for (unsigned i = 0; i < resident; ++i) workers.emplace_back(multiprocessor);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace emulator

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static thread_local
#define __launch_bounds__(threads)
#define threadIdx (emulator::Block::active->thread)
#define blockIdx (emulator::Block::active->block)
#define gridDim (emulator::Index{emulator::Block::active->grid})

inline void __syncthreads() { emulator::Block::active->pause(emulator::Wait::kBlock); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline unsigned atomicAdd(unsigned* where, unsigned value) { return __atomic_fetch_add(where, value, __ATOMIC_SEQ_CST); }

template <class T>
T __shfl_down_sync(unsigned, T value, int offset) {
  const int lane = int(threadIdx.x) % emulator::kLanes;
  return emulator::exchange(value, lane + offset < emulator::kLanes ? lane + offset : lane, offset);
}

template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return emulator::exchange(value, source, 1000 + source);
}
