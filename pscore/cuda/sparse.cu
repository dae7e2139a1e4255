// Top-k by index and value: the threshold is selected on the device, and nothing waits for it.
//
// `select` is the state of one encoding: the bits found so far of the threshold, how many of those
// equal to them are still wanted, whether the sample found too many, and how many are sent.

#define BINS 2048

struct Select {
  int prefix;
  int left;
  int exceeded;
  int count;
};

extern "C" __global__ void take(const float* grad, float* residual, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  take8(grad, residual, n, u);
  store8(residual, n, u);
}

__device__ inline void dgc8(const float* grad, const float* momentum, const float* velocity,
                            float factor, float mu, int nesterov, int n, float* m, float* v) {
  float g[EACH];
  load8(grad, n, g);
  load8(momentum, n, m);
  load8(velocity, n, v);
  float ahead = nesterov ? mu : 1.0f, own = nesterov ? 1.0f : 0.0f;
  for (int k = 0; k < EACH; ++k) {
    float x = g[k] * factor;
    m[k] = mu * m[k] + ahead * x;
    v[k] = v[k] + (m[k] + own * x);
  }
}

// Runs before `dgc_correct`, as `room` does.
extern "C" __global__ void dgc_room(const float* grad, const float* momentum, const float* velocity,
                                    float factor, float mu, int nesterov, int n, int* bad) {
  float g[EACH], m[EACH], v[EACH];
  load8(grad, n, g);
  note8(g, bad + 1);
  dgc8(grad, momentum, velocity, factor, mu, nesterov, n, m, v);
  note8(m, bad);
  note8(v, bad);
}

extern "C" __global__ void dgc_correct(const float* grad, float* momentum, float* velocity,
                                       float factor, float mu, int nesterov, int n, int* bad) {
  if (is_refused(bad)) return;
  float m[EACH], v[EACH];
  dgc8(grad, momentum, velocity, factor, mu, nesterov, n, m, v);
  store8(momentum, n, m);
  store8(velocity, n, v);
}

// Starts a selection of the k-th largest; with `if_exceeded`, only where the sample was misled.
extern "C" __global__ void select_begin(Select* select, int* bins, int k, int if_exceeded) {
  if (if_exceeded && !select->exceeded) return;
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
  if (threadIdx.x == 0) {
    select->prefix = 0;
    select->left = k;
    if (!if_exceeded) select->exceeded = 0;
  }
}

extern "C" __global__ void select_count(const float* residual, int n, int stride, int shift,
                                        int width, const Select* select, int* bins,
                                        int if_exceeded) {
  __shared__ int own[BINS];
  if (if_exceeded && !select->exceeded) return;
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) own[bin] = 0;
  __syncthreads();
  int mask = (1 << width) - 1, num_samples = (n + stride - 1) / stride;
  for (int k = 0; k < EACH; ++k) {
    int i = place(k);
    if (i >= num_samples) continue;
    int m = magnitude_of(residual[(long long)i * stride]);
    if ((long long)m >> (shift + width) == select->prefix) atomicAdd(&own[m >> shift & mask], 1);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
    if (own[bin]) atomicAdd(&bins[bin], own[bin]);
  }
}

// One block: fixes the next digit of the threshold, and clears the bins.
extern "C" __global__ void select_digit(Select* select, int* bins, int width, int if_exceeded) {
  __shared__ int sums[THREADS];
  if (if_exceeded && !select->exceeded) return;
  int t = threadIdx.x, each = BINS / THREADS, total = 0;
  for (int b = 0; b < each; ++b) total += bins[t * each + b];
  sums[t] = total;
  __syncthreads();
  if (t == 0) {
    int left = select->left, group = THREADS - 1;
    while (group > 0 && sums[group] < left) left -= sums[group--];
    int digit = group * each + each - 1;
    while (digit > group * each && bins[digit] < left) left -= bins[digit--];
    select->prefix = select->prefix << width | digit;
    select->left = left;
  }
  __syncthreads();
  for (int b = 0; b < each; ++b) bins[t * each + b] = 0;
}

// One thread: a sampled threshold takes what reaches it, at least what is not zero.
extern "C" __global__ void select_sampled(Select* select) {
  if (threadIdx.x == 0) {
    select->prefix = select->prefix - 1 > 1 ? select->prefix - 1 : 1;
    select->left = 0;
  }
}

