// What the kernels share. Compiled by NVRTC as C++17 without fused multiply-add, and by the tests
// as C++ for the CPU (tests/unit/pscore/cuda/shim.hpp): the same bits as the Numba kernels.
//
// A thread block has 256 threads and works on one block of 2048 elements: thread t has elements
// 4t..4t+3 of each of its two rows of 1024, so that a warp reads 512 bytes at once.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define ROW 1024
#define BLOCK 2048
#define EACH 8
#define INF_BITS 0x7f800000
#define SCALE_MIN 7.888609052210118e-31f  // 2^-100

__device__ inline int bits_of(float x) { return __float_as_int(x); }
__device__ inline float float_of(int x) { return __int_as_float(x); }
__device__ inline int magnitude_of(float x) { return bits_of(x) & 0x7fffffff; }

// Element k of this thread: k / 4 is its row.
__device__ inline int place(int k) {
  return blockIdx.x * BLOCK + (k >> 2) * ROW + threadIdx.x * 4 + (k & 3);
}

__device__ inline void load8(const float* from, int n, float* x) {
  for (int row = 0; row < 2; ++row) {
    int i = place(4 * row);
    if (i + 3 < n) {
      float4 v = *reinterpret_cast<const float4*>(from + i);
      x[4 * row] = v.x; x[4 * row + 1] = v.y; x[4 * row + 2] = v.z; x[4 * row + 3] = v.w;
    } else {
      for (int c = 0; c < 4; ++c) x[4 * row + c] = i + c < n ? from[i + c] : 0.0f;
    }
  }
}

__device__ inline void store8(float* to, int n, const float* x) {
  for (int row = 0; row < 2; ++row) {
    int i = place(4 * row);
    if (i + 3 < n) {
      float4 v = {x[4 * row], x[4 * row + 1], x[4 * row + 2], x[4 * row + 3]};
      *reinterpret_cast<float4*>(to + i) = v;
    } else {
      for (int c = 0; c < 4; ++c) if (i + c < n) to[i + c] = x[4 * row + c];
    }
  }
}

// `bad` is two numbers: whether gradient and residual are beyond float32 together, and whether the
// gradient holds NaN or Inf. `room` says both. Either way nothing of it may enter what is kept.
__device__ inline bool is_refused(const int* bad) { return bad[0] != 0 || bad[1] != 0; }

// Says in `bad` whether one of this thread's elements is beyond float32.
__device__ inline void note8(const float* u, int* bad) {
  int largest = 0;
  for (int k = 0; k < EACH; ++k) {
    int m = magnitude_of(u[k]);
    largest = m > largest ? m : largest;
  }
  if (largest >= INF_BITS) *bad = 1;
}

// u = grad + residual, or grad alone.
__device__ inline void take8(const float* grad, const float* residual, int n, float* u) {
  load8(grad, n, u);
  if (residual) {
    float r[EACH];
    load8(residual, n, r);
    for (int k = 0; k < EACH; ++k) u[k] = r[k] + u[k];
  }
}

// The block's elements in shared memory, so that thread t can add t, t + 256 ... t + 1792.
__device__ inline const float* stage8(const float* u) {
  __shared__ float x[BLOCK];
  for (int k = 0; k < EACH; ++k) x[place(k) - blockIdx.x * BLOCK] = u[k];
  __syncthreads();
  return x + threadIdx.x;
}

// lane[t] += lane[t + s] for s in 128, 64 ... 1: the order of the contract.
template <class T>
__device__ inline T fold_lanes(T lane) {
  __shared__ T lanes[THREADS];
  int t = threadIdx.x;
  lanes[t] = lane;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half >>= 1) {
    if (t < half) lanes[t] += lanes[t + half];
    __syncthreads();
  }
  T total = lanes[0];
  __syncthreads();
  return total;
}

template <class T>
__device__ inline T sum_abs8(const float* x) {
  return fold_lanes<T>((((T)fabsf(x[0]) + (T)fabsf(x[256])) + ((T)fabsf(x[512]) + (T)fabsf(x[768]))) +
                       (((T)fabsf(x[1024]) + (T)fabsf(x[1280])) +
                        ((T)fabsf(x[1536]) + (T)fabsf(x[1792]))));
}

