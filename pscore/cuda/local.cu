// Local updates, and the shard's SGD run by a worker (mirror): one pass over one segment. The
// formulas are those of pscore/local and pscore/optimizers/sgd.py, in their order of operations.

#define EACH_ELEMENT(i, n)                                            \
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < n; i += gridDim.x * THREADS)

extern "C" __global__ void local_sgd(float* w, const float* g, int n, float sign, float decay,
                                     float lr) {
  EACH_ELEMENT(i, n) w[i] = w[i] - lr * (g[i] * sign + decay * w[i]);
}

extern "C" __global__ void local_glu(float* w, const float* g, float* p, int n, float alpha,
                                     float beta, float decay, float lr, float shrink,
                                     float inverse) {
  EACH_ELEMENT(i, n) {
    float now = w[i];
    float sync = (shrink * p[i] - now) * inverse;
    p[i] = now;
    w[i] = now - lr * (alpha * g[i] + beta * sync + decay * now);
  }
}

extern "C" __global__ void local_secant(float* w, const float* g, const float* sync, int n,
                                        float alpha, float beta, float decay, float lr) {
  EACH_ELEMENT(i, n) w[i] = w[i] - lr * (alpha * g[i] + beta * sync[i] + decay * w[i]);
}

extern "C" __global__ void secant_rebase(float* w, const float* pulled, float* old, float* sync,
                                         int n, float shrink, float rate) {
  EACH_ELEMENT(i, n) {
    float now = pulled[i];
    sync[i] = (shrink * old[i] - now) * rate;
    old[i] = now;
    w[i] = now;
  }
}

extern "C" __global__ void local_dc(float* w, const float* g, float* old, int n, float control,
                                    float sign, float decay, float lr) {
  EACH_ELEMENT(i, n) {
    float before = w[i];
    float term = control * (g[i] * g[i]) * (before - old[i]);
    old[i] = before;
    w[i] = before - lr * (g[i] * sign + decay * before + term);
  }
}

extern "C" __global__ void local_dc_adaptive(float* w, const float* g, float* old, float* square,
                                             int n, float control, float keep, float take,
                                             float sign, float decay, float lr) {
  EACH_ELEMENT(i, n) {
    float before = w[i], own = g[i] * g[i];
    float mean = keep * square[i] + take * own + 1e-7f;
    square[i] = mean;
    float term = control / sqrtf(mean) * own * (before - old[i]);
    old[i] = before;
    w[i] = before - lr * (g[i] * sign + decay * before + term);
  }
}

extern "C" __global__ void sgd_momentum(float* w, const float* g, float* v, int n, float factor,
                                        float decay, float lr, float keep, float take, float ahead,
                                        float along) {
  EACH_ELEMENT(i, n) {
    float d = g[i] * factor + decay * w[i];
    float velocity = keep * v[i] + take * d;
    v[i] = velocity;
    w[i] = w[i] - lr * (ahead * d + along * velocity);
  }
}
