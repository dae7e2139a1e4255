// Encoders that send every element: one pass, gradient and residual read once, residual and
// payload written once. The contract of each payload is in pscore/compressors. `residual` may be
// null for those that can do without.

__device__ inline void ternary8(float* u, float threshold, float value, int n, int* code) {
  for (int k = 0; k < EACH; ++k) {
    bool up = u[k] >= threshold, down = u[k] <= -threshold;
    code[k] = place(k) < n ? (up ? 3 : (down ? 2 : 0)) : 0;
    u[k] = u[k] - (up ? value : (down ? -value : 0.0f));
  }
}

// Runs before what encodes: says in `bad` whether float32 holds gradient and residual together, and
// whether the gradient is one of numbers.
extern "C" __global__ void room(const float* grad, const float* residual, int n, int* bad) {
  float u[EACH];
  load8(grad, n, u);
  note8(u, bad + 1);
  if (residual) {
    float r[EACH];
    load8(residual, n, r);
    for (int k = 0; k < EACH; ++k) u[k] = r[k] + u[k];
    note8(u, bad);
  }
}

extern "C" __global__ void two_bit_fixed(const float* grad, float* residual, float threshold,
                                         u8* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  int code[EACH];
  take8(grad, residual, n, u);
  ternary8(u, threshold, threshold, n, code);
  store8(residual, n, u);
  store_codes(out, n, code);
}

extern "C" __global__ void two_bit_adapted(const float* grad, float* residual, float factor,
                                           float* scales, u8* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  int code[EACH];
  take8(grad, residual, n, u);
  float limit = max_abs8(u);
  const float* x = stage8(u);
  double mean = sample_squares(x) / (double)num_sampled(numel_here(n));
  float threshold = (float)((double)factor * sqrt(mean));
  int count = count_beyond(x, threshold);
  float value = mean_beyond(x, threshold, count);
  if (count == 0) threshold = value = limit;
  bool is_sent = value >= SCALE_MIN;
  if (threadIdx.x == 0) scales[blockIdx.x] = is_sent ? value : 0.0f;
  ternary8(u, is_sent ? threshold : float_of(INF_BITS), value, n, code);
  // Beyond every element the threshold leaves it as it was.
  store8(residual, n, u);
  store_codes(out, n, code);
}

extern "C" __global__ void one_bit(const float* grad, float* residual, float* scales, u8* out,
                                   int n, int* bad) {
  if (is_refused(bad)) return;
  __shared__ u8 nibbles[2][THREADS];
  float u[EACH];
  take8(grad, residual, n, u);
  float mean = mean_abs8(stage8(u), numel_here(n));
  float scale = mean >= SCALE_MIN ? mean : 0.0f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int row = 0; row < 2; ++row) {
    int nibble = 0;
    for (int c = 0; c < 4; ++c) {
      int k = 4 * row + c;
      bool is_negative = u[k] < 0.0f && place(k) < n;
      nibble = nibble << 1 | (is_negative ? 1 : 0);
      u[k] = u[k] - (is_negative ? -scale : scale);
    }
    nibbles[row][threadIdx.x] = (u8)nibble;
  }
  __syncthreads();
  store8(residual, n, u);
  int t = threadIdx.x, row = t >> 7, pair = (t & 127) * 2;
  int i = blockIdx.x * BLOCK + row * ROW + pair * 4;
  if (i < (n + 31) / 32 * 32) {
    out[i >> 3] = (u8)(nibbles[row][pair] << 4 | nibbles[row][pair + 1]);
  }
}

#define INT8_SCALE_MAX 2.67938839e+36f  // int8.py: SCALE_MAX

extern "C" __global__ void int8_levels(const float* grad, float* residual, float* scales,
                                       signed char* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  take8(grad, residual, n, u);
  float limit = max_abs8(u);
  bool is_sent = limit >= SCALE_MIN;
  float scale = is_sent ? fminf(limit / 127.0f, INT8_SCALE_MAX) : 0.0f;
  float inverse = is_sent ? 127.0f / limit : 0.0f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (int k = 0; k < EACH; ++k) {
    float level = (u[k] * inverse + 12582912.0f) - 12582912.0f;
    if (place(k) < n) out[place(k)] = (signed char)(int)level;
    u[k] = u[k] - level * scale;
  }
  store8(residual, n, u);
}