// In float64 where float32 does not hold the sum.
__device__ inline float mean_abs8(const float* x, int numel) {
  float total = sum_abs8<float>(x);
  if (total < float_of(INF_BITS)) return total / (float)numel;
  return (float)(sum_abs8<double>(x) / (double)numel);
}

__device__ inline float beyond(float x, float threshold) {
  float size = fabsf(x);
  return size >= threshold ? size : 0.0f;
}

// What two_bit.py asks of a block's sample: elements 0 to 255 and 1024 to 1279.
__device__ inline float mean_beyond(const float* x, float threshold, int count) {
  float a = beyond(x[0], threshold), b = beyond(x[1024], threshold);
  float total = fold_lanes<float>(a + b);
  if (total < float_of(INF_BITS)) return total / (float)count;
  return (float)(fold_lanes<double>((double)a + (double)b) / (double)count);
}

__device__ inline int count_beyond(const float* x, float threshold) {
  return fold_lanes<int>((beyond(x[0], threshold) > 0.0f) + (beyond(x[1024], threshold) > 0.0f));
}

__device__ inline double square(float x) { return (double)x * (double)x; }

// In float32 where that holds it.
__device__ inline bool holds_squares(float total) {
  return total >= 8.673617379884035e-19f && total <= 1.152921504606847e18f;  // 2^-60, 2^60
}

__device__ inline double sum_squares8(const float* x) {
  float total = fold_lanes<float>(
      ((x[0] * x[0] + x[256] * x[256]) + (x[512] * x[512] + x[768] * x[768])) +
      ((x[1024] * x[1024] + x[1280] * x[1280]) + (x[1536] * x[1536] + x[1792] * x[1792])));
  return holds_squares(total) ? (double)total : fold_lanes<double>(
      ((square(x[0]) + square(x[256])) + (square(x[512]) + square(x[768]))) +
      ((square(x[1024]) + square(x[1280])) + (square(x[1536]) + square(x[1792]))));
}

__device__ inline double sample_squares(const float* x) {
  float total = fold_lanes<float>(x[0] * x[0] + x[1024] * x[1024]);
  return holds_squares(total) ? (double)total
                              : fold_lanes<double>(square(x[0]) + square(x[1024]));
}

__device__ inline int num_sampled(int numel) {
  int second = numel < ROW ? 0 : numel - ROW;
  return (numel < THREADS ? numel : THREADS) + (second < THREADS ? second : THREADS);
}

__device__ inline float max_abs8(const float* u) {
  __shared__ int part[THREADS];
  int t = threadIdx.x, largest = 0;
  for (int k = 0; k < EACH; ++k) {
    int m = magnitude_of(u[k]);
    largest = m > largest ? m : largest;
  }
  part[t] = largest;
  __syncthreads();
  for (int half = THREADS / 2; half > 0; half >>= 1) {
    if (t < half && part[t + half] > part[t]) part[t] = part[t + half];
    __syncthreads();
  }
  int found = part[0];
  __syncthreads();
  return float_of(found);
}

__device__ inline int numel_here(int n) {
  int left = n - (int)blockIdx.x * BLOCK;
  return left < BLOCK ? left : BLOCK;
}

// pscore/compressors/draw.py
__device__ inline u32 draw_bits(u32 index, u32 low, u32 high) {
  u32 x = index * 0x9e3779b1u ^ low;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x += high;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// The 16 bits of each element of this thread: two elements from one hash.
__device__ inline void draw8(u32 low, u32 high, int* noise) {
  for (int k = 0; k < EACH; k += 2) {
    u32 bits = draw_bits((u32)place(k) >> 1, low, high);
    noise[k] = (int)(bits & 0xffffu);
    noise[k + 1] = (int)(bits >> 16);
  }
}

// Four 2-bit codes into the byte of this thread and row; the padding to a word is zero.
__device__ inline void store_codes(u8* out, int n, const int* code) {
  for (int row = 0; row < 2; ++row) {
    int i = place(4 * row);
    if (i < (n + 15) / 16 * 16) {
      const int* c = code + 4 * row;
      out[i >> 2] = (u8)(c[0] << 6 | c[1] << 4 | c[2] << 2 | c[3]);
    }
  }
}
