// CUDA's words for the CPU: a thread block is 256 fibers, __syncthreads() lets the others catch up.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __shared__ static

struct Dim3 { unsigned x, y, z; };
struct float4 { float x, y, z, w; };
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

static void enter() {
  body(body_arguments);
  fibers[current].is_done = true;
  swapcontext(&fibers[current].context, &scheduler);
}

static void run_block(void (*function)(void*), void* arguments) {
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
    for (current = 0; current < kThreads; ++current) {
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
  for (unsigned block = 0; block < num_blocks; ++block) {
    blockIdx.x = block;
    run_block([](void* pointer) {
      auto* both = static_cast<Both*>(pointer);
      std::apply(both->first, *both->second);
    }, &both);
  }
}
}  // namespace shim

static inline void __syncthreads() {
  auto& fiber = shim::fibers[shim::current];
  ++fiber.barriers;
  unsigned self = shim::current;
  swapcontext(&fiber.context, &shim::scheduler);
  threadIdx.x = self;
}
