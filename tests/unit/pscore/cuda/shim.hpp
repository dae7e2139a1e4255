// CUDA's words for the CPU: a thread block is 256 fibers, __syncthreads() lets the others catch up.
//
// Blocks run in a random order, and so do the threads of a block up to each barrier: a kernel that
// needs an order, or lacks a barrier, makes other numbers. Before a block starts, shared memory
// holds no number. The order is a function of the kernel's blocks, so a failure can be repeated.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <tuple>
#include <ucontext.h>
#include <vector>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#define __global__
#define __device__ static
// In one section, so that it can be overwritten.
#define __shared__ static __attribute__((section("shared_memory")))
extern char __start_shared_memory[], __stop_shared_memory[];

struct Dim3 { unsigned x, y, z; };
struct alignas(16) float4 { float x, y, z, w; };  // As on a device: UBSan finds others.
static Dim3 threadIdx, blockIdx, blockDim, gridDim;

static inline int __float_as_int(float x) { int b; std::memcpy(&b, &x, 4); return b; }
static inline float __int_as_float(int b) { float x; std::memcpy(&x, &b, 4); return x; }
static inline int atomicAdd(int* to, int value) { int old = *to; *to += value; return old; }

namespace shim {
constexpr unsigned kThreads = 256;
constexpr size_t kStack = 64 << 10;
struct Fiber { ucontext_t context; std::vector<char> stack; bool is_done; unsigned barriers; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static void (*body)(void*);
static void* body_arguments;
static std::mt19937 random_order;
static bool flushes;  // Whether denormals are taken for zeros, as -ftz=true has it.

static std::vector<unsigned> shuffled(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random_order);
  return order;
}

static void enter() {
  body(body_arguments);
  fibers[current].is_done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

static void run_block(void (*function)(void*), void* arguments) {
  std::memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
  body = function;
  body_arguments = arguments;
  if (fibers.empty()) fibers.resize(kThreads);
  for (auto& fiber : fibers) {
    fiber.stack.resize(kStack);
    fiber.is_done = false;
    fiber.barriers = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  unsigned done = 0;
  while (done < kThreads) {
    done = 0;
    for (unsigned thread : shuffled(kThreads)) {
      current = thread;
      if (!fibers[current].is_done) {
        threadIdx.x = current;
        swapcontext(&scheduler, &fibers[current].context);
      }
      done += fibers[current].is_done;
    }
    // A barrier that some threads of a block do not reach hangs a GPU: here it ends the test.
    for (auto& fiber : fibers) if (fiber.barriers != fibers[0].barriers) std::abort();
  }
}

// Sets the processor's mode for denormals while it lives; the fibers inherit it.
struct Denormals {
#ifdef __SSE2__
  unsigned kept = _mm_getcsr();
  Denormals() { _mm_setcsr(flushes ? kept | 0x8040u : kept); }
  ~Denormals() { _mm_setcsr(kept); }
#endif
};

template <class... A>
void run(void (*kernel)(A...), unsigned num_blocks, void** values) {
  std::tuple<A...> arguments;
  size_t i = 0;
  std::apply([&](auto&... argument) {
    (std::memcpy(&argument, values[i++], sizeof argument), ...);
  }, arguments);
  using Both = std::pair<void (*)(A...), std::tuple<A...>*>;
  Both both{kernel, &arguments};
  blockDim.x = kThreads;
  gridDim.x = num_blocks;
  random_order.seed(num_blocks);
  Denormals mode;
  for (unsigned block : shuffled(num_blocks)) {
    blockIdx.x = block;
    run_block([](void* pointer) {
      auto* both = static_cast<Both*>(pointer);
      std::apply(both->first, *both->second);
    }, &both);
  }
}
}  // namespace shim

// Chooses whether kernels flush denormals; returns whether this processor can.
extern "C" int flush_denormals(int flushes) {
  shim::flushes = flushes;
#ifdef __SSE2__
  return 1;
#else
  return 0;
#endif
}

static inline void __syncthreads() {
  auto& fiber = shim::fibers[shim::current];
  ++fiber.barriers;
  unsigned self = shim::current;
  swapcontext(&fiber.context, &shim::scheduler);
  threadIdx.x = self;
}