// How many of each block are above the threshold, and how many equal it.
extern "C" __global__ void count_blocks(const float* residual, int n, const Select* select,
                                        int* above, int* equal, int if_exceeded) {
  __shared__ int sums[2];
  if (if_exceeded && !select->exceeded) return;
  if (threadIdx.x < 2) sums[threadIdx.x] = 0;
  __syncthreads();
  float u[EACH];
  load8(residual, n, u);
  for (int k = 0; k < EACH; ++k) {
    int m = magnitude_of(u[k]);
    if (m > select->prefix) atomicAdd(&sums[0], 1);
    else if (m == select->prefix && m > 0 && place(k) < n) atomicAdd(&sums[1], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    above[blockIdx.x] = sums[0];
    equal[blockIdx.x] = sums[1];
  }
}

// One block: where each block writes, and how many elements equal to the threshold it may send. The
// first `left` equal elements are sent, so the number before a block is known from a sum alone.
extern "C" __global__ void place_blocks(Select* select, int* above, int* equal, int num_blocks,
                                        int limit, int if_exceeded) {
  __shared__ int some_above[THREADS];
  __shared__ int some_equal[THREADS];
  if (if_exceeded && !select->exceeded) return;
  int t = threadIdx.x, left = select->left, each = (num_blocks + THREADS - 1) / THREADS;
  int first = t * each, stop = first + each < num_blocks ? first + each : num_blocks;
  int num_above = 0, num_equal = 0;
  for (int b = first; b < stop; ++b) {
    num_above += above[b];
    num_equal += equal[b];
  }
  some_above[t] = num_above;
  some_equal[t] = num_equal;
  __syncthreads();
  for (int back = 1; back < THREADS; back <<= 1) {  // Sums up to and with each thread's part.
    int more_above = t >= back ? some_above[t - back] : 0;
    int more_equal = t >= back ? some_equal[t - back] : 0;
    __syncthreads();
    some_above[t] += more_above;
    some_equal[t] += more_equal;
    __syncthreads();
  }
  int before_above = some_above[t] - num_above, before_equal = some_equal[t] - num_equal;
  for (int b = first; b < stop; ++b) {
    int here_above = above[b], here_equal = equal[b];
    int sent = before_equal < left ? before_equal : left, rest = left - sent;
    above[b] = before_above + sent;
    equal[b] = here_equal < rest ? here_equal : rest;
    before_above += here_above;
    before_equal += here_equal;
  }
  if (t == THREADS - 1) {
    int sent = some_equal[t] < left ? some_equal[t] : left;
    select->count = some_above[t] + sent;
    if (!if_exceeded) select->exceeded = select->count > limit;
  }
}

// Moves the selected elements to the payload in order. Thread t has elements 8t..8t+7 of its block.
extern "C" __global__ void move(float* residual, float* momentum, int n, const Select* select,
                                const int* above, const int* equal, u8* out, const int* bad) {
  if (is_refused(bad)) return;
  __shared__ int counts[THREADS];
  __shared__ int ties[THREADS];
  int t = threadIdx.x, first = blockIdx.x * BLOCK + t * EACH;
  int num_above = 0, num_equal = 0;
  for (int k = 0; k < EACH; ++k) {
    if (first + k >= n) break;
    int m = magnitude_of(residual[first + k]);
    num_above += m > select->prefix;
    num_equal += m == select->prefix && m > 0;
  }
  ties[t] = num_equal;
  __syncthreads();
  for (int step = 1; step < THREADS; step <<= 1) {
    int before = t >= step ? ties[t - step] : 0;
    __syncthreads();
    ties[t] += before;
    __syncthreads();
  }
  int allowed = equal[blockIdx.x] - (ties[t] - num_equal);
  allowed = allowed < 0 ? 0 : (allowed < num_equal ? allowed : num_equal);
  counts[t] = num_above + allowed;
  __syncthreads();
  for (int step = 1; step < THREADS; step <<= 1) {
    int before = t >= step ? counts[t - step] : 0;
    __syncthreads();
    counts[t] += before;
    __syncthreads();
  }
  int to = above[blockIdx.x] + counts[t] - (num_above + allowed);
  u32* indices = reinterpret_cast<u32*>(out + 4);
  float* values = reinterpret_cast<float*>(out + 4) + select->count;
  for (int k = 0; k < EACH; ++k) {
    if (first + k >= n) break;
    float x = residual[first + k];
    int m = magnitude_of(x);
    bool is_tie = m == select->prefix && m > 0 && allowed > 0;
    if (m <= select->prefix && !is_tie) continue;
    allowed -= is_tie;
    indices[to] = (u32)(first + k);
    values[to] = x;
    residual[first + k] = 0.0f;
    if (momentum) momentum[first + k] = 0.0f;
    ++to;
  }
  if (blockIdx.x == 0 && t == 0) *reinterpret_cast<u32*>(out) = (u32)select->count;
}

__device__ inline int randomk_position(int j, int k, int n, u32 low, u32 high) {
  long long first = (long long)j * n / k, behind = (long long)(j + 1) * n / k;
  return (int)(first + (long long)draw_bits((u32)j, low, high) % (behind - first));
}

extern "C" __global__ void randomk(float* residual, int n, int k, u32 low, u32 high, float* values,
                                   const int* bad) {
  if (is_refused(bad)) return;
  int j = blockIdx.x * THREADS + threadIdx.x;
  if (j >= k) return;
  int i = randomk_position(j, k, n, low, high);
  values[j] = residual[i];
  residual[i] = 0.0f;
}
