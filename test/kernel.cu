/* Kernels of a caller's own, for test/kernel.c: lib/test/kernel.ptx, .fatbin and .cubin. */
struct triple {
  short a;
  char b[10];
};

__constant__ float scale = 2;
__device__ int counters[4];

extern "C" {

__global__ void add(const float *a, const float *b, float *sum, int n)
{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) sum[i] = a[i] + b[i];
}

__global__ void scaled(float *x, int n)
{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= scale;
  if (i == 0) counters[3] += n;
}

/* Every kind of argument; out gets each value. */
__global__ void kinds(int i, unsigned u, long long l, unsigned long long v, float f, double d, const double *in,
                      double *out, triple t)
{
  const double all[] = {(double)i, (double)u, (double)l, (double)v, f, d, in[0], (double)t.a, (double)t.b[9]};
  for (int j = 0; j < 9; ++j) out[j] = all[j];
}

__global__ void nothing() {}

__global__ void __launch_bounds__(128) limited(int *out)
{
  __shared__ int kept[256];
  kept[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = kept[127 - threadIdx.x];
}

/* Fills `words` words of dynamic shared memory, and sums them up. */
__global__ void shared_sum(int words, int *out)
{
  extern __shared__ int memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = i;
  __syncthreads();
  int sum = 0;
  for (int i = threadIdx.x; i < words; i += blockDim.x) sum += memory[words - 1 - i];
  atomicAdd(out, sum);
}

__global__ void cluster_size(int *out)
{
  unsigned size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  if (threadIdx.x == 0) out[blockIdx.x] = (int)size;
}

/* Blocks that wait for each other: ends only if all run at once. */
__global__ void meet(int *arrived, int *out)
{
  if (threadIdx.x) return;
  atomicAdd(arrived, 1);
  while (atomicAdd(arrived, 0) < (int)gridDim.x) {
  }
  out[blockIdx.x] = 1;
}

/* x becomes x + 1 after `clocks`: a chain of them must not overtake each other. */
__global__ void step(int *x, long long clocks)
{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const long long begin = clock64();
  while (clock64() - begin < clocks) {
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *x = 3 * *x + 1;
}

__global__ void crash(int *nowhere)
{
  *nowhere = 1;
}

} /* extern "C" */