extern "C" __global__ void qsgd(const float* grad, float* residual, float levels,
                                float scale_max, u32 low, u32 high, float* scales,
                                signed char* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  take8(grad, residual, n, u);
  float limit = max_abs8(u);
  bool is_sent = limit >= SCALE_MIN;
  float scale = is_sent ? fminf(limit / levels, scale_max) : 0.0f;
  float inverse = is_sent ? levels * 65536.0f / limit : 0.0f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  int noise[EACH];
  draw8(low, high, noise);
  for (int k = 0; k < EACH; ++k) {
    int level = ((int)(u[k] * inverse) + noise[k]) >> 16;
    if (place(k) < n) out[place(k)] = (signed char)level;
    u[k] = u[k] - (float)level * scale;
  }
  if (residual) store8(residual, n, u);
}

extern "C" __global__ void terngrad(const float* grad, float* residual, u32 low, u32 high,
                                    float* scales, u8* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  int code[EACH];
  take8(grad, residual, n, u);
  float limit = max_abs8(u);
  float clip = (float)(2.5 * sqrt(sum_squares8(stage8(u)) / (double)numel_here(n)));
  float scale = limit < clip ? limit : clip;
  scale = scale >= SCALE_MIN ? scale : 0.0f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  float inverse = scale > 0.0f ? 65536.0f / scale : 0.0f;
  int noise[EACH];
  draw8(low, high, noise);
  for (int k = 0; k < EACH; ++k) {
    bool is_sent = noise[k] < (int)(fabsf(u[k]) * inverse), is_negative = u[k] < 0.0f;
    code[k] = is_sent && place(k) < n ? (is_negative ? 2 : 3) : 0;
    u[k] = u[k] - (is_sent ? (is_negative ? -scale : scale) : 0.0f);
  }
  if (residual) store8(residual, n, u);
  store_codes(out, n, code);
}

extern "C" __global__ void natural(const float* grad, float* residual, u32 low, u32 high, u8* out,
                                   int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  take8(grad, residual, n, u);
  int noise[EACH];
  draw8(low, high, noise);
  for (int k = 0; k < EACH; ++k) {
    int code = (int)((u32)(magnitude_of(u[k]) + (noise[k] << 7)) >> 23) - 17;
    code = code > 127 ? 127 : (code < 0 ? 0 : code);
    int sign = code > 0 ? (int)((u32)bits_of(u[k]) >> 24) & 0x80 : 0;
    if (place(k) < n) out[place(k)] = (u8)(sign | code);
    u[k] = u[k] - (code > 0 ? float_of((int)((u32)sign << 24 | (u32)(code + 17) << 23)) : 0.0f);
  }
  if (residual) store8(residual, n, u);
}

__device__ inline int half_of(float x) {
  float clipped = x < -65504.0f ? -65504.0f : (x > 65504.0f ? 65504.0f : x);
  int b = magnitude_of(clipped), sign = (int)((u32)bits_of(x) >> 16) & 0x8000;
  int normal = (b - (112 << 23) + 0xfff + (b >> 13 & 1)) >> 13;
  int below = bits_of(fabsf(clipped) + 0.5f) - (126 << 23);
  return sign | (b < 113 << 23 ? below : normal);
}

__device__ inline float float_of_half(int h) {
  int magnitude = (h & 0x7fff) << 13;
  bool is_small = magnitude < 0x400 << 13;
  float x = float_of(magnitude + (is_small ? 113 << 23 : 112 << 23));
  x = x - (is_small ? 6.103515625e-05f : 0.0f);  // 2^-14
  return h & 0x8000 ? -x : x;
}

extern "C" __global__ void fp16(const float* grad, float* residual, u16* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  take8(grad, residual, n, u);
  for (int k = 0; k < EACH; ++k) {
    int half = half_of(u[k]);
    if (place(k) < n) out[place(k)] = (u16)half;
    u[k] = u[k] - float_of_half(half);
  }
  store8(residual, n, u);
}

extern "C" __global__ void bf16(const float* grad, float* residual, u16* out, int n, int* bad) {
  if (is_refused(bad)) return;
  float u[EACH];
  take8(grad, residual, n, u);
  for (int k = 0; k < EACH; ++k) {
    u32 b = (u32)magnitude_of(u[k]), sign = ((u32)bits_of(u[k]) >> 16) & 0x8000u;
    u32 rounded = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    u32 upper = sign | (rounded > 0x7f7fu ? 0x7f7fu : rounded);
    if (place(k) < n) out[place(k)] = (u16)upper;
    u[k] = u[k] - float_of((int)(upper << 16));
  }
  store8(residual, n, u);
}
