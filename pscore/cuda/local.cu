// Local updates, and the shard's optimizers run by a worker (mirror): one pass over the segments of a
// slice. The formulas are those of pscore/local and pscore/optimizers, in their order of operations.

// A segment that has a gradient: its first element in the slice, its length, and its factors.
struct Row {
  int start;
  int numel;
  float p[10];
};

// All threads work on one segment after the other.
#define EACH_ELEMENT(i)                                                            \
  for (const Row* row = rows; row < rows + num_rows; ++row)                        \
    for (int i = row->start + blockIdx.x * THREADS + threadIdx.x,                  \
             stop = row->start + row->numel; i < stop; i += gridDim.x * THREADS)

extern "C" __global__ void local_sgd(const Row* rows, int num_rows, float* w, const float* g) {
  EACH_ELEMENT(i) {
    float sign = row->p[0], decay = row->p[1], lr = row->p[2];
    w[i] = w[i] - lr * (g[i] * sign + decay * w[i]);
  }
}

extern "C" __global__ void local_glu(const Row* rows, int num_rows, float* w, const float* g,
                                     float* old) {
  EACH_ELEMENT(i) {
    float alpha = row->p[0], beta = row->p[1], decay = row->p[2], lr = row->p[3];
    float shrink = row->p[4], inverse = row->p[5], now = w[i];
    float sync = (shrink * old[i] - now) * inverse;
    old[i] = now;
    w[i] = now - lr * (alpha * g[i] + beta * sync + decay * now);
  }
}

extern "C" __global__ void local_secant(const Row* rows, int num_rows, float* w, const float* g,
                                        const float* sync) {
  EACH_ELEMENT(i) {
    float alpha = row->p[0], beta = row->p[1], decay = row->p[2], lr = row->p[3];
    w[i] = w[i] - lr * (alpha * g[i] + beta * sync[i] + decay * w[i]);
  }
}

extern "C" __global__ void secant_rebase(const Row* rows, int num_rows, float* w,
                                         const float* pulled, float* old, float* sync) {
  EACH_ELEMENT(i) {
    float shrink = row->p[0], rate = row->p[1], now = pulled[i];
    sync[i] = (shrink * old[i] - now) * rate;
    old[i] = now;
    w[i] = now;
  }
}

extern "C" __global__ void local_dc(const Row* rows, int num_rows, float* w, const float* g,
                                    float* old) {
  EACH_ELEMENT(i) {
    float control = row->p[0], sign = row->p[1], decay = row->p[2], lr = row->p[3];
    float before = w[i];
    float term = control * (g[i] * g[i]) * (before - old[i]);
    old[i] = before;
    w[i] = before - lr * (g[i] * sign + decay * before + term);
  }
}

extern "C" __global__ void local_dc_adaptive(const Row* rows, int num_rows, float* w,
                                             const float* g, float* old, float* square) {
  EACH_ELEMENT(i) {
    float control = row->p[0], sign = row->p[1], decay = row->p[2], lr = row->p[3];
    float keep = row->p[4], take = row->p[5], before = w[i], own = g[i] * g[i];
    float mean = keep * square[i] + take * own + 1e-7f;
    square[i] = mean;
    float term = control / sqrtf(mean) * own * (before - old[i]);
    old[i] = before;
    w[i] = before - lr * (g[i] * sign + decay * before + term);
  }
}

extern "C" __global__ void sgd_momentum(const Row* rows, int num_rows, float* w, const float* g,
                                        float* v) {
  EACH_ELEMENT(i) {
    float factor = row->p[0], decay = row->p[1], lr = row->p[2], keep = row->p[3];
    float take = row->p[4], ahead = row->p[5], along = row->p[6];
    float d = g[i] * factor + decay * w[i];
    float velocity = keep * v[i] + take * d;
    v[i] = velocity;
    w[i] = w[i] - lr * (ahead * d + along * velocity);
  }
}

// Adam, AdamW, and with `largest` AMSGrad.
extern "C" __global__ void adam(const Row* rows, int num_rows, float* w, const float* g, float* m,
                                float* v, float* largest) {
  EACH_ELEMENT(i) {
    float factor = row->p[0], decay = row->p[1], shrink = row->p[2], take1 = row->p[3];
    float keep2 = row->p[4], take2 = row->p[5], step_size = row->p[6];
    float correction2 = row->p[7], eps = row->p[8];
    float weight = w[i] * shrink;
    float d = g[i] * factor + decay * weight;
    float mean = m[i] + take1 * (d - m[i]);
    float square = keep2 * v[i] + take2 * (d * d);
    m[i] = mean;
    v[i] = square;
    if (largest) {
      square = square > largest[i] ? square : largest[i];
      largest[i] = square;
    }
    w[i] = weight - step_size * (mean / (sqrtf(square) / correction2 + eps));
  }
}
