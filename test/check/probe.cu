/*
 * Probes for test/check/kernels.sh: what the library's kernels must not contain, one thing a kernel. What a probe has
 * beyond `plain...` (ordinary code) and `int_atomics` (allowed) is how that thing looks in this architecture's machine
 * code. Float atomics on shared memory are loops of compare-and-swap and cannot be seen this way.
 */
#define PROBE extern "C" __global__ void

PROBE plain(int *p, float *f, double *d)
{
  __shared__ int s[256];
  s[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  float x = f[s[255 - threadIdx.x]];
  for (int i = 0; i < p[1]; i++) x = x * f[i] + (float)p[i & 63];
  for (int i = 0; i < 64; i++) p[i] = p[i + 64] + 1;
  for (int i = 0; i < p[64]; i++)
    s[p[i] & 63] += s[p[i + 1] & 63] + p[i + 2] + (p[i + 3] << i) + (p[i + 4] >> 5) + (p[i + 5] << 7);
  if (p[0]) return;
  f[threadIdx.x] = x + __shfl_xor_sync(0xffffffff, x, 1);
  d[0] = d[1] + 1.;
}

PROBE int_atomics(int *p, unsigned long long *q)
{
  atomicAdd(p, 1);
  atomicMax(p + 1, 2);
  atomicOr(p + 2, 3);
  atomicAdd(q, 1ull);
  p[3] = atomicAdd(p + 4, 1) + atomicMax(p + 5, 3) + atomicCAS(p + 6, 0, 1) + (int)atomicAdd(q + 4, 2ull) +
         (int)atomicCAS(q + 5, 0ull, 1ull);
}

PROBE float_red(float *f) { atomicAdd(f, 1.f); }
PROBE float_atom(float *f) { f[1] = atomicAdd(f, 1.f); }
PROBE double_red(double *d) { atomicAdd(d, 1.); }
PROBE half_red(int *p) { asm volatile("red.global.add.noftz.f16x2 [%0], %1;" ::"l"(p), "r"(3) : "memory"); }

PROBE trap(int *p)
{
  if (p[0]) __trap();
}

PROBE local_memory(int *p)
{
  int l[64];
#pragma unroll 1
  for (int i = 0; i < 64; i++) l[p[i]] = p[i];
  p[0] = l[p[64]];
}

PROBE grid_wait(int *p)
{
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  p[0] = 1;
}

/* Three products whose sums are NUMBER (constraint ACCUMULATOR); REST: their operands and flags. */
#if __CUDA_ARCH_FEAT_SM90_ALL
#define MULTIPLY_THREE(NUMBER, ACCUMULATOR, INSTRUCTION, REST, ...)                                                    \
  NUMBER d[4] = {f[0], f[1], f[2], f[3]};                                                                              \
  _Pragma("unroll") for (int i = 0; i < 3; i++)                                                                        \
    asm volatile("wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned." INSTRUCTION " {%0, %1, %2, %3}, " REST      \
                 "; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"                                 \
                 : ACCUMULATOR(d[0]), ACCUMULATOR(d[1]), ACCUMULATOR(d[2]), ACCUMULATOR(d[3])                          \
                 : __VA_ARGS__);                                                                                       \
  f[0] = d[0] + d[1] + d[2] + d[3]
#else
#define MULTIPLY_THREE(...)
#endif

PROBE wgmma(float *f, unsigned long long a)
{
  MULTIPLY_THREE(float, "+f", "m64n8k16.f32.bf16.bf16", "%4, %4, 1, 1, 1, 0, 0", "l"(a));
  f[1] = 1;
}

PROBE wgmma_e4m3(float *f, unsigned long long a)
{
  MULTIPLY_THREE(float, "+f", "m64n8k32.f32.e4m3.e4m3", "%4, %4, 1, 1, 1", "l"(a));
  f[1] = 1;
}

PROBE wgmma_s8(int *f, unsigned long long a)
{
  MULTIPLY_THREE(int, "+r", "m64n8k32.s32.s8.s8", "%4, %4, 1", "l"(a));
  f[1] = 1;
}

PROBE wgmma_registers(float *f, unsigned long long b, unsigned a)
{
  MULTIPLY_THREE(float, "+f", "m64n8k16.f32.bf16.bf16", "{%4, %4, %4, %4}, %5, 1, 1, 1, 0", "r"(a), "l"(b));
  f[1] = 1;
}

PROBE plain_twin(int *p)
{
  __shared__ int l[64 * 64];
  int *mine = l + threadIdx.x * 64;
#pragma unroll 1
  for (int i = 0; i < 64; i++) mine[p[i]] = p[i];
  p[0] = mine[p[64]];
}
